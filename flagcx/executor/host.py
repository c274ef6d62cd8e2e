"""Runs calls for one kind of array: finds the plan, keeps the order, and remembers when it is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np

from flagcx.algorithms import entries
from flagcx.algorithms.candidate import Candidate
from flagcx.daemon import stay_if_process_ends
from flagcx.dtypes import OPS, DType, ReduceOp, dtype_of, flushes_subnormals, resolve_op
from flagcx.errors import (
    AbortedError,
    ArgumentError,
    CommunicationError,
    CommunicatorError,
    is_own_fault,
    reason_of,
    text_of,
)
from flagcx.executor.float_errors import FloatErrors, warn_of_mode
from flagcx.executor.plan_cache import PlanCache, plan_nbytes
from flagcx.executor.point_to_point import TWO_THREADS, PointToPoint
from flagcx.executor.progress_thread import ProgressThread, nbytes_of
from flagcx.executor.work import Work
from flagcx.forks import FORKED, abandon_in_children
from flagcx.profiler import OperationInfo, Progress, RecordBuffer, RecordedPlan
from flagcx.profiler.records import Uncounted
from flagcx.schedule.collectives import Counts, largest_block
from flagcx.selection.candidates import Request
from flagcx.selection.online_tuning import Exploration, Explored
from flagcx.selection.selector import Selector
from flagcx.transport.base import Call, Plan, Transport

_MOST_EXPLORED = 1024


class Executor:
    """Plans and order of one communicator's calls over one transport.

    Args:
        rank: This rank.
        size: Number of ranks.
        transport: What carries the arrays.
        selector: What chooses how a call runs.
        ring: Where runs are recorded, if they are.

    Attributes:
        selector: What chooses how a call runs.
        explorations: The trials for each kind of call.
        quick: Plans of calls that may skip all checks but those of the array itself. Empty whenever a
            call must not go straight through: closed, broken, in a group, or after started work.
        remember: See ``PlanCache.remember``.
        quietly: Runs a plan; see ``FloatErrors.run``, likewise ``noted``.
        over: Why no further call can be made; empty where one can.
        partner: The executor of the same communicator for the other kind of array, which ends with this one.
        broken_by: Kind and text of the error because of which no further call can be made, if a call had it.
        messages: Sends and receives under way; None where the transport makes them in order.
        forked: Whether this is a copy in a forked child of the process that made it.
        retired: Whether no thread is in a call, nor will be.
    """

    def __init__(
        self, rank: int, size: int, transport: Transport, selector: Selector, ring: RecordBuffer | None = None
    ) -> None:
        self.rank, self.size, self.transport = rank, size, transport
        self.array_class: Any = np.ndarray
        self.turn = threading.Lock()
        self._cache = PlanCache()
        self.quick, self.remember = self._cache.straight, self._cache.remember
        self.selector, self.ring = selector, ring
        self._progress: Progress = transport.progress or Uncounted()
        self.explorations: dict[tuple, Exploration] = {}
        self._flushes = flushes_subnormals()
        self.over = ""
        self.broken_by: tuple[type[BaseException], str] | None = None
        self.float_errors = FloatErrors()
        self.quietly, self.noted = self.float_errors.run, self.float_errors.noted
        self._worker: ProgressThread | None = None
        self._last: Future | None = None
        self._untold: BaseException | None = None  # an error of started work, until some caller has got it
        self.partner: Executor | None = None
        self.forked = self.retired = self._hurried = self._closed = False
        messenger = transport.messenger
        self.messages = None if messenger is None else PointToPoint(messenger, self)
        self.record: Callable[[CommunicationError], object] = lambda error: None  # in the flight record
        abandon_in_children(self)

    # -- plans ------------------------------------------------------------------------------------

    def find(
        self,
        collective: str,
        counts: Counts,
        dtype: DType,
        op: ReduceOp | None = None,
        root: int | None = None,
        algorithm: str | None = None,
        in_place: bool = False,
        part_of: str = "",
    ) -> Plan:
        """Looks up or compiles the plan of a call.

        Args:
            collective: Its name.
            counts: Elements of the message, of each block, or of each rank's block.
            dtype: The element type.
            op: The operation, of a collective that reduces.
            root: The root, of a rooted collective.
            algorithm: As the caller names it; chosen if None.
            in_place: Whether the result lies where the collective's form in place has it.
            part_of: The larger operation that this call is a step of; see ``transport.base.Call``.

        Raises:
            ArgumentError: The algorithm does not serve the collective.
            CommunicatorError: The communicator is closed or broken.
        """
        key = (collective, counts, dtype.code, op, root, algorithm, in_place, part_of)
        plan = self._cache.plans.get(key)
        if plan is None:
            self.check()
            self._cache.make_room()
            plan = self._compile(collective, counts, dtype, op, root, algorithm, in_place, part_of)
            self._cache.plans[key] = plan
        return plan

    def _compile(self, collective, counts, dtype, op, root, algorithm, in_place, part_of) -> Plan:
        if op is not None and flushes_subnormals() != self._flushes:
            self._flushes = warn_of_mode(self.rank, not self._flushes)
        uneven = not isinstance(counts, int)
        request = Request(
            collective, largest_block(counts) * dtype.numpy.itemsize, self.size, uneven, dtype, op
        )
        make = partial(self._make, collective, counts, dtype, op, root, in_place, part_of=part_of)
        describe = partial(self._describe, collective, counts, dtype)
        if algorithm is None:
            choice = self.selector.choose(request)
            # An operation of the user's own need not compare equal to itself on every rank.
            known = op is None or OPS.get(op.name) == op
            key = (collective, counts, dtype.code, op, root)
            exploration = self._explore(key, request) if known and not uneven else None
            if exploration is not None:
                return Explored(exploration, make, describe, self.ring or RecordBuffer(1), self._progress)
        else:
            choice = self.selector.choose_named(algorithm, request)
        if uneven and not choice.serves_uneven(collective):
            serving = ", ".join(str(e.algorithm) for e in entries(collective) if e.uneven)
            raise ArgumentError(
                f"algorithm={choice.label!r} of {collective} needs blocks of one size; for blocks "
                f"of different sizes use one of {serving}"
            )
        plan = make(choice)
        return plan if self.ring is None else RecordedPlan(plan, describe(choice), self.ring, self._progress)

    def _make(
        self, collective, counts, dtype, op, root, in_place, choice: Candidate, part_of: str = ""
    ) -> Plan:
        """Builds the schedule of a choice, and compiles it."""
        schedule = choice.build(collective, self.size, root)
        call = Call(schedule, self.rank, counts, dtype, op, in_place, choice.protocol, part_of)
        return self._compiled(call)

    def _compiled(self, call: Call) -> Plan:
        self._cache.nbytes += plan_nbytes(call)
        return self.transport.compile(call)

    def _describe(self, collective: str, counts: Counts, dtype: DType, choice: Candidate) -> OperationInfo:
        nbytes, carrier = largest_block(counts) * dtype.numpy.itemsize, self.transport.name
        how = choice.label, choice.pieces, choice.protocol
        return OperationInfo(collective, nbytes, dtype.name, *how, carrier)

    def _explore(self, key: tuple, request: Request) -> Exploration | None:
        """The trials for a kind of call; every rank makes and counts them alike."""
        if not self.selector.live:
            return None
        found = self.explorations.get(key)
        if found is None and len(self.explorations) < _MOST_EXPLORED:
            choices = self.selector.alternatives(request)
            if len(choices) > 1:
                found = self.explorations[key] = Exploration(choices, self._agree)
        return found

    def _agree(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over the ranks; called in the middle of a call, by all of them."""
        largest = np.array(values, np.int64)
        whole = dtype_of(largest.dtype)
        op = resolve_op("max", whole)
        plan = self._make("allreduce", largest.size, whole, op, None, True, Candidate("one_shot"))
        plan.run(largest, largest)
        return [int(value) for value in largest]

    def transfer_info(self, nbytes: int) -> OperationInfo:
        """What records call messages between some of the ranks."""
        return OperationInfo("transfer", nbytes, "bytes", "direct", 1, "", self.transport.name)

    def recorded_transfer(self, plan: Plan, nbytes: int) -> Plan:
        """Wraps messages between some of the ranks, so that they are recorded."""
        if self.ring is None:
            return plan
        return RecordedPlan(plan, self.transfer_info(nbytes), self.ring, self._progress, shared=False)

    def beside(self, plan: Plan) -> Plan:
        """The plan for use beside a computation, if there is one for that; all ranks take it, or none."""
        return plan

    def take(self, array: Any, what: str, writable: bool) -> Any:
        """Takes a caller's array without a copy, or raises ``ArrayError``."""
        return self.transport.take(array, what, writable)

    def is_plain(self, array: Any) -> bool:
        """Whether a plan can take an array as it is: its elements lie in order, without gaps, and aligned."""
        flags = array.flags
        return bool(flags.carray or (flags.c_contiguous and flags.aligned))

    def plain_like(self, array: Any) -> Any:
        """A new plain array in the place of one that is not."""
        return self.transport.result(None, "", array.shape, array.dtype)

    def result(self, out: Any, what: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Takes the array given as ``out=``, or makes one of that shape and dtype."""
        return self.transport.result(out, what, shape, dtype)

    # -- running ----------------------------------------------------------------------------------

    def run(self, plan: Plan, sendbuf: Any, recvbuf: Any) -> None:
        """Runs a plan now, after all that was started before.

        Raises:
            CommunicatorError: Closed, broken, or another thread is in a call.
            CommunicationError: A peer died, came late, or called something else.
        """
        self.catch_up()
        if not self.turn.acquire(blocking=False):
            self.check()
            raise CommunicatorError(TWO_THREADS)
        try:
            self._run(plan.run, sendbuf, recvbuf)
        finally:
            self.turn.release()
        if self.noted:
            self.float_errors.warn()

    def _run(self, run: Callable[[Any, Any], object], sendbuf: Any, recvbuf: Any) -> None:
        self.check()
        try:
            self.quietly(run, sendbuf, recvbuf)
        except BaseException as error:
            self.broke(error)
            raise

    def start(self, plan: Plan, sendbuf: Any, recvbuf: Any, value: Any, what: str) -> Work:
        """Runs a plan on the communicator's ``ProgressThread``, after what was started before.

        An error that the work's ``wait`` has not raised by then is raised by ``close``.

        Returns:
            Work whose ``wait`` returns ``value``.
        """
        self.check()
        if self.turn.locked():
            raise CommunicatorError(TWO_THREADS)
        worker = self._worker = self._worker or ProgressThread(self.broke)
        nbytes = nbytes_of(sendbuf) + (0 if recvbuf is sendbuf else nbytes_of(recvbuf))
        worker.wait_for_room(nbytes, self.hurry)
        now_ns = perf_counter_ns()
        run = partial(plan.run_queued, queued_at_ns=now_ns) if isinstance(plan, RecordedPlan) else plan.run

        def call() -> Any:
            self._progress.background = not self._hurried
            try:
                if self.over:  # what was started before has failed, or was aborted
                    raise AbortedError(self.over)
                self._run(run, sendbuf, recvbuf)
            except BaseException as error:
                self.leave_untold(error)
                raise
            finally:
                self._progress.background = False
            return value

        self.hold()
        self._hurried = False
        self._last = worker.submit(call, nbytes)
        return Work(self._last, what, self.hurry, self.take_untold, self.float_errors)

    def leave_untold(self, error: BaseException) -> None:
        """Keeps an error that no caller has got so far; those of later work follow from the first."""
        self._untold = self._untold or error

    def take_untold(self) -> BaseException | None:
        """The error that no caller has got so far, which this one gets."""
        untold, self._untold = self._untold, None
        return untold

    def hurry(self) -> None:
        """Lets started work have the core, since the caller waits and computes nothing beside it.

        Raises:
            CommunicatorError: In a forked child, where that work never ends.
        """
        if self.forked:
            raise CommunicatorError(self.over)
        self._hurried = True
        self._progress.background = False

    def catch_up(self) -> None:
        """Waits until all that was started has ended. ``Work.wait`` raises its errors, or ``close``."""
        if self._last is not None:
            self.hurry()
            self._last.exception()
            self._last = None
            self.resume()

    def hold(self) -> None:
        """Sends every call through ``run``."""
        self.quick = {}

    def resume(self) -> None:
        """Lets calls that repeat go straight through again."""
        if not (self.over or self._last):
            self.quick = self._cache.straight

    # -- the end ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises where no further call can be made: CommunicatorError, or what no caller has got so far."""
        if self.over:
            stay_if_process_ends()
            untold = self.take_untold()  # this tells it
            if isinstance(untold, CommunicationError):
                raise type(untold)(self.over, peer=untold.peer)
            raise CommunicatorError(self.over)

    def broke(self, error: BaseException) -> None:
        """Ends the communicator after an error that left ranks in different places, and tells the peers.

        Raises:
            CommunicatorError: The error comes of a close in the middle of the call, as by a signal's handler.
        """
        stay_if_process_ends()
        if self._closed and is_own_fault(error):
            raise CommunicatorError(f"{self.over}, and was in the middle of a call") from error
        if self.over or isinstance(error, ArgumentError):
            return
        kind, text = self.broken_by = type(error), text_of(error)
        if isinstance(error, CommunicationError):
            self.record(error)  # while the others still wait where they are
        self.end(f"this communicator cannot be used after {kind.__name__}: {text}; make a new one")
        self.transport.abort(reason_of(error), getattr(error, "peer", None))
        if self.partner is not None:
            self.partner.broke(error)

    def end(self, why: str) -> None:
        """Refuses every further call, with ``why`` as the reason."""
        self.over = self.over or why
        self.hold()
        if self.messages is not None:
            self.messages.stop(self.forked)
        self._cache.clear()

    def abandon(self) -> None:
        """Refuses every call in a forked child; see ``flagcx.forks.Inherited``."""
        if self._closed:
            return
        self.forked, self._last, self.turn = True, None, threading.Lock()
        self.end(FORKED)

    def close(self) -> None:
        """Waits for what was started, then gives everything back. A second call does nothing.

        Raises:
            MismatchError: A peer has called something else, and nothing has shown it so far.
            FlagcxError: Work that was started failed, and nothing has waited for it.
        """
        self.catch_up()
        if self.messages is not None and not self.over:
            try:
                self.messages.finish()
            except CommunicationError as error:
                self.leave_untold(error)
        untold = self.take_untold()
        ended = bool(self.over)
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._closed = True
        self.end("this communicator is closed")
        try:
            if untold is not None:
                raise untold
            if not ended:
                self.transport.check_end()
        finally:
            self.transport.close()
