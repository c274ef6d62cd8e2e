"""GPU arrays over NCCL: any schedule, any dtype, any operation.

A schedule's step becomes one NCCL group of sends and receives and, after it on the same stream, one launch of
the fused kernel that reduces the received data. Calls only enqueue; nothing waits on the host. A plan that
comes back with the same arrays is captured into a CUDA graph and then replayed with one launch.

The kernels of flagcx reduce, so NCCL carries bytes of any dtype. NCCL's own collectives are the algorithm
"native".
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flagcx.bootstrap.environment import host_name
from flagcx.bootstrap.store import Store
from flagcx.config import Config, set_default
from flagcx.dtypes import DType, ReduceOp
from flagcx.errors import (
    AbortedError,
    CommunicationError,
    CommunicatorError,
    FlagcxError,
    MismatchError,
    OperationError,
)
from flagcx.kernels.cuda import load_cupy
from flagcx.kernels.launch import FusedKernels
from flagcx.kernels.views import device_array, device_result, empty
from flagcx.schedule.lower import levels
from flagcx.transport.average import averaging
from flagcx.transport.base import Call, DeviceTransport, Plan, TransportContext
from flagcx.transport.device import (
    DeviceIdentity,
    check_devices,
    identify_device,
    prepare_sharing,
    surroundings_of,
)
from flagcx.transport.nccl.average import AveragedPlan, adds_once
from flagcx.transport.nccl.binding import (
    NcclCommunicator,
    bounded,
    hints,
    load_nccl,
    make_unique_id,
    message_of,
)
from flagcx.transport.nccl.messages import DeviceMessages, Sized
from flagcx.transport.nccl.native import NATIVE, native_form
from flagcx.transport.nccl.plans import URGENT, NativePlan, SchedulePlan, Scratch, grouped
from flagcx.transport.nccl.rows import AddedRows
from flagcx.transport.nccl.steps import device_program
from flagcx.transport.peer_memory import PeerPlan, connect, protocols_in
from flagcx.transport.rows import Rows
from flagcx.transport.stream_order import StreamOrder
from flagcx.transport.waits import Waits
from flagcx.transport.watchdog import Watchdog

logger = logging.getLogger("flagcx")

_STUCK_EXIT_CODE = 75
_ABORT_LIMIT_S = 3.0


class NcclTransport(DeviceTransport):
    """Carries CuPy arrays between the ranks of one communicator, on the device that is current now.

    Args:
        store: The communicator's part of the store; its ranks are the transport's.
        config: The settings; this uses ``timeout_s``, ``init_timeout_s`` and ``share_gpu``.
        waits: What explains long waits, if they are explained.

    Raises:
        MissingDependencyError: CuPy, NCCL, a driver or a GPU is missing.
        ResourceError: Ranks share a GPU without ``share_gpu``.
        PeerTimeoutError: A rank did not come within ``init_timeout_s``.

    Attributes:
        identities: Every rank's process and GPU.
        nccl_version: As an integer: 23007 is 2.30.7.
        peers: The transport through the peers' memory, or None.
        no_peers: Why there is none.
        messages: Its sends and receives.
    """

    name = "nccl"

    def __init__(self, store: Store, config: Config, waits: Waits | None = None) -> None:
        self._cupy = cupy = load_cupy()
        # One rank may capture a call that another one enqueues plainly. NCCL would register buffers only in
        # the graph, and the ranks would no longer match.
        set_default("NCCL_GRAPH_REGISTER", "0")
        self._config, self._store = config, store
        self.rank, self.size = store.rank, store.size
        self.device = cupy.cuda.runtime.getDevice()
        self.nccl_version = load_nccl(cupy).get_version()
        limit = config.init_timeout_s
        own = identify_device(cupy, self.device, host_name(), self.nccl_version).pack()
        self.identities = [DeviceIdentity.unpack(i) for i in store.exchange("nccl/devices", own, limit)]
        check_devices(self.identities, config.share_gpu)
        prepare_sharing(cupy, self.device, self.identities, self.rank)
        ids = store.exchange("nccl/id", make_unique_id(cupy) if self.rank == 0 else b"", limit)
        self._communicator = NcclCommunicator(cupy, self.rank, self.size, ids[0], limit, store.check)
        self.array_class = cupy.ndarray
        self._kernels = FusedKernels(cupy, self.device)
        self._order = StreamOrder(cupy, self.device, self.rank)
        self.peers, self.no_peers = connect(cupy, store, self.identities, self._order, config)
        self.messages = DeviceMessages(cupy, self._order, self.peers, self._send_by_nccl)
        self._scratch = Scratch(cupy)
        self._side = cupy.cuda.Stream(non_blocking=True, priority=URGENT)
        self._plans: weakref.WeakSet[SchedulePlan] = weakref.WeakSet()
        self._closed = self._aborted = False
        self._watchdog: Watchdog | None = None
        if self.size > 1:
            self._watchdog = Watchdog(self._order, self, store, config.timeout_s, _leave, waits)
            if self.peers is not None:
                self.peers.blamed = self._watchdog.blamed

    @classmethod
    def open(cls, context: TransportContext) -> NcclTransport:
        """Makes the transport from the context's store and settings."""
        assert context.store is not None
        return cls(context.store, context.config, context.waits)

    def protocols(
        self,
        collective: str,
        algorithm: str,
        nbytes: int,
        dtype: DType | None = None,
        op: ReduceOp | None = None,
    ) -> frozenset[str]:
        """The protocols of peer memory that can carry a call; the same on all ranks."""
        if self.peers is None or dtype is None:
            return frozenset()
        return protocols_in(self.peers.layout, collective, algorithm, nbytes, dtype, op)

    def surroundings(self) -> dict[str, dict[str, object]]:
        """What measured times depend on: ``machine`` (GPUs, and ranks on each) and ``versions``."""
        return surroundings_of(self._cupy, self.device, self.identities, self.nccl_version)

    def compile(self, call: Call) -> Plan:
        """Compiles ``call``; a schedule that is not aligned is lowered to levels, so each step is one group.

        Raises:
            OperationError: NCCL's own or CuPy lacks the dtype or operation.
        """
        if self._closed:
            raise CommunicatorError(f"the communicator of rank {self.rank} is closed")
        if call.schedule.algorithm == NATIVE:
            return self._native(call)
        if self.peers is not None and self.peers.carries(call):
            return self.peers.compile(call)
        return self._scheduled(call)

    def _scheduled(self, call: Call) -> Plan:
        wrap = partial(AveragedPlan, self._cupy, self.device, self._order, self._scratch, call)
        return self._stepwise(call) if adds_once(call.schedule) else averaging(call, self._stepwise, wrap)

    def _stepwise(self, call: Call) -> SchedulePlan:
        lowered = replace(call, schedule=levels(call.schedule))
        program = device_program(lowered)
        size = call.dtype.numpy.itemsize
        steps = [
            (
                grouped(step.messages, call.dtype),
                self._kernels.compile(step.phases, call.dtype, call.op, program.factor, self._side),
            )
            for step in program.steps
        ]
        plan = SchedulePlan(
            lowered, steps, program.scratch_count * size, program.scaled_count * size, self._order,
            self._communicator, self._scratch, self._guarded,
        )  # fmt: skip
        self._plans.add(plan)
        return plan

    def _native(self, call: Call) -> NativePlan:
        form = native_form(call.schedule.collective, call.dtype, call.op, self.nccl_version)
        if form is None:
            op = "" if call.op is None else f" with op={call.op.name!r}"
            raise OperationError(
                f"NCCL's own {call.schedule.collective} does not do {call.dtype.name} arrays{op}; expected "
                f"another algorithm, such as algorithm='ring'"
            )
        return NativePlan(call, self._communicator.native(call, form), self._order, self._fault)

    def compile_rows(self, rows: Rows, call: Call | None, add: Callable[[], Plan]) -> Plan:
        """Compiles an all-reduce of rows with an epilogue: in one kernel, or after the plan of ``add()``.

        Args:
            rows: The operation.
            call: The all-reduce as ``peers`` would make it; None where they do not.
            add: Compiles the plan that adds up the rows.
        """
        fused = None if self.peers is None or call is None else self.peers.compile_rows(call, rows)
        return fused or AddedRows(self._cupy, self.device, self._order, self._scratch, rows, add())

    def submit(self, plan: Plan, sendbuf: Any, recvbuf: Any) -> Any:
        """Enqueues a plan on the communicator's own stream, after the operations of the current stream.

        Returns:
            The event after the plan, until which the plan and the arrays are kept.
        """
        stream = self._cupy.cuda.get_current_stream()
        self._side.wait_event(stream.record(self._order.event()))
        with self._side:
            plan.run(sendbuf, recvbuf)
        if self._order.is_capturing(self._side):
            return self._side.record(self._order.event())  # The capturing rank keeps a graph's arrays.
        return self._order.keep(self._side, plan, sendbuf, recvbuf)

    def beside(self, plan: Plan) -> Plan:
        """The plan, which leaves most of the GPU to a computation; all ranks run it, or all ``plan``."""
        return self.peers.beside(plan) if self.peers is not None and isinstance(plan, PeerPlan) else plan

    def order(self, before: Any, after: Any) -> None:
        """Makes stream ``after`` wait for ``before``, unless only one of them is being captured."""
        self._order.chain(before, after)

    def mark(self) -> Any:
        """An event after what is enqueued on the current stream."""
        return self._order.current().record(self._order.event())

    def follow(self, event: Any) -> None:
        """Makes the current stream wait for an event of ``submit``; the host goes on at once."""
        self._cupy.cuda.get_current_stream().wait_event(event)

    def wait(self, event: Any, timeout_s: float = math.inf) -> None:
        """Waits on the host for an event of ``submit``.

        Raises:
            PeerTimeoutError: It was not reached in time.
            CommunicationError: A rank died, gave up or did not come within the settings' time-out.
        """
        self._order.wait(event, timeout_s)
        if self.peers is not None:
            self.peers.check()

    def keep(self, stream: Any, *arrays: object) -> None:
        """Keeps arrays alive until a stream has done the operations that are enqueued on it now."""
        if not self._order.is_capturing(stream):
            self._order.keep(stream, *arrays)

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return bool(self._order.is_capturing(self._cupy.cuda.get_current_stream()))

    def transfer(self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]]) -> None:
        """Sends arrays to ranks and receives arrays from ranks, all at once, in the order of the calls."""
        self.messages.transfer(sends, receives)

    def _send_by_nccl(self, sized: Sized, stream: int) -> None:
        self._guarded(lambda: self._communicator.group(sized, (0, 0, 0, 0), stream))

    def take(self, array: Any, what: str, writable: bool) -> Any:
        """Takes a caller's array as a CuPy array, without a copy."""
        return device_array(self._cupy, array, what, writable)

    def result(self, out: Any, what: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Takes the array that a caller gives for a result, or makes one."""
        return device_result(self._cupy, out, what, shape, dtype)

    def empty(self, shape: tuple[int, ...] | int, dtype: Any) -> Any:
        """An uninitialised array that peers access in place, where they can; all ranks make it together."""
        if self.peers is None:
            return empty(self._cupy, shape, dtype)
        return self.peers.segments.empty(shape, dtype)

    def _guarded(self, enqueue: Callable[[], None]) -> None:
        order = self._order
        order.inside = True
        try:
            enqueue()
        except BaseException as error:
            raise self._fault(error) from error
        finally:
            order.inside = False

    def _fault(self, error: BaseException) -> BaseException:
        """The exception to raise for one of an operation that may be half enqueued; ends the communicator."""
        if self._order.failure is not None:
            return self._order.report()
        failure = CommunicationError(
            f"rank {self.rank}: {self._order.what} could not be enqueued: "
            f"{message_of(error) or type(error).__name__}; {hints()}"
        )
        ours = isinstance(error, (self._cupy.cuda.runtime.CUDARuntimeError, RuntimeError, KeyError))
        if ours and self._watchdog is not None:
            failure = self._watchdog.explained(failure)
        self._give_up(failure)
        return failure if ours else error

    def abort(self, reason: str, culprit: int | None) -> None:
        """Ends the communicator, on all ranks, because of this rank."""
        if self._order.failure is None:
            peer = self.rank if culprit is None else culprit
            self._give_up(AbortedError(f"rank {self.rank} gave up: {reason}", peer=peer))

    def _give_up(self, failure: CommunicationError) -> None:
        """Ends the communicator with an error that the caller is about to get."""
        self._order.failure, self._order.reported = failure, True
        if self._watchdog is not None:
            self._watchdog.publish(failure)

    # The watchdog calls the next three methods: see flagcx.transport.watchdog.Watched.

    def fault(self) -> CommunicationError | None:
        """The error of a wait that timed out on the GPU, or None."""
        return None if self.peers is None else self.peers.fault()

    def fail(self, error: FlagcxError) -> None:
        """Ends the communicator with an error, which every later call and every wait on the host raises;
        ``close`` too, if no other call has and results may be wrong."""
        if self._order.failure is None:
            done = self._order.all_done() and self.fault() is None
            self._order.failure, self._order.reported = error, done and not isinstance(error, MismatchError)

    def abort_enqueued(self) -> None:
        """Ends the operations that wait for peers, which frees their streams. May take long."""
        if self._aborted:
            return
        self._aborted = True
        if self.peers is not None:
            self.peers.stop()
        self._cupy.cuda.runtime.setDevice(self.device)
        self._communicator.abort()

    def synchronize(self) -> None:
        """Waits on the host until all operations are done.

        Raises:
            CommunicationError: A rank died, gave up or did not come in time.
        """
        self._order.drain(math.inf if self._watchdog is not None else self._config.timeout_s)

    def check_end(self) -> None:
        """Compares the last calls with those of the ranks that close too; see ``Transport.check_end``."""
        if self._watchdog is not None and self._order.failure is None:
            self._watchdog.check_end()

    def close(self) -> None:
        """Waits for all operations and gives everything back, on all ranks together.

        Raises:
            CommunicationError: A rank died, gave up or did not come in time, and no call has raised that yet:
                the last operations may not have been done.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._order.failure is None:
                self.messages.finish()
                self.synchronize()
        finally:
            if self._watchdog is not None:
                self._watchdog.close()
            if self._order.failure is not None:
                self.end_enqueued()
            for plan in self._plans:
                plan.close()
            self._scratch.close()
            self.messages.close()
            if self.peers is not None:
                self.peers.close(together=self._order.failure is None)
            # A remaining reference to the transport keeps no stream alive.
            self._order.close()
            self._side = None
        if self._order.failure is None:
            self._communicator.destroy()
        elif not self._order.reported:
            raise self._order.report()

    def end_enqueued(self) -> None:
        """Ends operations that wait for peers: memory that kernels still use must not be freed."""
        with contextlib.suppress(CommunicationError):
            bounded(self.abort_enqueued, _ABORT_LIMIT_S, f"rank {self.rank} could not end its operations")
        self._order.settle(_ABORT_LIMIT_S)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "failed" if self._order.failure else "open"
        return f"<NcclTransport rank={self.rank} size={self.size} device={self.device} {state}>"


def _leave(reason: str) -> None:
    """Ends a process that is stuck inside NCCL."""
    logger.critical("%s; the process ends", reason)
    os._exit(_STUCK_EXIT_CODE)
