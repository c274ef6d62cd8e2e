"""Times candidates for arrays on GPUs: NCCL's own, schedules over NCCL, and the transport's protocols."""

from __future__ import annotations

from typing import Any, Protocol

from flagcx.algorithms import Algorithm
from flagcx.collectives import COLLECTIVES
from flagcx.dtypes import DType, ReduceOp, dtype_of, resolve_op
from flagcx.selection.measurement import DTYPE, Clock, Measurement, forms
from flagcx.selection.modelled import mixes_for
from flagcx.selection.on_device import DIRECT_ALGORITHMS
from flagcx.selection.planned import Order, build_along
from flagcx.selection.selector import Choice
from flagcx.selection.table import Candidate
from flagcx.transport.base import Call, Plan, Transport
from flagcx.transport.nccl_native import native_form, native_schedule

PIECE_NBYTES = (4 << 20,)
"""The length of piece that pipelined schedules are measured with: a step costs a group and a launch."""
MOST_SCRATCH_NBYTES = 1 << 30
"""An algorithm in which every rank gets every rank's message whole is not measured beyond this."""
_MIXED_FROM_NBYTES = 1 << 20
"""Below, latency decides, and two algorithms have that of the slower."""
_CAPTURED_AFTER = 4
"""Calls with the same arrays after which a plan surely replays a graph."""


class MeasuredTransport(Transport, Protocol):
    """What is asked of a transport for arrays on GPUs."""

    rank: int
    size: int
    nccl_version: int

    def protocols(
        self, collective: str, algorithm: str, nbytes: int, dtype: DType, op: ReduceOp | None
    ) -> frozenset[str]:
        """The ways besides NCCL in which a call's data may move."""


class _Warming:
    """A plan that knows whether it has run so often that it replays a graph.

    Every rank counts its own runs, and all make the same ones.
    """

    __slots__ = ("_cold", "_plan", "run")

    def __init__(self, plan: Plan) -> None:
        self._plan, self.run, self._cold = plan, plan.run, True

    def warm_up(self, wanted: int) -> int:
        """How many runs must go before a batch."""
        cold, self._cold = self._cold, False
        return max(wanted, _CAPTURED_AFTER) if cold else wanted


class DeviceMeasurement(Measurement):
    """Measures CuPy arrays by events on the current stream.

    Args:
        transport: What carries the data.
        cupy: The CuPy module.
        clock: Joins the ranks' processes.
        order: The ranks along the machine's links, or None.
        collective: Name of the collective.
        nbytes: Bytes of the message, or of one block where the collective has blocks.
    """

    def __init__(
        self,
        transport: MeasuredTransport,
        cupy: Any,
        clock: Clock,
        order: Order | None,
        collective: str,
        nbytes: int,
    ) -> None:
        def full(count: int) -> Any:
            return cupy.zeros(count, DTYPE)

        super().__init__(collective, nbytes, transport.rank, transport.size, full)
        self._transport, self._cupy, self._clock, self._order = transport, cupy, clock, order

    def plan(self, choice: Choice) -> Plan:
        """See ``Measurement.plan``."""
        if choice.algorithm == Algorithm.NATIVE:
            schedule = native_schedule(self.collective, self.size, self.root)
        else:
            algorithm = str(choice.algorithm)
            schedule = build_along(
                self._order, self.collective, algorithm, self.size, self.root, choice.pieces
            )
        call = Call(schedule, self.rank, self.count, self.dtype, self.op, self.in_place, choice.protocol)
        return _Warming(self._transport.compile(call))

    def seconds(self, plan: Plan, calls: int, warm_up: int) -> float:
        """See ``Measurement.seconds``: from when the GPU may begin to when it has done the last call."""
        run, given, result = plan.run, self.given, self.result
        stream = self._cupy.cuda.get_current_stream()
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        assert isinstance(plan, _Warming)
        for _ in range(plan.warm_up(warm_up)):
            run(given, result)
        stream.synchronize()
        self._clock.barrier()
        start.record(stream)
        for _ in range(calls):
            run(given, result)
        end.record(stream)
        end.synchronize()
        elapsed_ms = self._cupy.cuda.get_elapsed_time(start, end)
        return self._clock.slowest(elapsed_ms / 1e3 / calls)


class DeviceBench:
    """CuPy arrays between ranks, as the tuner measures them.

    Args:
        transport: What carries the data.
        cupy: The CuPy module.
        clock: Joins the ranks' processes.
        order: The ranks along the machine's links, or None; see ``planned.build_along``.

    Attributes:
        size: Number of ranks.
    """

    def __init__(
        self, transport: MeasuredTransport, cupy: Any, clock: Clock, order: Order | None = None
    ) -> None:
        self._transport, self._cupy, self._clock, self._order = transport, cupy, clock, order
        self.size = transport.size

    def candidates(self, collective: str, nbytes: int) -> list[Candidate]:
        """NCCL's own, the schedules, and those that the transport's protocols carry.

        Args:
            collective: Name of the collective.
            nbytes: Bytes of the message, or of one block where the collective has blocks.
        """
        dtype = dtype_of(DTYPE)
        op = resolve_op("sum", dtype) if COLLECTIVES[collective].reduces else None
        found = []
        if native_form(collective, dtype, op, self._transport.nccl_version) is not None:
            found.append(Candidate(str(Algorithm.NATIVE)))
        found += [
            form for form in forms(collective, nbytes, self.size, PIECE_NBYTES) if self._fits(form, nbytes)
        ]
        found += [
            Candidate(name) for name in mixes_for(collective, self.size) if nbytes >= _MIXED_FROM_NBYTES
        ]
        protocols = self._transport.protocols
        return found + [
            Candidate(form.algorithm, 0, protocol)
            for form in found
            if form.algorithm in DIRECT_ALGORITHMS
            for protocol in sorted(protocols(collective, form.algorithm, nbytes, dtype, op))
        ]

    def _fits(self, form: Candidate, nbytes: int) -> bool:
        """Whether a schedule is worth its memory and steps."""
        if form.algorithm == Algorithm.RING and form.piece_nbytes:
            return False  # All blocks of a ring are under way at once as it is.
        whole = form.algorithm in (Algorithm.ONE_SHOT, Algorithm.DIRECT)
        return not whole or nbytes * self.size <= MOST_SCRATCH_NBYTES

    def measurement(self, collective: str, nbytes: int) -> DeviceMeasurement:
        """Arrays and plans for one collective at one size."""
        return DeviceMeasurement(self._transport, self._cupy, self._clock, self._order, collective, nbytes)
