"""The debug mode: before each call, the ranks tell each other what they are about to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flagcx.bootstrap.store import Store
from flagcx.config import Config
from flagcx.errors import MismatchError
from flagcx.transport.base import Call, Plan


class Compared:
    """A plan that runs only if all ranks are about to make the same call. It waits for them, so it is slow.

    Args:
        plan: The plan.
        store: The communicator's part of the store.
        call: What it does.
        config: Settings.
    """

    def __init__(self, plan: Plan, store: Store, call: Call, config: Config) -> None:
        self._plan, self._store, self._timeout_s = plan, store, config.timeout_s
        self._own = call.describe()

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        """See ``Plan.run``.

        Raises:
            MismatchError: On every rank, if they differ.
            PeerTimeoutError: A rank makes no call. Named.
        """
        told = self._store.exchange("nccl/check", self._own.encode(), self._timeout_s)
        check_alike({rank: call.decode() for rank, call in enumerate(told)})
        self._plan.run(sendbuf, recvbuf)


def check_alike(told: Mapping[int, str]) -> None:
    """Raises MismatchError that names the call of each rank of ``told``, unless all are alike."""
    counts = Counter(told.values())
    if len(counts) == 1:
        return
    usual = counts.most_common(1)[0][0]
    odd = next(rank for rank, what in told.items() if what != usual)
    lines = "\n".join(f"  rank {rank}: {what}" for rank, what in told.items())
    raise MismatchError(
        f"the ranks call different operations, first rank {odd}; all must make the same call:\n{lines}",
        peer=odd,
    )


def compare_last(told: Mapping[int, Sequence[tuple[int, str]]]) -> None:
    """Compares the last calls of ranks.

    Args:
        told: For each rank the number and the words of its last calls.

    Raises:
        MismatchError: They differ in a call that all of them still know. The first one is named.
    """
    calls = {rank: dict(few) for rank, few in told.items()}
    for number in sorted(set.intersection(*(set(few) for few in calls.values()))):
        check_alike({rank: few[number] for rank, few in calls.items()})


def compare_marks(told: Mapping[int, Sequence[tuple[int, int]]]) -> None:
    """Compares what stands for all calls of ranks so far.

    Args:
        told: For each rank its marks: (number of calls, what stands for all calls up to it).

    Raises:
        MismatchError: They differ. The calls that are known to agree, and those that do not, are numbered.
    """
    marks = {rank: dict(few) for rank, few in told.items()}
    agreed = 0
    for number in sorted(set.intersection(*(set(few) for few in marks.values()))):
        counts = Counter(few[number] for few in marks.values())
        if len(counts) > 1:
            usual = counts.most_common(1)[0][0]
            odd = next(rank for rank, few in marks.items() if few[number] != usual)
            raise MismatchError(
                f"the ranks made different calls, first rank {odd}, somewhere between their calls {agreed:,} "
                f"and {number:,}; every rank must make the same calls in the same order. FLAGCX_DEBUG=check "
                f"names the call",
                peer=odd,
            )
        agreed = number
