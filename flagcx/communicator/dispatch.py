"""What all operations of a communicator share: from checked arguments to the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flagcx.arguments import on_device
from flagcx.collectives import Counts
from flagcx.config import Config, environment
from flagcx.dtypes import ReduceOp, dtype_of
from flagcx.engine import Engine
from flagcx.errors import ArgumentError, CommunicatorError
from flagcx.fusion import Fusion, HostPacker, Packer
from flagcx.group import Group, Pending
from flagcx.transport.base import Plan

if TYPE_CHECKING:
    from flagcx.bootstrap.store import Store
    from flagcx.communicator.compressed import Compressor
    from flagcx.device_engine import DeviceEngine

Op = str | ReduceOp | np.ufunc


class Dispatch:
    """Base of the communicator: one engine for each kind of array, and the open group.

    Attributes:
        rank: This rank, from 0.
        size: Number of ranks.
    """

    rank: int
    size: int
    config: Config
    _engine: Engine
    _device: DeviceEngine | None
    _store: Store | None
    _group: Group | None
    _fusions: dict[int, Fusion]
    _compressors: dict[int, Compressor]

    def _engine_of(self, array: Any) -> Engine:
        """The engine for arrays like ``array``."""
        return self._device_engine() if on_device(array) else self._engine

    def _device_engine(self) -> DeviceEngine:
        """The engine for arrays on GPUs, made at the first need of it."""
        if self._device is None:
            self._device = self._make_device_engine()
        return self._device

    def _make_device_engine(self) -> DeviceEngine:
        """Joins the ranks for arrays on GPUs, at the first call with one, which all ranks make."""
        from flagcx.device_engine import DeviceEngine
        from flagcx.selection.on_device import DeviceSelector, agree
        from flagcx.topology import detect
        from flagcx.transport.nccl_transport import NcclTransport

        if self._store is None:
            raise CommunicatorError("this communicator was made without a store, which arrays on GPUs need")
        self._engine.check()
        transport = NcclTransport(self._store, self.config)
        agreed = agree(self._store, transport, self.config, environment(), detect)
        made = DeviceEngine(transport, DeviceSelector(agreed))
        made.ring, made.order = self._engine.ring, agreed.order
        if self._group is not None:
            made.hold()
        return made

    def _fusion_of(self, engine: Engine) -> Fusion:
        """What fuses all-reduces of an engine; made when first needed."""
        found = self._fusions.get(id(engine))
        if found is None:
            packer: Packer = (
                HostPacker(engine.transport.empty) if engine is self._engine else self._device_packer(engine)
            )
            found = self._fusions[id(engine)] = Fusion(engine, packer)
        return found

    def _device_packer(self, engine: Engine) -> Packer:
        from flagcx.fusion_device import DevicePacker

        transport: Any = engine.transport
        return DevicePacker(transport.device, empty=transport.empty if transport.peers else None)

    def _call(
        self,
        engine: Engine,
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
            return engine.find(collective, counts, dtype, op, root, algorithm, in_place)

        if self._group is not None:
            return self._put_off(Pending(lambda: engine.run(find(), given, result)), async_op, value)
        return self._go(engine, find(), given, result, value, async_op, collective)

    def _go(self, engine: Engine, plan: Plan, given, result, value, async_op: bool, what: str) -> Any:
        if async_op:
            return engine.start(plan, given, result, value, what)
        engine.run(plan, given, result)
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


def untangle(collective: str, rank: int, given: Any, result: Any, counts: Counts = 0) -> tuple[Any, bool]:
    """Finds out how INPUT and OUTPUT lie to each other.

    Args:
        collective: Name of the collective.
        rank: This rank.
        given: INPUT, or None.
        result: OUTPUT, or None.
        counts: Elements of each rank's block where they differ; else any number.

    Returns:
        The INPUT to use, and whether the call is in place. Where the two overlap in any other way than
        the collective's own form in place, the INPUT is a copy.
    """
    if given is None or result is None:
        return given, False
    if given is result and collective != "alltoall":
        return given, True
    if not np.may_share_memory(given, result):
        return given, False
    if collective == "alltoall":
        return _copy(given), False
    at, to = _address(given), _address(result)
    block = min(given.nbytes, result.nbytes)
    before = rank * block if isinstance(counts, int) else sum(counts[:rank]) * given.itemsize
    if collective in ("allgather", "gather"):
        fits = at - to == before and given.nbytes < result.nbytes
    elif collective in ("reduce_scatter", "scatter"):
        fits = to - at == before and result.nbytes < given.nbytes
    else:
        fits = at == to and given.nbytes == result.nbytes
    return (given, True) if fits else (_copy(given), False)


def _copy(array: Any) -> Any:
    """A copy, also of a CuPy array of fp8, with which CuPy cannot compute."""
    return array.reshape(-1).view(np.uint8).copy().view(array.dtype).reshape(array.shape)


def _address(array: Any) -> int:
    """Where a NumPy or CuPy array begins."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0]
    return array.data.ptr
