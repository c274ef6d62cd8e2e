"""Times candidates for arrays on GPUs: NCCL's own, schedules over NCCL, and the transport's protocols.

A table of these times holds what the GPUs need for a call, without what the host needs to enqueue it.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from flagcx.algorithms import Algorithm
from flagcx.algorithms.candidate import Candidate, Order
from flagcx.dtypes import dtype_of, resolve_op
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.selection.candidates import Request
from flagcx.selection.device_rules import DIRECT_ALGORITHMS
from flagcx.selection.predicted import on_device
from flagcx.selection.tuning import DTYPE, Clock, Measurement, TimeBudget
from flagcx.transport.base import Plan
from flagcx.transport.nccl.native import native_form, native_schedule
from flagcx.transport.nccl.plans import SchedulePlan

if TYPE_CHECKING:
    from flagcx.transport.nccl.transport import NcclTransport

MOST_SCRATCH_NBYTES = 1 << 30
_SPLIT_FROM_NBYTES = 1 << 20
"""Below, latency decides, and two algorithms have that of the slower."""
_WARM_AFTER = 4
"""Calls with the same arrays after which a plan is warm: kernels are compiled, NCCL is connected, and a
schedule replays its graph."""
_SHORT_S = 200e-6
"""A call that takes longer hides what the host needs to enqueue it."""
_MAYBE_SHORT_S = 1e-3
"""A single call that takes so long may be a short one that was disturbed."""
_TRIAL_CALLS = 10
"""Calls that tell how many a graph should have."""
_GRAPH_S = 400e-6
"""How long a graph's calls take one by one; the GPU may need but a quarter of it."""
_MOST_CALLS = 64
"""Calls in a graph."""
_MOST_SCHEDULES = 4
"""Calls in a graph that go through a schedule over NCCL."""
_RESOLUTION_MS = 1e-3
"""An event tells no shorter time. One rank alone may need none."""
_MOST_KEPT_NBYTES = 8 << 20
"""Scratch that a graph may take for good."""


class _Subject:
    """A plan under measurement, and a graph of several of its calls where they are short.

    Attributes:
        run: The plan's ``run``.
        most_calls: How many calls a graph may have.
        settled: Whether it has run so often that it is warm, and it is known whether it goes by a graph.
        graph: The graph, or None.
        calls: How many calls the graph has.
    """

    __slots__ = ("__weakref__", "_plan", "calls", "graph", "most_calls", "run", "settled")

    def __init__(self, plan: Plan, most_calls: int) -> None:
        self._plan, self.run, self.most_calls = plan, plan.run, most_calls
        self.settled, self.calls = False, 0
        self.graph: Any = None

    def replay(self, stream: Any) -> None:
        """Launches the graph, which no caller may hold: an error's frames would keep it."""
        self.graph.launch(stream)

    def close(self) -> None:
        """Gives the graphs back, before the memory that they use."""
        self.graph = None
        if isinstance(self._plan, SchedulePlan):
            self._plan.close()  # The communicator keeps a plan that was captured, but not for its own graphs.

    __del__ = close


