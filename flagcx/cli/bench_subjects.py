"""What ``flagcx bench`` measures: flagcx's choice, algorithms by name, and other libraries beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flagcx.algorithms import Algorithm
from flagcx.cli.bench_oracle import BenchMessage, Buffers
from flagcx.errors import ArgumentError, MissingDependencyError

if TYPE_CHECKING:
    from flagcx.cli.bench_task import BenchTask
    from flagcx.communicator import Communicator

PEERS = ("mpi", "gloo", "nccl")
SERVED = ("allreduce", "broadcast", "allgather")
"""Collectives in which the other libraries are measured."""
_OPS = ("sum", "prod", "min", "max")
_KINDS = "iuf"


class BenchSubject(Protocol):
    """One that is measured."""

    @property
    def name(self) -> str:
        """What tables and pictures call it; "" where it is the only one."""

    @property
    def other(self) -> bool:
        """Whether it is another library."""

    def bind(self, message: BenchMessage, buffers: Buffers, in_place: bool) -> Callable[[], object] | None:
        """A call on the given buffers, without arguments; None where it has no such form."""


@dataclass(frozen=True, slots=True)
class Ours:
    """flagcx, by an algorithm or by its own choice."""

    comm: Any
    algorithm: str | None
    name: str = ""
    other: bool = False

    def bind(self, message: BenchMessage, buffers: Buffers, in_place: bool) -> Callable[[], object]:
        """See ``BenchSubject.bind``."""
        name = message.collective
        options: dict[str, Any] = {"algorithm": self.algorithm}
        if message.op is not None:
            options["op"] = message.op
        if message.root is not None:
            options["root"] = message.root
        in_place_by_default = name == "broadcast" or (in_place and name in ("allreduce", "reduce"))
        if not in_place_by_default:
            options["out"] = buffers.recvbuf
        method = getattr(self.comm, name)
        first = buffers.recvbuf if name == "broadcast" else buffers.sendbuf
        return lambda: method(first, **options)


class Mpi:
    """MPI's own collectives on NumPy arrays, by mpi4py."""

    other = True

    def __init__(self) -> None:
        from mpi4py import MPI

        library = MPI.Get_library_version().split(",")[0].split("\n")[0].strip("\0")
        self._mpi, self.name = MPI, " ".join(library.split()[:3])

    def bind(self, message: BenchMessage, buffers: Buffers, in_place: bool) -> Callable[[], object] | None:
        """See ``BenchSubject.bind``."""
        mpi, comm = self._mpi, self._mpi.COMM_WORLD
        given: Any = mpi.IN_PLACE if in_place else buffers.sendbuf
        if message.collective == "broadcast":
            return lambda: comm.Bcast(buffers.recvbuf, root=message.root or 0)
        if message.collective == "allgather":
            return lambda: comm.Allgather(given, buffers.recvbuf)
        assert message.op is not None  # an all-reduce has one
        op = getattr(mpi, message.op.name.upper())
        return lambda: comm.Allreduce(given, buffers.recvbuf, op=op)


def subjects(comm: Communicator, task: BenchTask) -> Sequence[BenchSubject]:
    """What a task measures. All ranks must call it.

    Raises:
        MissingDependencyError: A library that is compared with is not installed.
    """
    names = task.algorithms
    if len(names) == 1 and not task.compare:
        return [Ours(comm, names[0])]
    found: list[BenchSubject] = [Ours(comm, name, f"flagcx {name}" if name else "flagcx") for name in names]
    for peer in task.compare:
        if peer == "mpi":
            found.append(Mpi())
        elif peer == "gloo":
            from flagcx.interop.gloo import Gloo

            found.append(Gloo(comm))
        else:
            found.append(Ours(comm, Algorithm.NATIVE, "NCCL's own", other=True))
    return found


def check_compare(task: BenchTask) -> None:
    """Refuses a comparison that cannot be made, before any rank is started.

    Raises:
        ArgumentError: There is no such library, or it lacks the collective, the dtype or the operation.
        MissingDependencyError: A library is not installed.
    """
    from importlib.util import find_spec

    unknown = [name for name in task.compare if name not in PEERS]
    if unknown:
        raise ArgumentError(f"--compare {unknown[0]} is not known; expected some of {','.join(PEERS)}")
    for peer in task.compare:
        if (peer == "nccl") != task.gpu:
            arrays = "CuPy arrays; add --gpu" if peer == "nccl" else "NumPy arrays; leave --gpu out"
            raise ArgumentError(f"--compare {peer} is for {arrays}")
        if peer == "nccl":
            continue
        if task.collective not in SERVED or task.op not in _OPS or np.dtype(task.dtype).kind not in _KINDS:
            raise ArgumentError(
                f"--compare {peer} measures {', '.join(SERVED)} of integers and floats by {', '.join(_OPS)}; "
                f"got {task.collective} of {task.dtype} by {task.op}"
            )
        module, extra = {"mpi": ("mpi4py", "mpi"), "gloo": ("torch", "torch")}[peer]
        if find_spec(module) is None:
            raise MissingDependencyError(
                f"--compare {peer} needs {module}, which is not installed: pip install 'flagcx[{extra}]'"
            )
