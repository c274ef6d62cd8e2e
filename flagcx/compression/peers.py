"""The calls that a compressed all-reduce makes to the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from flagcx.compression.codec import Scratch
from flagcx.compression.slot import Slot
from flagcx.dtypes import OPS, DType, ReduceOp, dtype_of
from flagcx.kernels.cuda import import_cupy
from flagcx.selection.candidates import Request
from flagcx.transport.base import Call, Coder, Plan
from flagcx.transport.device import check_alignment

if TYPE_CHECKING:
    from flagcx.executor.host import Executor

CodecT = TypeVar("CodecT")
_MOST_ROOMY = 256


class Peers:
    """The ranks of an executor. All ranks make the same calls in the same order.

    Args:
        executor: Runs the plans of the calls.
        on_device: Whether its arrays are on a GPU, where a stream takes the place of the thread.
        scratch: Arrays for intermediate results; new ones if None.
        beside: Whether the calls run beside a computation, to which they leave most of the GPU.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        on_device: Whether arrays are on a GPU.
        scratch: Arrays for intermediate results, shared by all compressed calls of the communicator.
        beside: Whether the calls run beside a computation.
        over_hosts: Whether they are of several hosts, and those of a host share memory.
        sent_nbytes: Bytes that this rank has sent in all calls: of an all-reduce 2 (n-1)/n of its array.
    """

    def __init__(
        self, executor: Executor, on_device: bool, scratch: Scratch | None = None, beside: bool = False
    ) -> None:
        self.rank, self.size, self.on_device = executor.rank, executor.size, on_device
        self.scratch, self.sent_nbytes = scratch or Scratch(), 0
        self.beside = beside
        self.over_hosts = not on_device and executor.transport.shares_memory
        self._roomy: dict[int, tuple[Plan, Plan]] = {}
        self._executor = executor
        self._thread: ThreadPoolExecutor | None = None
        self._bytes = dtype_of(np.uint8)
        self._what = ""

    def enter(self, what: str, *arrays: Any) -> None:
        """Begins a compressed all-reduce.

        On a GPU the current stream waits until other streams have finished with the scratch arrays.

        Args:
            what: The all-reduce in words, the same on every rank: calls that follow are compared by it.
            arrays: The caller's arrays.

        Raises:
            ArrayError: A caller's array has an address that kernels cannot take.
        """
        self._what = what
        if self.on_device:
            check_alignment(arrays[0].dtype.alignment, *(array.data.ptr for array in arrays))
            self._executor.transport.transfer([], [])

    def alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Sends block q of ``sendbuf`` (uint8) to rank q; block q of ``recvbuf`` comes from rank q."""
        block = sendbuf.size // self.size
        self.sent_nbytes += block * (self.size - 1)
        self._plan("alltoall", block, self._bytes).run(sendbuf, recvbuf)

    def allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Fills ``recvbuf`` (uint8) with the ``sendbuf`` of every rank."""
        self.sent_nbytes += sendbuf.size * (self.size - 1)
        self._plan("allgather", sendbuf.size, self._bytes).run(sendbuf, recvbuf)

    def allreduce(self, sendbuf: Any, recvbuf: Any, op: ReduceOp = OPS["sum"]) -> None:
        """Writes the sum over the ranks, or what ``op`` says, into ``recvbuf``, which may be ``sendbuf``."""
        in_place = sendbuf is recvbuf
        self.sent_nbytes += 2 * (self.size - 1) * sendbuf.nbytes // self.size
        self._plan("allreduce", sendbuf.size, dtype_of(sendbuf.dtype), op, in_place).run(sendbuf, recvbuf)

    def between_hosts(self, count: int, in_place: bool, coder: Callable[[int, int], Coder]) -> Plan:
        """The plan of a sum of float32 that is coded between hosts alone; see ``transport.base.Call.coder``.

        Args:
            count: Elements of the message.
            in_place: Whether the result replaces it.
            coder: Codes the messages between hosts.
        """
        executor, single, op = self._executor, dtype_of(np.float32), OPS["sum"]
        request = Request("allreduce", count * single.numpy.itemsize, self.size, False, single, op)
        choice = executor.selector.choose_named("hierarchical", request)
        schedule = choice.build("allreduce", self.size, None)
        call = Call(schedule, self.rank, count, single, op, in_place, "", self._what, coder)
        return executor.transport.compile(call)

    def _plan(
        self, collective: str, count: int, dtype: DType, op: ReduceOp | None = None, in_place: bool = False
    ) -> Plan:
        plan = self._executor.find(collective, count, dtype, op, None, None, in_place, self._what)
        if not self.beside:
            return plan
        known = self._roomy.get(id(plan))
        if known is None or known[0] is not plan:
            if len(self._roomy) >= _MOST_ROOMY:
                self._roomy.clear()
            known = self._roomy[id(plan)] = plan, self._executor.beside(plan)
        return known[1]

    def exchange(self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]]) -> None:
        """Sends arrays to ranks and receives arrays from ranks, all at once."""
        if sends or receives:
            self.sent_nbytes += sum(array.nbytes for array, _ in sends)
            self._executor.transport.transfer(sends, receives)

    def numbers(self, mine: Sequence[int]) -> np.ndarray:
        """The numbers of all ranks (as many on each), a row for each rank, as int64 on the host."""
        own = np.array(mine, np.int64)
        gathered = np.empty((self.size, own.size), np.int64)
        self.sent_nbytes += own.nbytes * (self.size - 1)
        plan = self._plan("allgather", own.size, dtype_of(np.int64))
        if not self.on_device:
            plan.run(own, gathered.reshape(-1))
            return gathered
        cupy = import_cupy()
        there = cupy.empty(gathered.size, np.int64)
        plan.run(cupy.asarray(own), there)
        return there.get().reshape(gathered.shape)

    @contextmanager
    def overlap(self) -> Iterator[None]:
        """A block in which this thread computes while submitted calls run, which leave it the core."""
        progress = self._executor.transport.progress
        if progress is None:
            yield
            return
        before, progress.background = progress.background, True
        try:
            yield
        finally:
            progress.background = before

    def submit(self, call: Callable[[], object]) -> Future:
        """Makes a call on another thread, after those submitted before; on a GPU at once."""
        if self.on_device:
            call()
            future: Future = Future()
            future.set_result(None)
            return future
        if self._thread is None:
            ignore = partial(np.seterr, all="ignore")
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="flagcx-compressed", initializer=ignore)
        return self._thread.submit(call)

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


class CodecReduce(Generic[CodecT]):
    """Base of the all-reduces of codecs, whose ``run`` takes float32 arrays of one dimension.

    Args:
        peers: The ranks.
        codec: The codec.
        count: Elements.
        op: The sum, the average, or a scaled sum.
        slot: Memory between calls.

    Attributes:
        waits: Whether the host may wait for a GPU after ``run``. Otherwise the slot's flag says there, then,
            whether the step was spoilt.
        spoilt: Whether ``run`` saw that the result has infinity or NaN; None where it did not look. That
            takes less than a look at the whole result where this is made from few numbers.
    """

    waits: bool = True
    spoilt: bool | None = None

    def __init__(self, peers: Peers, codec: CodecT, count: int, op: ReduceOp, slot: Slot) -> None:
        self._peers, self._codec, self._slot = peers, codec, slot
        self._count, self._op = count, op
        self._factor = 1 / peers.size if op.average else 1.0 if op.scale is None else op.scale

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        """Runs the all-reduce once, between ``begin`` and ``end`` of the slot."""
        raise NotImplementedError
