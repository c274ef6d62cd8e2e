"""One NCCL communicator: the only module that calls ``cupy.cuda.nccl``.

The binding (of CuPy 14.2) has no non-blocking communicators, so a call that may hang runs in a thread with a
time limit. It knows no result codes above 6. And it destroys a communicator that is garbage-collected, which
may hang, so none ever is.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from flagcx.bootstrap.bounded import bounded as run_bounded
from flagcx.errors import CommunicationError, FlagcxError, MissingDependencyError, PeerTimeoutError
from flagcx.kernels.launch import Memories
from flagcx.schedule.model import Buffer
from flagcx.transport.base import Call
from flagcx.transport.nccl.native import UINT8, NativeForm

logger = logging.getLogger("flagcx")

GroupedMessage = tuple[bool, int, int, int, int]
"""Whether it is a send, the memory's number, the offset and length in bytes, and the peer."""

Enqueue = Callable[[int, int, int], None]
"""(address of sendbuf, address of recvbuf, stream): enqueues a collective."""

_LIMIT_S = 10.0
_REASON_S = 1.0


def _nothing() -> None:
    pass


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
    """The id of a new communicator: rank 0 makes it, and all ranks pass it to ``NcclCommunicator``."""
    return bytes(value & 255 for value in load_nccl(cupy).get_unique_id())


def _unpack_id(data: bytes, cupy: ModuleType) -> Any:
    """The id in CuPy's form, which was a tuple of signed numbers before CuPy 14."""
    if int(cupy.__version__.split(".")[0]) >= 14:
        return data
    return tuple(value - 256 if value > 127 else value for value in data)


class NcclCommunicator:
    """One NCCL communicator; connecting and destroying it have time limits.

    Args:
        cupy: The CuPy module.
        rank: This rank.
        size: Number of ranks.
        unique_id: The result of rank 0's ``make_unique_id``.
        timeout_s: Time limit for all ranks to connect, in seconds.
        check: Raises if a rank is known to have died; called while they connect.
    """

    def __init__(
        self,
        cupy: ModuleType,
        rank: int,
        size: int,
        unique_id: bytes,
        timeout_s: float,
        check: Callable[[], object] = _nothing,
    ) -> None:
        self._nccl, self._cupy = load_nccl(cupy), cupy
        self.rank, self.size = rank, size
        made: list[Any] = []

        def make() -> None:
            cupy.cuda.runtime.setDevice(device)
            made.append(self._nccl.NcclCommunicator(size, _unpack_id(unique_id, cupy), rank))

        device = cupy.cuda.runtime.getDevice()
        bounded(make, timeout_s, f"NCCL did not connect rank {rank} with the other {size - 1} ranks", check)
        self._comm = made[0]
        # CuPy destroys a communicator that is collected, which may hang. This reference is never dropped.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._comm))

    def group(self, messages: Sequence[GroupedMessage], memories: Memories, stream: int) -> None:
        """Enqueues sends and receives of bytes that run concurrently: all or, after an error, none."""
        nccl, send, recv = self._nccl, self._comm.send, self._comm.recv
        try:
            nccl.groupStart()
            for sends, memory, offset, nbytes, peer in messages:
                (send if sends else recv)(memories[memory] + offset, nbytes, UINT8, peer, stream)
            nccl.groupEnd()
        except BaseException:
            self._discard_group()
            raise

    def _discard_group(self) -> None:
        """Closes a group that is open without launching any of its operations.

        NCCL drops all operations of a group if it refuses one, here a send to a rank that does not exist.
        """
        for call in (lambda: self._comm.send(0, 0, UINT8, self.size, 0), self._nccl.groupEnd):
            try:
                call()
            except Exception as error:
                logger.debug("while a group was discarded: %r", error)

    def native(self, call: Call, form: NativeForm) -> Enqueue:
        """A function that enqueues NCCL's own collective."""
        return getattr(self, f"_{call.schedule.collective}")(call, form)

    def _allreduce(self, call: Call, form: NativeForm) -> Enqueue:
        enqueue, count, kind, op = self._comm.allReduce, call.counts * form.per_element, form.type, form.op
        return lambda sendbuf, recvbuf, stream: enqueue(sendbuf, recvbuf, count, kind, op, stream)

    def _reduce(self, call: Call, form: NativeForm) -> Enqueue:
        enqueue, count, root = self._comm.reduce, call.counts * form.per_element, call.schedule.root
        return lambda sendbuf, recvbuf, stream: enqueue(
            sendbuf, recvbuf or sendbuf, count, form.type, form.op, root, stream
        )

    def _broadcast(self, call: Call, form: NativeForm) -> Enqueue:
        enqueue, count, root = self._comm.broadcast, call.counts * form.per_element, call.schedule.root
        return lambda sendbuf, recvbuf, stream: enqueue(
            sendbuf or recvbuf, recvbuf, count, form.type, root, stream
        )

    def _allgather(self, call: Call, form: NativeForm) -> Enqueue:
        bounds = _block_bounds(call, Buffer.OUTPUT, form)
        counts = [b - a for a, b in itertools.pairwise(bounds)]
        if len(set(counts)) == 1:
            gather = self._comm.allGather
            return lambda sendbuf, recvbuf, stream: gather(sendbuf, recvbuf, counts[0], form.type, stream)

        def enqueue(sendbuf: int, recvbuf: int, stream: int) -> None:
            for root, count in enumerate(counts):
                at = recvbuf + bounds[root]
                source = sendbuf if root == self.rank else at
                self._comm.broadcast(source, at, count, form.type, root, stream)

        return self._in_group(enqueue)

    def _reduce_scatter(self, call: Call, form: NativeForm) -> Enqueue:
        bounds = _block_bounds(call, Buffer.INPUT, form)
        counts = [b - a for a, b in itertools.pairwise(bounds)]
        if len(set(counts)) == 1:
            scatter = self._comm.reduceScatter
            return lambda sendbuf, recvbuf, stream: scatter(
                sendbuf, recvbuf, counts[0], form.type, form.op, stream
            )
        itemsize = call.dtype.numpy.itemsize // form.per_element

        def enqueue(sendbuf: int, recvbuf: int, stream: int) -> None:
            for root, count in enumerate(counts):
                source = sendbuf + bounds[root] * itemsize
                target = recvbuf if root == self.rank else source
                self._comm.reduce(source, target, count, form.type, form.op, root, stream)

        return self._in_group(enqueue)

    def _gather(self, call: Call, form: NativeForm) -> Enqueue:
        own = call.layout(call.program()).count(Buffer.INPUT) * form.per_element
        root = call.schedule.root
        assert root is not None
        messages = [(True, 0, 0, own, root)]
        if self.rank == root:
            messages += self._of_each(False, 1, _block_bounds(call, Buffer.OUTPUT, form))
        return self._exchange(messages)

    def _scatter(self, call: Call, form: NativeForm) -> Enqueue:
        own = call.layout(call.program()).count(Buffer.OUTPUT) * form.per_element
        root = call.schedule.root
        assert root is not None
        messages = [(False, 1, 0, own, root)]
        if self.rank == root:
            messages += self._of_each(True, 0, _block_bounds(call, Buffer.INPUT, form))
        return self._exchange(messages)

    def _alltoall(self, call: Call, form: NativeForm) -> Enqueue:
        messages = self._of_each(True, 0, _block_bounds(call, Buffer.INPUT, form))
        return self._exchange(messages + self._of_each(False, 1, _block_bounds(call, Buffer.OUTPUT, form)))

    @staticmethod
    def _of_each(sends: bool, memory: int, bounds: Sequence[int]) -> list[GroupedMessage]:
        return [(sends, memory, a, b - a, p) for p, (a, b) in enumerate(itertools.pairwise(bounds))]

    def _exchange(self, messages: Sequence[GroupedMessage]) -> Enqueue:
        sized = tuple(m for m in messages if m[3])
        return lambda sendbuf, recvbuf, stream: self.group(sized, (sendbuf, recvbuf, 0, 0), stream)

    def _in_group(self, enqueue: Enqueue) -> Enqueue:
        def together(sendbuf: int, recvbuf: int, stream: int) -> None:
            try:
                self._nccl.groupStart()
                enqueue(sendbuf, recvbuf, stream)
                self._nccl.groupEnd()
            except BaseException:
                self._discard_group()
                raise

        return together

    def _barrier(self, call: Call, form: NativeForm) -> Enqueue:
        token = self._cupy.zeros(1, "uint8")
        return lambda sendbuf, recvbuf, stream: self._comm.allReduce(
            token.data.ptr, token.data.ptr, 1, form.type, form.op, stream
        )

    def abort(self) -> None:
        """Aborts all operations and frees their resources. May take long."""
        self._comm.abort()

    def destroy(self) -> None:
        """Destroys the communicator; all operations of all ranks must be done."""
        bounded(self._comm.destroy, _LIMIT_S, f"NCCL did not close the communicator of rank {self.rank}")


