"""Ranks on several hosts: which transport carries NumPy arrays, and along which schedules."""

from __future__ import annotations

from collections.abc import Sequence

from flagcx.algorithms.candidate import Candidate
from flagcx.dtypes import DType, ReduceOp
from flagcx.errors import CommunicatorError
from flagcx.executor.host import Executor
from flagcx.profiler import RecordBuffer
from flagcx.schedule.collectives import Counts
from flagcx.selection.across_hosts import choose_across_hosts
from flagcx.transport.base import HOST, Call, Plan, TransportContext
from flagcx.transport.registry import open_transport
from flagcx.transport.throttled import throttled

Groups = tuple[tuple[int, ...], ...]


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

    Attributes:
        groups: The ranks of each host.
    """

    def __init__(self, context: TransportContext, ring: RecordBuffer | None) -> None:
        if context.store is None:
            raise CommunicatorError(
                "this communicator was made without a store, which ranks on several hosts need"
            )
        self.groups = groups_of(context.hosts)
        transport = throttled(open_transport(HOST, context), context.config.throttle)
        super().__init__(context.rank, context.size, transport, self._choose_for_hosts, ring=ring)
        # Rings and chains pass each host once.
        self.order = tuple(rank for group in self.groups for rank in group)

    def _choose_for_hosts(self, collective: str, nbytes: int, size: int, uneven: bool) -> Candidate:
        return choose_across_hosts(collective, nbytes, self.groups, uneven)

    def _make(
        self,
        collective: str,
        counts: Counts,
        dtype: DType,
        op: ReduceOp | None,
        root: int | None,
        in_place: bool,
        choice: Candidate,
    ) -> Plan:
        schedule = choice.along(self.order, self.groups).build(collective, self.size, root)
        return self.transport.compile(Call(schedule, self.rank, counts, dtype, op, in_place, choice.protocol))
