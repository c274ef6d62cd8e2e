"""Makes the executors of a communicator: a transport that serves the job, and what chooses for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flagcx.algorithms.candidate import Groups
from flagcx.config import environment
from flagcx.errors import CommunicatorError
from flagcx.executor.host import Executor
from flagcx.profiler import RecordBuffer
from flagcx.selection.rules import HostRules, MultiHostRules
from flagcx.selection.selector import PiggybackExchange, Selector, TuningInfo, look_for_table
from flagcx.selection.table import fit_here
from flagcx.transport.base import DEVICE, HOST, TransportContext
from flagcx.transport.registry import TransportEntry, find_transport, open_transport
from flagcx.transport.throttled import throttled

if TYPE_CHECKING:
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
    if len(groups) > 1:
        transport, selector = _between_hosts(context, groups)
    else:
        transport, selector = _on_one_host(context)
    throttle = context.config.throttle
    return Executor(context.rank, context.size, throttled(transport, throttle), selector, ring)


def _on_one_host(context: TransportContext) -> tuple[Any, Selector]:
    """A transport whose first exchange carries the measured times that rank 0 found to the others."""
    entry = find_transport(HOST, context)
    mine = _look_for_table(context, entry) if context.rank == 0 else None
    exchange = PiggybackExchange(context.exchange, mine)
    transport = entry.open(replace(context, exchange=exchange))
    if exchange.told is None:  # a transport that exchanged nothing
        exchange(b"")
    rules = HostRules(transport, context.hosts[context.rank])
    return transport, Selector(rules, exchange.told)


def _look_for_table(context: TransportContext, entry: TransportEntry) -> TuningInfo:
    settings = entry.load().settings(context.config)
    return look_for_table(context.config, fit_here(context.size, entry.name, settings), environment())


def _between_hosts(context: TransportContext, groups: Groups) -> tuple[Any, Selector]:
    """A transport over the network; rings and chains pass each host once."""
    if context.store is None:
        raise CommunicatorError(
            "this communicator was made without a store, which ranks on several hosts need"
        )
    along_hosts = tuple(rank for group in groups for rank in group)
    found = TuningInfo(None, "not measured between hosts", order=along_hosts)
    return open_transport(HOST, context), Selector(MultiHostRules(groups), found, groups)


def groups_of(hosts: Sequence[str]) -> Groups:
    """The ranks of each host, in the order in which the hosts come first.

    Example:
        >>> groups_of(["a", "b", "a"])
        ((0, 2), (1,))
    """
    return tuple(
        tuple(rank for rank, other in enumerate(hosts) if other == host) for host in dict.fromkeys(hosts)
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

    def exchange(mine: bytes) -> list[bytes]:
        return store.exchange("device", mine, config.init_timeout_s)

    transport: Any = open_transport(DEVICE, replace(context, exchange=exchange))
    selector = device_selector(store, transport, config, environment(), detect)
    return DeviceExecutor(transport, selector, ring)
