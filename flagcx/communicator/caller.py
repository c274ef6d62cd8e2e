"""How a communicator makes a call: a look-up for a call like an earlier one, the checked way for any other.

::

    comm.allgather(x)          operations.py      which arrays, which options
      run_again  -> plan       caller.py          a call like an earlier one goes straight to its plan
      call                     caller.py          any other is checked first, and remembered
        executor.find -> plan  executor/          selector -> candidate -> schedule -> transport.compile
        executor.run           executor/          now; or started beside the caller; or at the group's end
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flagcx.arguments import check_algorithm, check_rank, on_device, untangle
from flagcx.communicator import functional
from flagcx.communicator.buffers import buffers_of, v_buffers_of
from flagcx.config import Config
from flagcx.dtypes import Op, dtype_of, resolve_op
from flagcx.errors import ArgumentError, CommunicationError
from flagcx.executor.host import Executor
from flagcx.executor.open import open_device_executor
from flagcx.executor.staging import stage
from flagcx.foreign_arrays import is_immutable
from flagcx.fusion.fuse import Fusion, HostPacker, Packer
from flagcx.fusion.group import Group, Pending
from flagcx.fusion.limits import host_limits
from flagcx.profiler import RecordBuffer
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.transport.base import Plan, TransportContext

if TYPE_CHECKING:
    from flagcx.bootstrap.store import Store
    from flagcx.compression.allreduce import Compressor
    from flagcx.executor.device import DeviceExecutor

MISS = object()
"""What ``run_again`` returns where no call like this one was made before."""


class Repeat(NamedTuple):
    """What is left to do of a call like an earlier one.

    Attributes:
        run: Runs its plan: ``run(sendbuf, recvbuf)``; on a GPU the plan itself.
        sends: Whether this rank has a ``sendbuf``.
        receives: Whether it has a ``recvbuf``.
        shape: The shape of the array to make for the result; None where it goes to ``out`` or ``x``.
    """

    run: Any
    sends: bool
    receives: bool
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Lineage:
    """The communicator that a communicator is what is left of; the same on all of its ranks.

    Attributes:
        store: The part of the store that all ranks of the first one share, the lost ones too.
        hosts: The host of each of them.
        name: What the first one is called in messages.
        members: The ranks that are left, as the first one numbered them.
        generation: How many times ranks went on without others.
    """

    store: Store
    hosts: tuple[str, ...]
    name: str
    members: tuple[int, ...]
    generation: int = 0


class Caller:
    """One executor for each kind of array, the open group, and the two ways of a call.

    Attributes:
        rank: This rank, from 0.
        size: Number of ranks.
        config: Settings.
    """

    rank: int
    size: int
    hosts: tuple[str, ...]
    config: Config
    _host: Executor
    _device: DeviceExecutor | None
    _context: TransportContext
    _ring: RecordBuffer | None
    _store: Store | None
    _group: Group | None
    _fusions: dict[int, Fusion]
    _compressors: dict[int, Compressor]
    _children: weakref.WeakSet[Any]
    _at_close: list[Callable[[], object]]
    _lineage: Lineage | None
    _splits: int
    _name: str
    _shut: bool
    lost: tuple[int, ...]
    on_shrink: Callable[[Any], object]

    def _give_back(self) -> None:
        raise NotImplementedError

    def executors(self) -> list[Executor]:
        """The executors that are open."""
        return [executor for executor in (self._host, self._device) if executor is not None]

    # -- a call like an earlier one -----------------------------------------------------------------

    def run_again(
        self, collective: str, x: Any, out: Any, op: Op | None, root: int | None, algorithm: str | None
    ) -> Any:
        """Runs a call like an earlier one, whose arrays are plain and apart.

        Returns:
            What the call returns; ``MISS`` where the checked way has to be taken, and nothing was done.
        """
        if x.__class__ is not np.ndarray:
            return self.again_on_device(collective, x, out, op, root, algorithm)
        executor = self._host
        key: tuple
        try:
            if out is None:
                key = (collective, x.shape, x.dtype, op, root, algorithm)
            else:
                key = (collective, x.shape, x.dtype, op, root, algorithm, out.shape, out.dtype)
            repeat = executor.quick.get(key)
        except (AttributeError, TypeError):
            return MISS
        if repeat is None or not x.flags.carray:
            return MISS
        run, sends, receives, shape = repeat
        recvbuf = out
        if out is None:
            recvbuf = x if shape is None else np.empty(shape, x.dtype)
        elif not is_apart(out, x):
            return MISS
        if not executor.turn.acquire(False):
            return MISS
        try:
            executor.quietly(run, x if sends else None, recvbuf if receives else None)
        except BaseException as error:
            executor.broke(error)
            raise
        finally:
            executor.turn.release()
        if executor.noted:
            executor.float_errors.warn()
        return recvbuf if receives else None

    def again_on_device(
        self,
        collective: str,
        x: Any,
        out: Any,
        op: Op | None,
        root: int | None,
        algorithm: str | None,
        counts: tuple | None = None,
    ) -> Any:
        """``run_again`` for arrays on a GPU, also with blocks that differ in size."""
        device = self._device
        if device is None or x.__class__ is not device.array_class:
            return MISS
        try:
            like = None if out is None else (out.shape, out.dtype)
            repeat = device.quick.get((collective, x.shape, x.dtype, op, root, algorithm, like, counts))
        except (AttributeError, TypeError):
            return MISS
        if repeat is None or not device.is_contiguous(x):
            return MISS
        plan, sends, receives, shape = repeat
        recvbuf = out
        if out is None:
            recvbuf = x if shape is None else device.result(None, "", shape, x.dtype)
        elif not device.is_apart(out, x):
            return MISS
        device.run(plan, x if sends else None, recvbuf if receives else None)
        return recvbuf if receives else None

    # -- any other call -----------------------------------------------------------------------------

    def call(
        self,
        collective: str,
        x: Any,
        out: Any = None,
        *,
        op: Any = None,
        root: int | None = None,
        counts: tuple | None = None,
        dtype: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        stream: Any = None,
        part_of: str = "",
    ) -> Any:
        """Checks a call, finds its plan, and runs it now, later, or at the end of the group.

        Args:
            collective: Its name.
            x: The caller's array; None where this rank has none.
            out: The caller's array for the result, or None.
            op: The operation, of a collective that reduces.
            root: The root, of a rooted collective.
            counts: Elements of each block, where they differ.
            dtype: Element type, where no array tells it.
            algorithm: As the caller names it.
            async_op: Whether to return a ``Work``.
            stream: See ``Communicator``.
            part_of: The caller's call that it is a step of, for messages; empty where it is that itself.
        """
        if stream is not None:
            again = partial(self.call, collective, op=op, root=root, counts=counts, dtype=dtype)
            return self.run_on(stream, again, (x, out), algorithm=algorithm, async_op=async_op)
        check_algorithm(algorithm)
        if COLLECTIVES[collective].rooted:
            root = check_rank(root, self.size, "root")
        if is_immutable(x):
            again = partial(self.call, collective, op=op, root=root, counts=counts, dtype=dtype)
            again = partial(again, algorithm=algorithm, async_op=async_op, part_of=part_of)
            return functional.call(self, again, collective, root, x, out)
        executor = self.executor_of(out if x is None else x)
        try:
            if counts is None:
                found = buffers_of(executor, collective, root, x, out)
            else:
                found = v_buffers_of(executor, collective, root, x, out, counts, dtype)
        except ArgumentError as error:
            self.note_refusal(error)
            raise
        sendbuf, recvbuf, counts_of, value = found
        staging = stage(executor, sendbuf, recvbuf, collective != "broadcast" or sendbuf is None)
        if staging is not None:
            sendbuf, recvbuf = staging.sendbuf, staging.recvbuf
        sendbuf, in_place = untangle(collective, self.rank, sendbuf, recvbuf, counts_of)
        kind = dtype_of((recvbuf if sendbuf is None else sendbuf).dtype)
        resolved = resolve_op(op, kind) if COLLECTIVES[collective].reduces else None
        like = collective, counts_of, kind, resolved, root, algorithm, in_place, part_of
        look_up = partial(executor.find, *like)

        def find() -> Plan:
            return look_up() if staging is None else staging.around(look_up())

        if self._group is not None:
            return self.put_off(Pending(lambda: executor.run(find(), sendbuf, recvbuf)), async_op, value)
        plan = find()
        on_host = executor is self._host
        as_they_are = staging is None and not (part_of or (in_place and out is not None))
        if as_they_are and (counts is None or not on_host):
            first, second = (out, None) if x is None else (x, out)
            what = collective, op, root, algorithm, counts
            self._remember(executor, plan, what, first, second, sendbuf, recvbuf)
        return self.run(executor, plan, sendbuf, recvbuf, value, async_op, collective)

    def note_refusal(self, error: ArgumentError) -> None:
        """Notes for peers that will wait for it that this rank has refused its arrays of a call."""
        if self._context.waits is not None and self.size > 1:
            self._context.waits.note_refusal(error)

    def _remember(
        self, executor: Executor, plan: Plan, what: tuple, x: Any, out: Any, sendbuf: Any, recvbuf: Any
    ) -> None:
        """Lets calls like this one go straight to its plan, where its arrays were taken as they are."""
        if sendbuf is not None and sendbuf is not x:
            return
        collective, op, root, algorithm, counts = what
        like = () if out is None else (out.shape, out.dtype)
        on_host = executor is self._host  # which runs a bound method, made once
        run = plan.run if on_host else plan
        if collective == "allreduce":
            if recvbuf is (x if out is None else out):
                executor.remember((x.shape, x.dtype, op, algorithm, *like), run)
        elif x.__class__ is executor.array_class and (recvbuf is None or recvbuf is out or out is None):
            shape = None if recvbuf is None or recvbuf is x or recvbuf is out else recvbuf.shape
            key: tuple = (collective, x.shape, x.dtype, op, root, algorithm, *like)
            if not on_host:
                key = (*key[:6], like or None, counts)
            executor.remember(key, Repeat(run, sendbuf is not None, recvbuf is not None, shape))

    @staticmethod
    def run(
        executor: Executor, plan: Plan, sendbuf: Any, recvbuf: Any, value: Any, async_op: bool, what: str
    ) -> Any:
        """Runs a plan now, or starts it; returns what the caller gets."""
        if async_op:
            return executor.start(plan, sendbuf, recvbuf, value, what)
        executor.run(plan, sendbuf, recvbuf)
        return value

    def put_off(self, call: Pending, async_op: bool, value: Any) -> Any:
        """Leaves a call to the end of the open group.

        Raises:
            ArgumentError: It would be asynchronous.
        """
        refuse_async(async_op)
        assert self._group is not None
        self._group.append(call)
        return value

    def run_on(self, stream: Any, call: Callable[..., Any], arrays: tuple, **options: Any) -> Any:
        """Makes a call with ``stream`` as the current one, which keeps its arrays until it has used them.

        Raises:
            ArgumentError: No array of the call is on a GPU, or a group is open.
        """
        listed = [one if isinstance(one, (list, tuple)) else [one] for one in arrays]
        used = [array for few in listed for array in few if array is not None]
        if not any(on_device(array) for array in used):
            raise ArgumentError("stream= is for arrays on a GPU, and none of this call's is; leave it out")
        if self._group is not None:
            raise ArgumentError(
                "stream= has no meaning inside comm.group(), whose calls run at its end; put the whole group "
                "into a 'with stream:' block"
            )
        with stream:
            value = call(*arrays, **options)
        if self._device is not None:
            self._device.transport.keep(stream, *used, value)
        return value

    # -- executors ----------------------------------------------------------------------------------

    def executor_of(self, array: Any) -> Executor:
        """The executor for arrays like ``array``."""
        return self.device_executor() if on_device(array) else self._host

    def device_executor(self) -> DeviceExecutor:
        """The executor for arrays on GPUs; the first call with one, which all ranks make, joins the ranks."""
        if self._device is None:
            self._host.check()
            try:
                self._device = open_device_executor(self._context, self._ring)
                self._device.partner, self._host.partner = self._host, self._device
            except CommunicationError as error:
                self._host.broke(error)
                raise
            if self._group is not None:
                self._device.hold()
        return self._device

    def fusion_of(self, executor: Executor) -> Fusion:
        """Fuses the all-reduces of an executor; made when first needed."""
        found = self._fusions.get(id(executor))
        if found is None:
            packer: Packer
            if executor is self._host:
                packer = HostPacker(executor.transport.empty, host_limits(executor.transport))
            else:
                packer = self._device_packer(executor)
            found = self._fusions[id(executor)] = Fusion(executor, packer)
        return found

    def _device_packer(self, executor: Executor) -> Packer:
        from flagcx.fusion.pack_device import DevicePacker

        transport: Any = executor.transport
        return DevicePacker(transport.device, empty=transport.empty if transport.peers else None)


def is_apart(out: Any, x: np.ndarray) -> bool:
    """Whether a result can go to ``out`` without a closer look: a plain array that does not overlap ``x``."""
    if out.__class__ is not np.ndarray or out is x:
        return False
    flags = out.flags
    # Two arrays that own their memory never overlap.
    return flags.carray and ((flags.owndata and x.flags.owndata) or not np.may_share_memory(out, x))


def refuse_async(async_op: bool) -> None:
    """Refuses ``async_op=True`` inside ``comm.group()``.

    Raises:
        ArgumentError: It is True.
    """
    if async_op:
        raise ArgumentError("async_op=True has no meaning inside comm.group(): its calls run at the end")
