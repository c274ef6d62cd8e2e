"""The catalogue: every algorithm with the collective it serves, what it takes and what it costs.

Costs are closed forms in the number of ranks n and of pieces k: ``steps``, those on the longest path, and
``sent``, what the busiest rank sends as a share of the message (of all n blocks, where a collective has
blocks). A cost model needs no more than these two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from flagcx.algorithms import (
    binomial,
    bruck,
    chain,
    direct,
    dissemination,
    double_binary_tree,
    hierarchical,
    recursive,
    ring,
    scatter_allgather,
    tree,
)
from flagcx.algorithms.moves import rounds_to_double
from flagcx.algorithms.names import Algorithm
from flagcx.errors import ArgumentError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.model import Schedule


@dataclass(frozen=True, slots=True)
class AlgorithmEntry:
    """One algorithm for one collective.

    Attributes:
        algorithm: Its name: a member of ``Algorithm``, or the string a user registered it under.
        collective: The collective that it serves.
        function: Makes the schedule: ``function(size)``, with the keywords ``root`` where the collective is
            rooted, ``pieces`` where pipelined, ``groups`` where grouped.
        steps: (size, pieces) -> steps on the longest path.
        sent: (size, pieces) -> what the busiest rank sends, as a share of the message; root 0.
        uneven: Whether blocks may have different sizes (allgatherv and so on). Collectives without blocks
            take any count with any algorithm.
        pipelined: Whether it takes ``pieces``.
        grouped: Whether it takes ``groups``.
        ordered: Whether sums are made in the order of ranks, 0 first, wherever they are made.
        restriction: What it asks of the number of ranks, in words; empty if nothing.
        allows: (size) -> whether it can serve that many ranks.
        trusted: Whether it is verified by the project's own tests; others are when a schedule is built.
    """

    algorithm: str
    collective: str
    function: Callable[..., Schedule]
    steps: Callable[[int, int], int]
    sent: Callable[[int, int], Fraction]
    uneven: bool = False
    pipelined: bool = False
    grouped: bool = False
    ordered: bool = False
    restriction: str = ""
    allows: Callable[[int], bool] = lambda size: size >= 1
    trusted: bool = True

    @property
    def rooted(self) -> bool:
        """Whether ``function`` takes a root."""
        return COLLECTIVES[self.collective].rooted

    def make(
        self,
        size: int,
        root: int | None = None,
        pieces: int = 1,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> Schedule:
        """Makes the schedule.

        Args:
            size: Number of ranks.
            root: The root of a rooted collective, else None.
            pieces: Pieces that a block, or the part of the message on one tree, is cut into.
            groups: The ranks of each group (host), for a grouped algorithm; None for its default.

        Raises:
            ArgumentError: The algorithm does not take what is given.
        """
        name = f"algorithm {str(self.algorithm)!r} of {self.collective}"
        if not self.allows(size):
            raise ArgumentError(
                f"{name} cannot serve {size} ranks; {self.restriction or 'expected 1 or more'}"
            )
        if self.rooted != (root is not None):
            needed = f"needs a root from 0 to {size - 1}" if self.rooted else "has no root"
            raise ArgumentError(f"{name} {needed}, got root={root}")
        if pieces != 1 and not self.pipelined:
            raise ArgumentError(f"{name} is not pipelined, got pieces={pieces}; leave it at 1")
        if groups is not None and not self.grouped:
            raise ArgumentError(f"{name} does not take groups, got groups={groups!r}; leave them out")
        given: dict[str, Any] = {}
        given |= {"root": root} if self.rooted else {}
        given |= {"pieces": pieces} if self.pipelined else {}
        given |= {"groups": groups} if self.grouped else {}
        return self.function(size, **given)


def builtin_entries() -> Iterator[AlgorithmEntry]:
    """The entries that come with flagcx, by collective, in the order of ``Algorithm``."""
    for collective, rows in _rows().items():
        for algorithm, function, steps, sent, *traits in rows:
            yield AlgorithmEntry(
                algorithm,
                collective,
                function,
                steps,
                sent,
                uneven="uneven" in traits,
                pipelined="pipelined" in traits,
                grouped="grouped" in traits,
                ordered="ordered" in traits,
            )


def _rows() -> dict[str, tuple]:
    """For each collective: algorithm, function, steps, sent, and the traits that hold."""
    a, dbt, lanes = Algorithm, double_binary_tree, hierarchical.default_lanes
    return {
        "allreduce": (
            (a.RING, ring.ring_allreduce, _twice(ring.ring_rounds), _twice(_but_one), "pipelined"),
            (a.CHAIN, chain.chain_allreduce, chain.both_ways, _choose(0, 1, 2), "pipelined"),
            (a.TREE, tree.tree_allreduce, tree.both_ways, _choose(0, 1, 2, 2, 3), "pipelined"),
            (a.BINOMIAL, binomial.binomial_allreduce, _twice(_log), _log_times),
            (a.DBT, dbt.double_binary_tree_allreduce, dbt.both_ways, _choose(0, 1, 1.5, 2), "pipelined"),
            (a.RECURSIVE_DOUBLING, recursive.recursive_doubling_allreduce, _doubling, _doubled),
            (a.HALVING_DOUBLING, recursive.halving_doubling_allreduce, _halving_doubling, _halved),
            (a.ONE_SHOT, direct.one_shot_allreduce, _one, _to_each, "ordered"),
            (a.TWO_SHOT, direct.two_shot_allreduce, _twice(_one), _twice(_but_one), "ordered"),
            (a.BRUCK, bruck.bruck_allreduce, _twice(_log), _twice(_but_one)),
            (
                a.HIERARCHICAL,
                hierarchical.hierarchical_allreduce,
                lambda n, k: 2 * hierarchical.spread_rounds(lanes(n)),
                lambda n, k: hierarchical.allreduce_sent(lanes(n)),
                "grouped",
            ),
        ),
        "reduce": (
            (a.CHAIN, chain.chain_reduce, chain.one_way, _once, "pipelined"),
            (a.TREE, tree.tree_reduce, tree.one_way, _once, "pipelined"),
            (a.BINOMIAL, binomial.binomial_reduce, _log, _once),
            (a.DBT, dbt.double_binary_tree_reduce, dbt.one_way, _once, "pipelined"),
            (a.DIRECT, direct.direct_reduce, _one, _once, "ordered"),
            (
                a.HIERARCHICAL,
                hierarchical.hierarchical_reduce,
                lambda n, k: hierarchical.broadcast_rounds(lanes(n)),
                _once,
                "grouped",
            ),
            (
                a.REDUCE_SCATTER_GATHER,
                scatter_allgather.reduce_scatter_gather_reduce,
                _twice(_log),
                lambda n, k: _but_one(n, k) + _branch(n, k),
            ),
        ),
        "broadcast": (
            (a.CHAIN, chain.chain_broadcast, chain.one_way, _once, "pipelined"),
            (a.TREE, tree.tree_broadcast, tree.one_way, _choose(0, 1, 2), "pipelined"),
            (a.BINOMIAL, binomial.binomial_broadcast, _log, _log_times),
            (a.DBT, dbt.double_binary_tree_broadcast, dbt.one_way, _once, "pipelined"),
            (a.DIRECT, direct.direct_broadcast, _one, _to_each),
            (
                a.HIERARCHICAL,
                hierarchical.hierarchical_broadcast,
                lambda n, k: hierarchical.broadcast_rounds(lanes(n)),
                lambda n, k: hierarchical.broadcast_sent(lanes(n)),
                "grouped",
            ),
            (
                a.SCATTER_ALLGATHER,
                scatter_allgather.scatter_allgather_broadcast,
                _twice(_log),
                _twice(_but_one),
            ),
        ),
        "allgather": (
            (a.RING, ring.ring_allgather, ring.ring_rounds, _but_one, "uneven", "pipelined"),
            (
                a.RECURSIVE_DOUBLING,
                recursive.recursive_doubling_allgather,
                _doubling,
                lambda n, k: Fraction(recursive.blocks_sent_by_rank_0(n), n),
                "uneven",
            ),
            (a.DIRECT, direct.direct_allgather, _one, _but_one, "uneven"),
            (a.BRUCK, bruck.bruck_allgather, _log, _but_one, "uneven"),
            (
                a.HIERARCHICAL,
                hierarchical.hierarchical_allgather,
                lambda n, k: hierarchical.allgather_rounds(lanes(n)),
                lambda n, k: hierarchical.allgather_sent(lanes(n)),
                "uneven",
                "grouped",
            ),
        ),
        "reduce_scatter": (
            (a.RING, ring.ring_reduce_scatter, ring.ring_rounds, _but_one, "uneven", "pipelined"),
            (a.HALVING_DOUBLING, recursive.halving_reduce_scatter, _doubling, _but_one, "uneven"),
            (a.DIRECT, direct.direct_reduce_scatter, _one, _but_one, "uneven", "ordered"),
            (a.BRUCK, bruck.bruck_reduce_scatter, _log, _but_one, "uneven"),
            (
                a.HIERARCHICAL,
                hierarchical.hierarchical_reduce_scatter,
                lambda n, k: hierarchical.allgather_rounds(lanes(n)),
                _but_one,
                "uneven",
                "grouped",
            ),
        ),
        "gather": (
            (a.BINOMIAL, binomial.binomial_gather, _log, _branch, "uneven"),
            (a.DIRECT, direct.direct_gather, _one, lambda n, k: Fraction(_one(n), n), "uneven"),
        ),
        "scatter": (
            (a.BINOMIAL, binomial.binomial_scatter, _log, _but_one, "uneven"),
            (a.DIRECT, direct.direct_scatter, _one, _but_one, "uneven"),
        ),
        "alltoall": (
            (a.DIRECT, direct.direct_alltoall, _one, _but_one, "uneven"),
            (a.BRUCK, bruck.bruck_alltoall, _log, lambda n, k: Fraction(bruck.blocks_moved(n), n)),
            (a.PAIRWISE, direct.pairwise_alltoall, lambda n, k: n - 1, _but_one, "uneven"),
        ),
        "barrier": (
            (a.BINOMIAL, binomial.binomial_barrier, _twice(_log), _log_times),
            (a.RECURSIVE_DOUBLING, recursive.recursive_doubling_barrier, _doubling, _doubled),
            (a.DISSEMINATION, dissemination.dissemination_barrier, _log, _log_times),
        ),
    }


def _log(n: int, k: int = 1) -> int:
    return rounds_to_double(n)


def _log_times(n: int, k: int = 1) -> Fraction:
    return Fraction(rounds_to_double(n))


def _one(n: int, k: int = 1) -> int:
    return min(n - 1, 1)


def _once(n: int, k: int = 1) -> Fraction:
    return Fraction(_one(n))


def _to_each(n: int, k: int = 1) -> Fraction:
    return Fraction(n - 1)


def _but_one(n: int, k: int = 1) -> Fraction:
    """(n-1)/n: all blocks but one, the least where each rank owns one of n."""
    return Fraction(n - 1, n)


def _branch(n: int, k: int = 1) -> Fraction:
    """The blocks that the busiest rank but the root hands up a binomial tree."""
    return Fraction(max((min(1 << j, n - (1 << j)) for j in range(_log(n))), default=0), n)


def _twice(function: Callable) -> Callable:
    return lambda n, k: 2 * function(n, k)


def _choose(*sent: float) -> Callable[[int, int], Fraction]:
    """``sent[n - 1]``, the last from there on: how many children the busiest rank of a tree has."""
    return lambda n, k: Fraction(sent[min(n, len(sent)) - 1])


def _doubling(n: int, k: int = 1) -> int:
    return recursive.doubling_rounds(n)


def _doubled(n: int, k: int = 1) -> Fraction:
    _, exponent, extra = recursive.core(n)
    return Fraction(exponent + (1 if extra else 0))


def _halving_doubling(n: int, k: int = 1) -> int:
    return recursive.halving_doubling_rounds(n)


def _halved(n: int, k: int = 1) -> Fraction:
    power, _, extra = recursive.core(n)
    return 2 * _but_one(power) + (1 if extra else 0)
