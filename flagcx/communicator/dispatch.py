"""What all operations of a communicator share: from checked arguments to the executor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flagcx.arguments import on_device, untangle
from flagcx.config import Config, environment
from flagcx.dtypes import ReduceOp, dtype_of
from flagcx.errors import ArgumentError, CommunicatorError
from flagcx.executor.host import Executor
from flagcx.fusion.fuse import Fusion, HostPacker, Packer
from flagcx.fusion.group import Group, Pending
from flagcx.schedule.collectives import Counts
from flagcx.transport.base import Plan

if TYPE_CHECKING:
    from flagcx.bootstrap.store import Store
    from flagcx.compression.allreduce import Compressor
    from flagcx.executor.device import DeviceExecutor


class Dispatch:
    """Base of the communicator: one executor for each kind of array, and the open group.

    Attributes:
        rank: This rank, from 0.
        size: Number of ranks.
    """

    rank: int
    size: int
    config: Config
    _executor: Executor
    _device: DeviceExecutor | None
    _store: Store | None
    _group: Group | None
    _fusions: dict[int, Fusion]
    _compressors: dict[int, Compressor]

    def _executor_of(self, array: Any) -> Executor:
        """The executor for arrays like ``array``."""
        return self._device_executor() if on_device(array) else self._executor

    def _device_executor(self) -> DeviceExecutor:
        """The executor for arrays on GPUs, made at the first need of it."""
        if self._device is None:
            self._device = self._make_device_executor()
        return self._device

    def _make_device_executor(self) -> DeviceExecutor:
        """Joins the ranks for arrays on GPUs, at the first call with one, which all ranks make."""
        from flagcx.executor.device import DeviceExecutor
        from flagcx.selection.on_device import DeviceSelector, agree
        from flagcx.topology import detect
        from flagcx.transport.nccl.transport import NcclTransport

        if self._store is None:
            raise CommunicatorError("this communicator was made without a store, which arrays on GPUs need")
        self._executor.check()
        transport = NcclTransport(self._store, self.config)
        agreed = agree(self._store, transport, self.config, environment(), detect)
        made = DeviceExecutor(transport, DeviceSelector(agreed))
        made.ring, made.order = self._executor.ring, agreed.order
        if self._group is not None:
            made.hold()
        return made

    def _fusion_of(self, executor: Executor) -> Fusion:
        """What fuses all-reduces of an executor; made when first needed."""
        found = self._fusions.get(id(executor))
        if found is None:
            packer: Packer = (
                HostPacker(executor.transport.empty)
                if executor is self._executor
                else self._device_packer(executor)
            )
            found = self._fusions[id(executor)] = Fusion(executor, packer)
        return found

    def _device_packer(self, executor: Executor) -> Packer:
        from flagcx.fusion.pack_device import DevicePacker

        transport: Any = executor.transport
        return DevicePacker(transport.device, empty=transport.empty if transport.peers else None)

    def _call(
        self,
        executor: Executor,
        collective: str,
        given: Any,
        result: Any,
        counts: Counts,
        value: Any,
        *,
        op: ReduceOp | None = None,
        root: int | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Makes a call now, later, or at the end of the group; ``value`` is what its caller gets."""
        given, in_place = untangle(collective, self.rank, given, result, counts)
        dtype = dtype_of((result if given is None else given).dtype)

        def find():
            return executor.find(collective, counts, dtype, op, root, algorithm, in_place)

        if self._group is not None:
            return self._put_off(Pending(lambda: executor.run(find(), given, result)), async_op, value)
        return self._go(executor, find(), given, result, value, async_op, collective)

    def _go(self, executor: Executor, plan: Plan, given, result, value, async_op: bool, what: str) -> Any:
        if async_op:
            return executor.start(plan, given, result, value, what)
        executor.run(plan, given, result)
        return value

    def _put_off(self, call: Pending, async_op: bool, value: Any) -> Any:
        refuse_async(async_op)
        assert self._group is not None
        self._group.append(call)
        return value


def refuse_async(async_op: bool) -> None:
    """Raises ArgumentError for a call inside ``comm.group()`` that would be asynchronous."""
    if async_op:
        raise ArgumentError("async_op=True has no meaning inside comm.group(): its calls run at the end")
