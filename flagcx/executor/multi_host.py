"""Ranks on several hosts: which transport carries NumPy arrays, and along which schedules."""

from __future__ import annotations

from collections.abc import Sequence

from flagcx.algorithms.candidate import Groups
from flagcx.errors import CommunicatorError
from flagcx.executor.host import Executor
from flagcx.profiler import RecordBuffer
from flagcx.selection.rules import MultiHostRules
from flagcx.selection.selector import Selector, TuningInfo
from flagcx.transport.base import HOST, TransportContext
from flagcx.transport.registry import open_transport
from flagcx.transport.throttled import throttled


def groups_of(hosts: Sequence[str]) -> Groups:
    """The ranks of each host, in the order in which the hosts come first.

    Example:
        >>> groups_of(["a", "b", "a"])
        ((0, 2), (1,))
    """
    return tuple(
        tuple(rank for rank, other in enumerate(hosts) if other == host) for host in dict.fromkeys(hosts)
    )


class MultiHostExecutor(Executor):
    """Plans and order of one communicator's calls on NumPy arrays, between hosts.

    Args:
        context: The communicator.
        ring: Where runs are recorded, if they are.
    """

    def __init__(self, context: TransportContext, ring: RecordBuffer | None) -> None:
        if context.store is None:
            raise CommunicatorError(
                "this communicator was made without a store, which ranks on several hosts need"
            )
        groups = groups_of(context.hosts)
        along_hosts = tuple(
            rank for group in groups for rank in group
        )  # Rings and chains pass each host once.
        selector = Selector(
            MultiHostRules(groups), TuningInfo(None, "not measured between hosts"), along_hosts, groups
        )
        transport = throttled(open_transport(HOST, context), context.config.throttle)
        super().__init__(context.rank, context.size, transport, selector, ring=ring)
