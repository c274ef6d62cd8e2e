"""Runs calls for arrays on a GPU: calls are enqueued on streams, and started work needs no thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from time import monotonic
from typing import Any, NoReturn

from flagcx.algorithms.candidate import Candidate
from flagcx.algorithms.catalogue import Algorithm
from flagcx.errors import ArrayError, CommunicatorError
from flagcx.executor.host import Executor
from flagcx.executor.point_to_point import TWO_THREADS, Messages
from flagcx.executor.staging import FunctionPlan
from flagcx.executor.work import Work, seconds
from flagcx.forks import FORKED, keep_in_child
from flagcx.profiler import RecordBuffer, RecordedPlan
from flagcx.selection.device_rules import DeviceRules
from flagcx.selection.selector import Selector
from flagcx.transport.base import Call, Plan
from flagcx.transport.nccl.native import native_schedule
from flagcx.transport.nccl.transport import NcclTransport


class DeviceExecutor(Executor):
    """Plans and order of one communicator's calls on CuPy arrays.

    Args:
        transport: What carries the arrays.
        selector: What chooses how a call runs; by the rule alone if None.
        ring: Where runs are recorded, if they are.
    """

    transport: NcclTransport

    def __init__(
        self, transport: NcclTransport, selector: Selector | None = None, ring: RecordBuffer | None = None
    ) -> None:
        selector = selector or Selector(DeviceRules(transport))
        super().__init__(transport.rank, transport.size, transport, selector, ring)
        self.array_class = transport.array_class
        # CuPy makes an object for each look at ``flags``, which costs as much as all the rest.
        quick = hasattr(transport.array_class, "_c_contiguous")
        self.is_contiguous = attrgetter("_c_contiguous" if quick else "flags.c_contiguous")
        self._enter, self._exit = self.turn.acquire, self.turn.release

    def is_plain(self, array: Any) -> bool:
        """Whether a plan can take an array as it is: its elements lie in order, without gaps."""
        return bool(self.is_contiguous(array))

    def is_apart(self, out: Any, x: Any) -> bool:
        """Whether a result can go to ``out`` without a closer look: plain, and apart from ``x``."""
        if out.__class__ is not self.array_class or not self.is_contiguous(out):
            return False
        source, target = x.data.ptr, out.data.ptr
        return bool(source + x.nbytes <= target or target + out.nbytes <= source)

    def plain_like(self, array: Any) -> Any:
        """A new contiguous array in the place of one that is not.

        Raises:
            ArrayError: The current stream is captured: a graph would use the new array after it is gone.
        """
        if self.transport.is_capturing():
            raise ArrayError(
                f"an array is not C-contiguous (shape {array.shape}, strides {array.strides} bytes), and a "
                f"graph that is captured keeps no copy of it; pass cupy.ascontiguousarray of it"
            )
        return super().plain_like(array)

    def run(self, plan: Plan, sendbuf: Any, recvbuf: Any) -> None:
        """Enqueues a plan on the current stream; see ``Executor.run``."""
        if not self._enter(False):
            self.check()
            raise CommunicatorError(TWO_THREADS)
        try:
            if self.over:
                raise CommunicatorError(self.over)
            plan.run(sendbuf, recvbuf)
        except BaseException as error:
            self.broke(error)
            raise
        finally:
            self._exit()

    def beside(self, plan: Plan) -> Plan:
        """A plan that leaves room on the GPU; see ``Executor.beside`` and ``NcclTransport.beside``."""
        if not isinstance(plan, RecordedPlan):
            return self.transport.beside(plan)
        roomy = self.transport.beside(plan.plan)
        if roomy is plan.plan or self.ring is None:
            return plan
        return RecordedPlan(roomy, plan.operation, self.ring, self._progress)

    def _make(
        self, collective, counts, dtype, op, root, in_place, choice: Candidate, part_of: str = ""
    ) -> Plan:
        """Compiles a choice; NCCL's own collective has no schedule to build."""
        if choice.algorithm != Algorithm.NATIVE:
            return super()._make(collective, counts, dtype, op, root, in_place, choice, part_of)
        schedule = native_schedule(collective, self.size, root)
        call = Call(schedule, self.rank, counts, dtype, op, in_place, part_of=part_of)
        return self._compiled(call)

    def start(self, plan: Plan, sendbuf: Any, recvbuf: Any, value: Any, what: str) -> DeviceWork:
        """Enqueues a plan on the communicator's own stream.

        Returns:
            Work whose ``wait`` returns ``value``, and makes the current stream wait, not the host.
        """
        event = self._begin(lambda: self.transport.submit(plan, sendbuf, recvbuf))
        return DeviceWork(self.transport, [event], value, what)

    def start_messages(
        self, sends: Messages, receives: Messages, after: Callable[[], object] | None, nbytes: int, value: Any
    ) -> DeviceWork:
        """Starts sends and receives, which wait neither for collectives nor for each other.

        Args:
            sends: Plain arrays, and the rank that each goes to.
            receives: Plain arrays, and the rank whose data each gets.
            after: What is left to do when all have ended.
            nbytes: Bytes of all of them.
            value: What the work's ``wait`` returns.
        """
        events: list[Any] = []
        plan = FunctionPlan(lambda *_: events.extend(self.transport.messages.start(sends, receives)))
        self._begin(lambda: self.recorded_transfer(plan, nbytes).run(None, None))
        return DeviceWork(self.transport, events, value, "send and receive", after)

    def _begin(self, enqueue: Callable[[], Any]) -> Any:
        self.check()
        if not self._enter(False):
            raise CommunicatorError(TWO_THREADS)
        try:
            return enqueue()
        except BaseException as error:
            self.broke(error)
            raise
        finally:
            self._exit()

    def abandon(self) -> None:
        """Refuses every call in a forked child, where nothing of the GPU can be used, and nothing freed."""
        keep_in_child(self.transport, self._cache.plans.copy())
        super().abandon()
        self._enter, self._exit = self.turn.acquire, self.turn.release
        self.transport.follow = self.transport.wait = _refuse_in_child  # type: ignore[assignment, method-assign]


