"""The memory of one compressed array between calls."""

from __future__ import annotations

import ast
import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from flagcx.arguments import on_device
from flagcx.compression.checkpoint import load_memory, on_host, save_memory
from flagcx.compression.codec import Scratch, captures, clear_nonfinite, namespace
from flagcx.errors import ArgumentError


class Ranks(Protocol):
    """The ranks that a slot is used with.

    Attributes:
        size: Number of ranks.
    """

    size: int

    def numbers(self, mine: Sequence[int]) -> np.ndarray:
        """The numbers of all ranks, a row for each rank."""


class Slot:
    """The memory of one array's compressed all-reduces; ``Feedback`` makes one for each array.

    Attributes:
        codec: The codec.
        shapes: Shapes of the parameters that lie end to end in the array; None for that of the array itself.
        residual: The part of this rank's gradients that is not sent yet (float32, one dimension), or None.
        velocity: The momentum of this rank's gradients, or None.
        step: Calls so far; the same on every rank.
        shape: The shape of the caller's arrays, if it matters to the codec.
        place: The rank, and the number of ranks, of the calls.
        memory: State of the codec's all-reduce, by name.
        resumes: Whether a state was loaded that no call has used yet.
        ranks: Returns the ranks that it was used with last.
        plans: The plans of calls with this slot.
        lasting: Whether the slot belongs to one array. Otherwise all arrays of one length share it, and it
            keeps nothing that depends on an array's content.
    """

    def __init__(
        self,
        codec: Any,
        key: Hashable = None,
        shapes: Sequence[tuple[int, ...]] | None = None,
        momentum: float = 0.0,
        residual: bool = True,
        clip: float | None = None,
        lasting: bool = True,
    ) -> None:
        self.codec, self.key, self.lasting = codec, key, lasting
        self.shapes = None if shapes is None else tuple(tuple(shape) for shape in shapes)
        self._momentum, self._keeps, self._clip = momentum, residual, clip
        self.plans: dict[tuple, Any] = {}
        self.reset()

    @property
    def settings(self) -> str:
        """How it is used, in words; the same on every rank."""
        clip = "" if self._clip is None else f", clipped to {self._clip:g}"
        momentum = f", momentum {self._momentum:g}" if self._momentum else ""
        return f"{', with a residual' if self._keeps else ''}{momentum}{clip}"

    def reset(self) -> None:
        """Clears the memory, as at the start of a training. Call it on all ranks."""
        self.residual: Any = None
        self.velocity: Any = None
        self.step = 0
        self.memory: dict[str, Any] = {}
        self.place, self.resumes = (0, 1), False
        self._count: int | None = None
        self.shape: tuple[int, ...] | None = None
        self._size = 0
        self.ranks: Callable[[], Any] = lambda: None

    def check_shapes(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Raises ArgumentError where the slot is not one for parameters of these shapes."""
        given = tuple(tuple(shape) for shape in shapes)
        if given != self.shapes:
            known = "no shapes" if self.shapes is None else f"the shapes {_short(self.shapes)}"
            raise ArgumentError(
                f"the slot {self.key!r} of this Feedback was made for {known}, and is asked for with "
                f"{_short(given)}; use another key, or feedback.drop({self.key!r}) first"
            )

    def begin(self, x: Any, shape: tuple[int, ...] | None = None) -> None:
        """Counts a call with ``x``; the first call allocates the residual and the velocity.

        Args:
            x: The array, in one dimension.
            shape: The caller's, if it matters to the codec.

        Raises:
            ArgumentError: Earlier calls had another number of elements or another shape, or the slot is new
                inside a capture.
        """
        if self._count is None:
            total = x.size if self.shapes is None else sum(map(math.prod, self.shapes))
            if total != x.size:
                raise ArgumentError(
                    f"the shapes of slot {self.key!r} have {total} elements together, but its array has "
                    f"{x.size}"
                )
            keeps = self._keeps and not self.codec.lossless
            if (keeps or self._momentum) and on_device(x) and captures(x):
                raise ArgumentError(
                    f"the slot {self.key!r} of this Feedback is new: a graph that captures its first call "
                    f"would clear its memory in every replay; make one call before the capture"
                )
            if self.shape not in (None, shape):
                raise self._other_shape(shape)
            self._allocate(x, keeps)
            self._count, self.shape = x.size, shape
        elif self._count != x.size:
            raise ArgumentError(
                f"the slot {self.key!r} of this Feedback remembers an array of {self._count} elements, and "
                f"got one of {x.size}; use a slot for each array: compression=feedback[key]"
            )
        elif self.shape != shape and self.shapes is None:
            raise self._other_shape(shape)
        self.step += 1

    def _other_shape(self, shape: tuple[int, ...] | None) -> ArgumentError:
        return ArgumentError(
            f"the slot {self.key!r} of this Feedback remembers the matrix of an array of shape {self.shape}, "
            f"and got an array of shape {shape}; use a slot for each array, or reshape it"
        )

    def meet(self, peers: Ranks) -> None:
        """Agrees on the step with ranks that are new to the slot.

        Ranks that went on without one that was lost may have left off in different steps, and one that was
        started again has none. Then what must be alike on all ranks, such as factors, begins anew.

        Args:
            peers: The ranks; all of them call it together.
        """
        self.ranks = weakref.ref(peers)
        if not self.lasting:
            return
        told = peers.numbers([self.step, self._size])
        if (told != told[0]).any() or told[0, 1] not in (0, peers.size):
            self.memory.clear()
        self.step, self._size = int(told[:, 0].max()), peers.size

    def source(self, x: Any, scratch: Scratch, ranks: int) -> Any:
        """This step's contribution before the residual: clipped, and with momentum.

        Args:
            x: The gradient; it is not written.
            scratch: Holds the clipped gradient.
            ranks: Number of ranks; each clips at ``clip / sqrt(ranks)``.
        """
        if self._clip is not None:
            norm, limit = _norm(x), self._clip / math.sqrt(ranks)
            if limit < norm < math.inf:
                clipped = scratch.get(f"clipped {x.dtype.itemsize}", x.size, x.dtype, x)
                namespace(x).multiply(x, x.dtype.type(limit / norm), out=clipped)
                x = clipped
        if self.velocity is None:
            return x
        self.velocity *= self.velocity.dtype.type(self._momentum)
        self.velocity += x
        return self.velocity

    def total(self, x: Any, scratch: Scratch, ranks: int) -> Any:
        """This step's contribution with the residual, which then holds it; see ``source``."""
        source = self.source(x, scratch, ranks)
        if self.residual is None:
            return source
        self.residual += source
        return self.residual

    def ahead(self, kept: Any, scratch: Scratch) -> Any:
        """What is kept, with all that momentum would still add to it: m + m^2 + ... of the velocity.

        It is 1 / (1 - m) of the gradients since ``sent`` cleared an element, which without compression would
        move the parameters as far, only later.
        """
        whole = scratch.get("ahead", kept.size, np.float32, kept)
        namespace(kept).multiply(self.velocity, np.float32(self._momentum / (1 - self._momentum)), out=whole)
        whole += kept
        return whole

    def state_dict(self) -> dict[str, Any]:
        """What the slot remembers; see ``Feedback.state_dict``."""
        state: dict[str, Any] = {"step": self.step, "rank": self.place[0], "ranks": self.place[1]}
        for name, shape in (("shapes", self.shapes), ("shape", self.shape)):
            if shape is not None:
                state[name] = repr(shape)
        for name, array in (("residual", self.residual), ("velocity", self.velocity)):
            if array is not None:
                state[name] = on_host(array)
        return state | save_memory(self.memory)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` gave. The first call moves it to where the arrays are."""
        self.reset()
        self.step, self.place = int(state["step"]), (int(state["rank"]), int(state["ranks"]))
        self.residual, self.velocity = (
            np.array(state[name]) if name in state else None for name in ("residual", "velocity")
        )
        self.shape = ast.literal_eval(str(state["shape"])) if "shape" in state else None
        self.memory, self.resumes = load_memory(state), True

    def drop_own(self) -> None:
        """Drops what the memory has of one rank alone."""
        self.residual = self.velocity = None
        self.memory.pop("threshold", None)

    def drop_common(self) -> None:
        """Drops what the memory has of a number of ranks, and what all of them must have alike."""
        for name in ("regions", "loaded"):
            self.memory.pop(name, None)

    def _allocate(self, x: Any, keeps: bool) -> None:
        """Makes the residual and the velocity for arrays like ``x``, from what was loaded if anything was.

        Raises:
            ArgumentError: What was loaded is of another length.
        """
        xp = namespace(x)
        for name, kept, dtype in (
            ("residual", keeps, np.dtype(np.float32)),
            ("velocity", bool(self._momentum), x.dtype),
        ):
            loaded = getattr(self, name) if kept else None
            if loaded is not None and loaded.size != x.size:
                raise ArgumentError(
                    f"the slot {self.key!r} has loaded the {name} of an array of {loaded.size} elements, and "
                    f"got one of {x.size}"
                )
            made = (
                xp.asarray(loaded, dtype) if loaded is not None else xp.zeros(x.size, dtype) if kept else None
            )
            setattr(self, name, made)
        if "factors" in self.memory:
            self.memory["factors"] = [xp.asarray(factors) for factors in self.memory["factors"]]
        self.resumes = False

    def sent(self, indices: Any) -> None:
        """Clears the elements that were sent, in the residual and in the momentum that led to it."""
        for kept in (self.residual, self.velocity):
            if kept is not None:
                kept[indices] = 0

    def sent_all(self) -> None:
        """Clears the residual, since all of it was sent. Momentum goes on: none of it was late."""
        if self.residual is not None:
            self.residual[...] = 0
        self.heal_velocity()

    def heal(self) -> None:
        """Clears what is infinite or NaN after a step that had such numbers: they would stay for ever."""
        if self.residual is not None:
            clear_nonfinite(self.residual)
        self.heal_velocity()

    def heal_velocity(self) -> None:
        """Does so in the momentum alone."""
        if self.velocity is not None:
            clear_nonfinite(self.velocity)

    @property
    def keeps(self) -> bool:
        """Whether lost parts of a lossy codec are kept for the next call."""
        return self._keeps

    def __repr__(self) -> str:
        count = "nothing yet" if self._count is None else f"{self._count} elements"
        return f"<flagcx.compression.Slot {self.key!r} of {self.codec}, {count}, {self.step} steps>"


def _short(shapes: Sequence[tuple[int, ...]]) -> str:
    more = f" and {len(shapes) - 4} more" if len(shapes) > 4 else ""
    return ", ".join(map(str, shapes[:4])) + more


def _norm(x: Any) -> float:
    """The norm of an array whose squares may be out of range."""
    norm = math.sqrt(float(namespace(x).vdot(x, x)))
    if math.isinf(norm):
        wide = x.astype(np.float64)
        norm = math.sqrt(float(namespace(x).vdot(wide, wide)))
    return norm
