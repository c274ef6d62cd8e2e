"""One NCCL communicator: the only module that calls ``cupy.cuda.nccl``.

The binding lacks much (facts of CuPy 14.2): no non-blocking communicators, so that what may hang is called
in a thread and given up after a while; no result codes above 6; and a communicator that is collected is
destroyed, which may hang, so none ever is.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from flagcx.errors import CommunicationError, MissingDependencyError, PeerTimeoutError
from flagcx.kernels.launch import Memories
from flagcx.schedule.model import Buffer
from flagcx.transport.base import Call
from flagcx.transport.nccl.native import UINT8, NativeForm
from flagcx.transport.nccl.plans import GroupedMove

logger = logging.getLogger("flagcx")

_LIMIT_S = 10.0


def load_nccl(cupy: ModuleType) -> ModuleType:
    """CuPy's binding of NCCL.

    Raises:
        MissingDependencyError: There is no NCCL library. The message has the pip command.
    """
    from cupy.cuda import nccl

    if not nccl.available:
        major = cupy.cuda.runtime.runtimeGetVersion() // 1000
        raise MissingDependencyError(
            f"GPU arrays need NCCL, which CuPy {cupy.__version__} does not find: "
            f"pip install nvidia-nccl-cu{major}"
        )
    return nccl


def make_unique_id(cupy: ModuleType) -> bytes:
    """A name for a new communicator: rank 0 makes it, and all ranks give it to theirs."""
    return bytes(value & 255 for value in load_nccl(cupy).get_unique_id())


def _unpack_id(data: bytes, cupy: ModuleType) -> Any:
    """CuPy before 14 has it as a tuple of signed numbers."""
    if int(cupy.__version__.split(".")[0]) >= 14:
        return data
    return tuple(value - 256 if value > 127 else value for value in data)


class NcclCommunicator:
    """One NCCL communicator, every call into which is bounded or watched.

    Args:
        cupy: The CuPy module.
        rank: This rank.
        size: Number of ranks.
        unique_id: What rank 0 got from ``make_unique_id``.
        timeout_s: How long to wait for the other ranks, in seconds.
    """

    def __init__(self, cupy: ModuleType, rank: int, size: int, unique_id: bytes, timeout_s: float) -> None:
        self._nccl, self._cupy = load_nccl(cupy), cupy
        self.rank, self.size = rank, size
        made: list[Any] = []

        def make() -> None:
            cupy.cuda.runtime.setDevice(device)
            made.append(self._nccl.NcclCommunicator(size, _unpack_id(unique_id, cupy), rank))

        device = cupy.cuda.runtime.getDevice()
        bounded(make, timeout_s, f"NCCL did not connect rank {rank} with the other {size - 1} ranks")
        self._comm = made[0]
        # CuPy destroys a communicator when it is collected, which may hang. This reference is never dropped.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._comm))

    def group(self, moves: Sequence[GroupedMove], memories: Memories, stream: int) -> None:
        """Enqueues sends and receives of bytes that run concurrently; all of them or, on a fault, none."""
        nccl, send, recv = self._nccl, self._comm.send, self._comm.recv
        try:
            nccl.groupStart()
            for sends, memory, offset, nbytes, peer in moves:
                (send if sends else recv)(memories[memory] + offset, nbytes, UINT8, peer, stream)
            nccl.groupEnd()
        except BaseException:
            self._discard_group()
            raise

    def _discard_group(self) -> None:
        """Closes a group that is open, if one is, such that nothing of it is launched.

        NCCL drops all operations of a group in which one was refused, so a send to a rank that does not
        exist makes it do that.
        """
        for call in (lambda: self._comm.send(0, 0, UINT8, self.size, 0), self._nccl.groupEnd):
            try:
                call()
            except Exception as error:
                logger.debug("while a group was discarded: %r", error)

    def issuer(self, call: Call, form: NativeForm) -> Callable[[int, int, int], None]:
        """A function (address of INPUT, address of OUTPUT, stream) that enqueues NCCL's own collective."""
        return getattr(self, f"_{call.schedule.collective}")(call, form)

    def _allreduce(self, call: Call, form: NativeForm) -> Callable[[int, int, int], None]:
        enqueue, count, kind, op = self._comm.allReduce, call.counts * form.per_element, form.type, form.op
        return lambda given, result, stream: enqueue(given, result, count, kind, op, stream)

    def _reduce(self, call: Call, form: NativeForm) -> Callable[[int, int, int], None]:
        enqueue, count, root = self._comm.reduce, call.counts * form.per_element, call.schedule.root
        return lambda given, result, stream: enqueue(
            given, result or given, count, form.type, form.op, root, stream
        )

    def _broadcast(self, call: Call, form: NativeForm) -> Callable[[int, int, int], None]:
        enqueue, count, root = self._comm.broadcast, call.counts * form.per_element, call.schedule.root
        return lambda given, result, stream: enqueue(given or result, result, count, form.type, root, stream)

    def _allgather(self, call: Call, form: NativeForm) -> Callable[[int, int, int], None]:
        bounds = _block_bounds(call, Buffer.OUTPUT, form)
        counts = [b - a for a, b in itertools.pairwise(bounds)]
        if len(set(counts)) == 1:
            gather = self._comm.allGather
            return lambda given, result, stream: gather(given, result, counts[0], form.type, stream)

        def enqueue(given: int, result: int, stream: int) -> None:
            for root, count in enumerate(counts):
                at = result + bounds[root]
                source = given if root == self.rank else at
                self._comm.broadcast(source, at, count, form.type, root, stream)

        return self._in_group(enqueue)

    def _reduce_scatter(self, call: Call, form: NativeForm) -> Callable[[int, int, int], None]:
        bounds = _block_bounds(call, Buffer.INPUT, form)
        counts = [b - a for a, b in itertools.pairwise(bounds)]
        if len(set(counts)) == 1:
            scatter = self._comm.reduceScatter
            return lambda given, result, stream: scatter(given, result, counts[0], form.type, form.op, stream)
        itemsize = call.dtype.numpy.itemsize // form.per_element

        def enqueue(given: int, result: int, stream: int) -> None:
            for root, count in enumerate(counts):
                source = given + bounds[root] * itemsize
                target = result if root == self.rank else source
                self._comm.reduce(source, target, count, form.type, form.op, root, stream)

        return self._in_group(enqueue)

    def _gather(self, call: Call, form: NativeForm) -> Callable[[int, int, int], None]:
        own = call.layout(call.program()).count(Buffer.INPUT) * form.per_element
        root = call.schedule.root
        assert root is not None
        moves = [(True, 0, 0, own, root)]
        if self.rank == root:
            moves += self._of_each(False, 1, _block_bounds(call, Buffer.OUTPUT, form))
        return self._exchange(moves)

    def _scatter(self, call: Call, form: NativeForm) -> Callable[[int, int, int], None]:
        own = call.layout(call.program()).count(Buffer.OUTPUT) * form.per_element
        root = call.schedule.root
        assert root is not None
        moves = [(False, 1, 0, own, root)]
        if self.rank == root:
            moves += self._of_each(True, 0, _block_bounds(call, Buffer.INPUT, form))
        return self._exchange(moves)

    def _alltoall(self, call: Call, form: NativeForm) -> Callable[[int, int, int], None]:
        moves = self._of_each(True, 0, _block_bounds(call, Buffer.INPUT, form))
        return self._exchange(moves + self._of_each(False, 1, _block_bounds(call, Buffer.OUTPUT, form)))

    @staticmethod
    def _of_each(sends: bool, memory: int, bounds: Sequence[int]) -> list[GroupedMove]:
        return [(sends, memory, a, b - a, p) for p, (a, b) in enumerate(itertools.pairwise(bounds))]

    def _exchange(self, moves: Sequence[GroupedMove]) -> Callable[[int, int, int], None]:
        wanted = tuple(m for m in moves if m[3])
        return lambda given, result, stream: self.group(wanted, (given, result, 0, 0), stream)

    def _in_group(self, enqueue: Callable[[int, int, int], None]) -> Callable[[int, int, int], None]:
        def together(given: int, result: int, stream: int) -> None:
            try:
                self._nccl.groupStart()
                enqueue(given, result, stream)
                self._nccl.groupEnd()
            except BaseException:
                self._discard_group()
                raise

        return together

    def _barrier(self, call: Call, form: NativeForm) -> Callable[[int, int, int], None]:
        token = self._cupy.zeros(1, "uint8")
        return lambda given, result, stream: self._comm.allReduce(
            token.data.ptr, token.data.ptr, 1, form.type, form.op, stream
        )

    def abort(self) -> None:
        """Aborts all operations and frees what they hold. May take long."""
        self._comm.abort()

    def destroy(self) -> None:
        """Destroys the communicator; all ranks must have done all operations."""
        bounded(self._comm.destroy, _LIMIT_S, f"NCCL did not close the communicator of rank {self.rank}")


