"""Makes the executors of a communicator: a transport that serves the job, and what chooses for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flagcx.algorithms.candidate import Groups
from flagcx.config import environment
from flagcx.errors import CommunicatorError
from flagcx.executor.float_errors import SAME_MODE
from flagcx.executor.host import Executor
from flagcx.profiler import RecordBuffer
from flagcx.selection.rules import HostRules, MultiHostRules, Rules
from flagcx.selection.selector import PiggybackExchange, Selector, TuningInfo, fitting, look_for_table
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
    found = exchange.told
    assert found is not None
    _compare_modes(exchange.flushes)
    rules: Rules = HostRules(transport, context.hosts[context.rank])
    shares = transport.shares_memory
    transport = comparing(throttled(transport, context.config.throttle), context)
    if len(groups) > 1:
        links = _links(transport, groups, context)
        rules = MultiHostRules(groups, links, shares)
        found = _fitting(found, groups, links, context)
    selector = Selector(rules, found, groups if len(groups) > 1 else None)
    executor = Executor(context.rank, context.size, transport, selector, ring)
    return recorded(executor, context)


def _links(transport: Transport, groups: Groups, context: TransportContext) -> HostLinks | None:
    """What messages take between the hosts; None where the rule alone chooses."""
    if context.config.deterministic or not context.config.tuning:
        return None
    from flagcx.selection.host_links import measure_host_links

    return measure_host_links(transport, groups, exchange_of(context))


def exchange_of(context: TransportContext) -> Callable[[str, bytes], list[bytes]]:
    """What ranks tell each other of their hosts goes through this, by a name.

    In a split the context's own exchange is one of all ranks, of which some are in parts of one host.
    """
    store, limit_s = context.store, context.config.init_timeout_s
    assert store is not None
    return lambda what, mine: store.exchange(f"hosts' {what}", mine, limit_s)


def _fitting(
    found: TuningInfo, groups: Groups, links: HostLinks | None, context: TransportContext
) -> TuningInfo:
    """What rank 0 found, without a table that was measured on other hosts or links."""
    if found.table is None or links is None:
        return found
    from flagcx.selection.host_links import describe_hosts

    return fitting(found, describe_hosts(groups, links, exchange_of(context)), context.rank == 0)


def recorded(executor: Executor, context: TransportContext) -> Any:
    """Has the errors of an executor written into the job's flight record."""
    if context.waits is not None:
        executor.record = context.waits.record
    return executor


def _told_by_rank_0(context: TransportContext, entry: TransportEntry, groups: Groups) -> TuningInfo:
    """Measured times; between hosts rings and chains pass each host once."""
    config = context.config
    hosts = {"groups": [[*group] for group in groups]} if len(groups) > 1 else {}
    fit = fit_here(context.size, entry.name, entry.load().settings(config), hosts)
    found = look_for_table(config, fit, environment())
    return replace(found, order=tuple(rank for group in groups for rank in group)) if hosts else found


def _compare_modes(flushes: list[bool]) -> None:
    """Warns, on every rank, where some ranks flush subnormal numbers to zero and others don't."""
    if any(flushes) and not all(flushes):
        ranks = ", ".join(str(rank) for rank, flushing in enumerate(flushes) if flushing)
        warnings.warn(
            f"of {len(flushes)} ranks these flush subnormal numbers to zero: {ranks}; {SAME_MODE}",
            RuntimeWarning,
            stacklevel=2,
        )


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
