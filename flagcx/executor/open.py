"""Makes the executors of a communicator: a transport that serves the job, and what chooses for it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flagcx.algorithms.candidate import Groups
from flagcx.config import environment
from flagcx.errors import CommunicatorError
from flagcx.executor.float_errors import SAME_MODE
from flagcx.executor.host import Executor
from flagcx.profiler import RecordBuffer
from flagcx.selection.rules import HostRules, MultiHostRules, Rules
from flagcx.selection.selector import PiggybackExchange, Selector, TuningInfo, look_for_table
from flagcx.selection.table import fit_here
from flagcx.transport.base import DEVICE, HOST, Transport, TransportContext, groups_of
from flagcx.transport.compared import comparing
from flagcx.transport.registry import TransportEntry, find_transport, open_transport
from flagcx.transport.throttled import throttled

if TYPE_CHECKING:
    from flagcx.cost.hosts import HostLinks
    from flagcx.executor.device import DeviceExecutor


def open_host_executor(context: TransportContext, ring: RecordBuffer | None) -> Executor:
    """Makes what runs calls on NumPy arrays. All ranks call it together.

    Args:
        context: The communicator.
        ring: Where runs are recorded, if they are.

    Raises:
        CommunicatorError: Ranks are on several hosts, and there is no store to join them.
        BootstrapError: No transport serves the job.
    """
    groups = groups_of(context.hosts)
    if len(groups) > 1 and context.store is None:
        raise CommunicatorError(
            "this communicator was made without a store, which ranks on several hosts need"
        )
    entry = find_transport(HOST, context)
    mine = _told_by_rank_0(context, entry, groups) if context.rank == 0 else None
    exchange = PiggybackExchange(context.exchange, mine)
    transport: Any = entry.open(replace(context, exchange=exchange))
    if exchange.told is None:  # a transport that exchanged nothing
        exchange(b"")
    _compare_modes(exchange.flushes)
    rules: Rules = HostRules(transport, context.hosts[context.rank])
    shares = transport.shares_memory
    transport = comparing(throttled(transport, context.config.throttle), context)
    if len(groups) > 1:
        rules = MultiHostRules(groups, _links(transport, groups, context), shares)
    selector = Selector(rules, exchange.told, groups if len(groups) > 1 else None)
    executor = Executor(context.rank, context.size, transport, selector, ring)
    return recorded(executor, context)


def _links(transport: Transport, groups: Groups, context: TransportContext) -> HostLinks | None:
    """What messages take between the hosts; None where the rule alone chooses."""
    if context.config.deterministic or not context.config.tuning:
        return None
    from flagcx.selection.host_links import measure_host_links

    store, limit_s = context.store, context.config.init_timeout_s
    assert store is not None

    # In a split the context's exchange is one of all ranks, of which some are in parts that measure nothing.
    def exchange(what: str, mine: bytes) -> list[bytes]:
        return store.exchange(f"hosts' {what}", mine, limit_s)

    return measure_host_links(transport, groups, exchange)


def recorded(executor: Executor, context: TransportContext) -> Any:
    """Has the errors of an executor written into the job's flight record."""
    if context.waits is not None:
        executor.record = context.waits.record
    return executor


def _told_by_rank_0(context: TransportContext, entry: TransportEntry, groups: Groups) -> TuningInfo:
    """Measured times on one host; over the network rings and chains pass each host once."""
    if len(groups) == 1:
        return _look_for_table(context, entry)
    along_hosts = tuple(rank for group in groups for rank in group)
    return TuningInfo(None, "times by the model of the hosts' links", order=along_hosts)


def _compare_modes(flushes: list[bool]) -> None:
    """Warns, on every rank, where some ranks flush subnormal numbers to zero and others don't."""
    if any(flushes) and not all(flushes):
        ranks = ", ".join(str(rank) for rank, flushing in enumerate(flushes) if flushing)
        warnings.warn(
            f"of {len(flushes)} ranks these flush subnormal numbers to zero: {ranks}; {SAME_MODE}",
            RuntimeWarning,
            stacklevel=2,
        )


def _look_for_table(context: TransportContext, entry: TransportEntry) -> TuningInfo:
    settings = entry.load().settings(context.config)
    return look_for_table(context.config, fit_here(context.size, entry.name, settings), environment())


def open_device_executor(context: TransportContext, ring: RecordBuffer | None) -> DeviceExecutor:
    """Makes what runs calls on arrays on GPUs. All ranks call it together.

    Args:
        context: The communicator.
        ring: Where runs are recorded, if they are.

    Raises:
        CommunicatorError: There is no store to join the ranks.
        MissingDependencyError: There is no GPU, or no CuPy.
    """
    from flagcx.executor.device import DeviceExecutor
    from flagcx.selection.selector import device_selector
    from flagcx.topology import detect

    store, config = context.store, context.config
    if store is None:
        raise CommunicatorError("this communicator was made without a store, which arrays on GPUs need")

    if context.waits is not None:
        context.waits.join_gpus(config.init_timeout_s)

    def exchange(mine: bytes) -> list[bytes]:
        return store.exchange("device", mine, config.init_timeout_s)

    transport: Any = open_transport(DEVICE, replace(context, exchange=exchange))
    selector = device_selector(store, transport, config, environment(), detect)
    return recorded(DeviceExecutor(comparing(transport, context), selector, ring), context)