def _block_bounds(call: Call, buffer: Buffer, form: NativeForm) -> list[int]:
    """The boundaries of the blocks of a buffer, in NCCL's elements."""
    bounds = call.layout(call.program()).bounds[buffer]
    return [b * form.per_element for b in bounds[:: call.schedule.chunks // call.schedule.size]]


def bounded(
    function: Callable[[], None], limit_s: float, what: str, check: Callable[[], object] = _nothing
) -> None:
    """Runs a call that may hang in a thread and waits for it for at most ``limit_s`` seconds.

    Args:
        function: The call.
        limit_s: The limit.
        what: The failure in words, for the error.
        check: Raises if a rank is known to have died, which NCCL may know a moment before.

    Raises:
        PeerTimeoutError: The call has not returned.
        PeerDiedError: A rank died meanwhile.
        CommunicationError: The call raised an exception.
    """
    try:
        returned = run_bounded(function, limit_s, check)
    except FlagcxError:
        raise
    except BaseException as error:
        end = time.monotonic() + (0.0 if check is _nothing else _REASON_S)
        while time.monotonic() < end:
            check()
            time.sleep(_REASON_S / 20)
        raise CommunicationError(f"{what}: {message_of(error)}; {hints()}") from error
    if not returned:
        raise PeerTimeoutError(f"{what} within {limit_s:g} s; {hints()}")


def message_of(error: BaseException) -> str:
    """NCCL's error in words; CuPy raises KeyError for result codes above 6."""
    return f"NCCL's result code {error}" if isinstance(error, KeyError) else str(error)


def hints() -> str:
    """Advice for an error of NCCL."""
    state = os.statvfs("/dev/shm")
    free = state.f_bavail * state.f_frsize >> 20
    small = "" if free >= 256 else f"/dev/shm has {free} MiB left (docker run --shm-size=1g gives more); "
    return f"{small}run again with NCCL_DEBUG=WARN to see NCCL's own report"