def _refuse_in_child(*_: object) -> NoReturn:
    raise CommunicatorError(FORKED)


class DeviceWork(Work):
    """An operation on arrays of a GPU, under way on streams of the communicator's own.

    Until ``wait`` has returned, the arrays of the call belong to it.

    Args:
        transport: What carries the arrays.
        events: The ends of the operation.
        value: What ``wait`` returns.
        what: What it is, for messages.
        after: What is left to do then on the stream that has waited, once.

    Example:
        >>> work = comm.allreduce(x, async_op=True)  # doctest: +SKIP
        >>> y = work.wait() + 1                      # doctest: +SKIP
    """

    def __init__(
        self,
        transport: NcclTransport,
        events: Sequence[Any],
        value: Any,
        what: str,
        after: Callable[[], object] | None = None,
    ) -> None:
        self._transport, self._events, self._value, self._what = transport, events, value, what
        self._after = after

    def done(self) -> bool:
        """Whether the operation has ended."""
        return all(bool(event.done) for event in self._events)

    def wait(self, timeout_s: float | None = None) -> Any:
        """Makes the current stream wait for the operation; the host goes on at once.

        Args:
            timeout_s: If given, the host waits too, for at most so many seconds.

        Returns:
            What the call without ``async_op`` would.

        Raises:
            ArgumentError: ``timeout_s`` is no time.
            PeerTimeoutError: It still runs after ``timeout_s``.
            CommunicationError: A rank died or gave up.
        """
        limit_s = seconds(timeout_s)
        if limit_s is not None:
            end = monotonic() + limit_s
            for event in self._events:
                self._transport.wait(event, max(end - monotonic(), 0.0))
        for event in self._events:
            self._transport.follow(event)
        self._finish()
        return self._value

    def synchronize(self) -> Any:
        """Waits on the host until the operation has ended; returns and raises as ``wait`` does."""
        for event in self._events:
            self._transport.wait(event)
        if self._after is not None:
            self._finish()
            self._transport.wait(self._transport.mark())
        return self._value

    def _finish(self) -> None:
        after, self._after = self._after, None
        if after is not None:
            after()