class DeviceMeasurement(Measurement):
    """Measures how long GPUs need for a call with CuPy arrays, by events on a stream.

    Enqueueing a call from Python may take longer than the GPU needs for it. Then all short candidates would
    look alike. So short calls are timed in replays of a graph of several, where the host is not in the way.
    Long ones, which hide the host's time, are timed as they are. What the host needs is in no time: a program
    whose host runs ahead, or that replays a graph itself, does not wait for it.

    Args:
        bench: Whose arrays are measured.
        collective: Name of the collective.
        nbytes: Bytes of the message, or of one block where the collective has blocks.
    """

    def __init__(self, bench: DeviceBench, collective: str, nbytes: int) -> None:
        self._cupy, self._clock, self._order = bench.cupy, bench.clock, bench.order
        # What runs, and what captures.
        self._stream, self._captures = bench.streams

        def full(count: int) -> Any:
            with self._stream:
                return self._cupy.zeros(count, DTYPE)

        super().__init__(bench.transport, collective, nbytes, full)
        self._subjects: weakref.WeakSet[_Subject] = weakref.WeakSet()

    def plan(self, choice: Candidate) -> Plan:
        """Compiles a choice for this size."""
        if choice.algorithm == Algorithm.NATIVE:
            plan = self._compile(native_schedule(self.collective, self.size, self.root))
        else:
            plan = super().plan(choice.along(self._order))
        subject = _Subject(plan, self._most_calls(choice))
        self._subjects.add(subject)
        return subject

    def _most_calls(self, choice: Candidate) -> int:
        """How many calls a graph may have.

        Each call of a schedule in a graph takes scratch of its own, up to every rank's message, which the
        communicator keeps. Their steps through NCCL take so long that a graph of few outlasts its launch.
        """
        if choice.algorithm == Algorithm.NATIVE or choice.protocol:
            return _MOST_CALLS
        return min(_MOST_SCHEDULES, _MOST_KEPT_NBYTES // (self.size * self.count * DTYPE.itemsize))

    def time_all(
        self, choices: Sequence[Candidate], pace: TimeBudget, seed: int = 0, always: Collection[int] = ()
    ) -> list[list[float]]:
        """Times of a call in seconds, one a round, for each choice; see ``Measurement.time_all``.

        No graph outlives it, whatever happens: NCCL's communicator would wait for it when it is closed.
        """
        try:
            return super().time_all(choices, pace, seed, always)
        finally:
            for subject in list(self._subjects):
                subject.close()

    def seconds(self, plan: Plan, calls: int, warm_up: int) -> float:
        """The time of a call in seconds, from when the GPU may begin to when it has done the last one.

        Where the plan goes by a graph, there may be a few more calls, to make whole graphs.
        """
        assert isinstance(plan, _Subject)
        with self._stream:
            if not plan.settled:
                self._settle(plan)
            if plan.graph is not None:
                launches = math.ceil(calls / plan.calls)
                return self._time(lambda: plan.replay(self._stream), launches, 1) / plan.calls
            return self._plain(plan, calls, warm_up)

    def _settle(self, subject: _Subject) -> None:
        """Runs a plan until it is warm, and captures a graph of its calls if these are short.

        All ranks decide by the same number, the slowest's time: else their calls would differ.
        """
        least = self._plain(subject, 1, _WARM_AFTER)
        if least <= _MAYBE_SHORT_S:  # One call says little where calls are short.
            least = min(least, self._plain(subject, _TRIAL_CALLS, 0))
        calls = min(math.ceil(_GRAPH_S / least), subject.most_calls)
        if least <= _SHORT_S and calls > 1:
            subject.graph, subject.calls = self._captured(subject.run, calls), calls
        subject.settled = True

    def _captured(self, run: Callable[[Any, Any], None], calls: int) -> Any:
        """A graph of so many calls."""
        stream = self._captures
        with stream:
            stream.begin_capture()
            try:
                for _ in range(calls):
                    run(self.sendbuf, self.recvbuf)
            except BaseException:
                with contextlib.suppress(Exception):
                    stream.end_capture()  # What is wrong has been said.
                raise
            return stream.end_capture()

    def _plain(self, subject: _Subject, calls: int, warm_up: int) -> float:
        run, sendbuf, recvbuf = subject.run, self.sendbuf, self.recvbuf
        for _ in range(warm_up):
            run(sendbuf, recvbuf)
        self._stream.synchronize()
        return self._time(lambda: run(sendbuf, recvbuf), calls, 0)

    def _time(self, enqueue: Callable[[], None], times: int, ahead: int) -> float:
        """Seconds of each ``enqueue``, on the slowest rank; those ahead bring the ranks in step."""
        stream = self._stream
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        self._clock.barrier()
        for _ in range(ahead):
            enqueue()
        start.record(stream)
        for _ in range(times):
            enqueue()
        end.record(stream)
        end.synchronize()
        elapsed_ms = max(self._cupy.cuda.get_elapsed_time(start, end), _RESOLUTION_MS)
        return self._clock.slowest(elapsed_ms / 1e3 / times)


class DeviceBench:
    """CuPy arrays between ranks, as the tuner measures them.

    Args:
        transport: What carries the data.
        cupy: The CuPy module.
        clock: Joins the ranks' processes.
        order: The ranks along the machine's links, or None.
    """

    def __init__(self, transport: NcclTransport, cupy: Any, clock: Clock, order: Order | None = None) -> None:
        self.transport, self.cupy, self.clock, self.order = transport, cupy, clock, order
        self.size = transport.size
        # The stream that all threads have by default cannot be captured, and waits for those that block.
        self.streams = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)

    def candidates(self, collective: str, nbytes: int) -> list[Candidate]:
        """NCCL's own, the schedules, and those that the transport's protocols carry."""
        dtype = dtype_of(DTYPE)
        op = resolve_op("sum", dtype) if COLLECTIVES[collective].reduces else None
        found = []
        if native_form(collective, dtype, op, self.transport.nccl_version) is not None:
            found.append(Candidate(Algorithm.NATIVE))
        for one in on_device(Request(collective, nbytes, self.size)):
            # An algorithm in which every rank gets every rank's message whole takes that much scratch.
            whole = one.algorithm in (Algorithm.ONE_SHOT, Algorithm.DIRECT)
            large = whole and nbytes * self.size > MOST_SCRATCH_NBYTES
            if nbytes >= _SPLIT_FROM_NBYTES if one.other else not large:
                found.append(one)
        protocols = self.transport.protocols
        return found + [
            Candidate(one.algorithm, 1, protocol)
            for one in found
            if one.label in DIRECT_ALGORITHMS
            for protocol in sorted(protocols(collective, one.algorithm, nbytes, dtype, op))
        ]

    def measurement(self, collective: str, nbytes: int) -> DeviceMeasurement:
        """Arrays and plans for one collective at one size."""
        return DeviceMeasurement(self, collective, nbytes)

    def slowest(self, seconds: float) -> float:
        """The longest of the ranks' times."""
        return self.clock.slowest(seconds)