def _block_bounds(call: Call, buffer: Buffer, form: NativeForm) -> list[int]:
    """The boundaries of the blocks of a buffer, in NCCL's elements."""
    bounds = call.layout(call.program()).bounds[buffer]
    return [b * form.per_element for b in bounds[:: call.schedule.chunks // call.schedule.size]]


def bounded(function: Callable[[], None], limit_s: float, what: str) -> None:
    """Runs a call that may hang in a thread, and gives up waiting for it after ``limit_s`` seconds."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="flagcx-nccl", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise PeerTimeoutError(f"{what} within {limit_s:g} s; {hints()}")
    if errors:
        raise CommunicationError(f"{what}: {told(errors[0])}; {hints()}") from errors[0]


def told(error: BaseException) -> str:
    """NCCL's error in words; CuPy knows codes up to 6 only and raises KeyError for others."""
    return f"NCCL's result code {error}" if isinstance(error, KeyError) else str(error)


def hints() -> str:
    """What to look at when NCCL fails."""
    state = os.statvfs("/dev/shm")
    free = state.f_bavail * state.f_frsize >> 20
    small = "" if free >= 256 else f"/dev/shm has {free} MiB left (docker run --shm-size=1g gives more); "
    return f"{small}run again with NCCL_DEBUG=WARN to see NCCL's own report"
