"""The gradients that a synchronizer was made for, and what each step may give in their place."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from flagcx.dtypes import dtype_of, resolve_op
from flagcx.errors import ArgumentError, ArrayError
from flagcx.executor.host import Executor
from flagcx.gradients.apart import check_apart
from flagcx.gradients.buckets import Gradient

if TYPE_CHECKING:
    from flagcx.communicator import Communicator


class KnownGradients:
    """Gradients by number, in the order in which they were given.

    Args:
        comm: The communicator.
        parameters: The arrays by name, or a list of them, whose names are then 0, 1, ...
        op: "avg" or "sum".

    Attributes:
        numbers: The number of each name.
        executors: What runs the calls of each.
        arrays: The arrays.
        gradients: The properties that every step shares.

    Raises:
        ArgumentError: Two arrays share memory, there is none, or ``comm`` is no communicator.
        ArrayError: The communicator does not take one of the arrays.
    """

    def __init__(self, comm: Communicator, parameters: Mapping[Any, Any] | Iterable[Any], op: str) -> None:
        if not hasattr(comm, "executor_of"):
            raise ArgumentError(f"comm must be a communicator, as of fc.init(), got {type(comm).__name__}")
        if not isinstance(parameters, Iterable):
            raise ArgumentError(
                f"parameters must be the gradients by name, or a list, got {type(parameters).__name__}"
            )
        named: Mapping = parameters if isinstance(parameters, Mapping) else dict(enumerate(parameters))
        if not named:
            raise ArgumentError("parameters are empty; expected at least one gradient")
        self.numbers = {name: number for number, name in enumerate(named)}
        self.executors: list[Executor] = [comm.executor_of(array) for array in named.values()]
        self.arrays = tuple(
            executor.take(array, f"the gradient {name!r}", False)
            for executor, (name, array) in zip(self.executors, named.items(), strict=True)
        )
        check_apart(list(named), self.arrays)
        self._kinds = [(tuple(array.shape), array.dtype) for array in self.arrays]
        self.gradients: list[Gradient] = []
        for name, array, executor in zip(named, self.arrays, self.executors, strict=True):
            dtype = dtype_of(array.dtype)
            resolve_op(op, dtype)
            place = "host" if executor is comm._host else "device"
            self.gradients.append(Gradient(name, tuple(array.shape), dtype.name, array.nbytes, place))

    def take(self, number: int, gradient: Any) -> Any:
        """The array of a step: the one that was given at the start if None.

        Raises:
            ArrayError: It has another shape or dtype.
        """
        given = self.arrays[number] if gradient is None else gradient
        known = self.gradients[number]
        array = self.executors[number].take(given, f"the gradient {known.name!r}", True)
        if (array.shape, array.dtype) != self._kinds[number]:
            raise ArrayError(
                f"the gradient {known.name!r} has shape {tuple(array.shape)} and dtype {array.dtype}; the "
                f"synchronizer was made for {known}: make a new one where a model changes"
            )
        return array

    def unknown(self, name: Hashable) -> ArgumentError:
        """The error about a name that no gradient has."""
        names = ", ".join(repr(g.name) for g in self.gradients[:8])
        more = ", ..." if len(self.gradients) > 8 else ""
        return ArgumentError(f"there is no gradient {name!r}; expected one of {names}{more}")
