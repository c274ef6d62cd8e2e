"""Ranks on several hosts: which transport carries NumPy arrays, and along which schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from flagcx.algorithms.candidate import Candidate
from flagcx.bootstrap.store import Store
from flagcx.config import Config
from flagcx.dtypes import DType, ReduceOp
from flagcx.errors import BootstrapError, CommunicatorError, FlagcxError, MissingDependencyError
from flagcx.executor.host import Executor
from flagcx.profiler import RecordBuffer
from flagcx.schedule.collectives import Counts
from flagcx.selection.across_hosts import choose_across_hosts
from flagcx.transport.base import Call, Plan, Transport
from flagcx.transport.mpi import MpiTransport
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


class Missing:
    """Stands for a transport that cannot be had, until somebody needs it.

    Args:
        rank: This rank.
        size: Number of ranks.
        why: What is raised then.
    """

    name = "missing"

    def __init__(self, rank: int, size: int, why: FlagcxError) -> None:
        self.rank, self.size, self._why = rank, size, why

    def _refuse(self, *_: object) -> NoReturn:
        raise type(self._why)(str(self._why))

    compile = transfer = take = result = empty = _refuse

    def abort(self, reason: str, culprit: int | None) -> None:
        """Nobody waits for this rank."""

    def close(self) -> None:
        """Nothing to give back."""


class MultiHostExecutor(Executor):
    """Plans and order of one communicator's calls on NumPy arrays, between hosts.

    Args:
        rank: This rank.
        hosts: The host of each rank.
        exchange: Sends bytes to all ranks and returns everybody's, in rank order.
        config: Settings.
        store: The ranks' part of the store.
        ring: Where runs are recorded, if they are.

    Attributes:
        groups: The ranks of each host.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        exchange: Callable[[bytes], list[bytes]],
        config: Config,
        store: Store | None,
        ring: RecordBuffer | None,
    ) -> None:
        if store is None:
            raise CommunicatorError(
                "this communicator was made without a store, which ranks on several hosts need"
            )
        self.groups = groups_of(hosts)
        transport: Transport
        try:
            transport = MpiTransport(rank, len(hosts), exchange, config, store)
        except (MissingDependencyError, BootstrapError) as error:
            transport = Missing(rank, len(hosts), error)  # Arrays on GPUs need no MPI.
        super().__init__(
            rank, len(hosts), throttled(transport, config.throttle), self._choose_for_hosts, ring=ring
        )
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
