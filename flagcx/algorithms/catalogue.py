"""The algorithms: their names, and a table of those that come with flagcx.

An algorithm is a function of the number of ranks that returns a schedule; almost all else that is known of it
follows from that function and its schedules. The table adds whether blocks may differ in size, whether sums
are made in the order of ranks, and what the busiest rank sends, which would take the programs of all ranks to
count.
"""

from __future__ import annotations

import enum
import inspect
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
from flagcx.errors import ArgumentError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.model import Schedule
from flagcx.schedule.pattern import Pattern, check, doublings
from flagcx.schedule.traffic import rounds_of

ClosedForm = Callable[[int, int], Fraction]
"""(ranks, pieces) -> what the busiest rank sends, as a share of the message."""


class Algorithm(str, enum.Enum):
    """How a collective is carried out. The value is the name used everywhere else.

    A member equals its value, so ``fc.Algorithm.RING`` and ``"ring"`` mean the same.

    Example:
        >>> Algorithm("double_binary_tree") is Algorithm.DBT
        True
    """

    RING = "ring"
    """Once or twice round a ring, a block at a time. Least traffic, most steps: for large messages."""
    CHAIN = "chain"
    """Along a row of ranks in pieces. For the largest broadcasts and reductions."""
    TREE = "tree"
    """A binary tree, pipelined. For messages of middle size."""
    BINOMIAL = "binomial"
    """A binomial tree, the fewest steps from or to one rank. For small messages."""
    DOUBLE_BINARY_TREE = "double_binary_tree"
    """Two binary trees at once, each with half of the message: a tree's steps at full bandwidth."""
    DBT = DOUBLE_BINARY_TREE
    """Short for DOUBLE_BINARY_TREE."""
    RECURSIVE_DOUBLING = "recursive_doubling"
    """Partners at distances 1, 2, 4, ... exchange all they have. For small messages."""
    HALVING_DOUBLING = "halving_doubling"
    """Partners exchange halves, quarters, ...: a ring's traffic in logarithmic steps (powers of two)."""
    ONE_SHOT = "one_shot"
    """Every rank sends all to all others and adds up. One step: for the smallest messages and few ranks."""
    TWO_SHOT = "two_shot"
    """Each rank adds up one block, then sends it to all. Two steps, least traffic, all links at once."""
    DIRECT = "direct"
    """Each message straight from its owner to the rank that needs it, in one step."""
    BRUCK = "bruck"
    """Distances double, blocks travel together: logarithmic steps for any number of ranks."""
    PAIRWISE = "pairwise"
    """An alltoall in n-1 steps, each rank with one partner at a time. For large messages."""
    DISSEMINATION = "dissemination"
    """A barrier in logarithmic steps: each rank tells those 1, 2, 4, ... further on."""
    HIERARCHICAL = "hierarchical"
    """Within groups (hosts) first, then between groups on as many lanes as a group has ranks."""
    SCATTER_ALLGATHER = "scatter_allgather"
    """A broadcast as scatter and allgather: a long message leaves the root about twice in all."""
    REDUCE_SCATTER_GATHER = "reduce_scatter_gather"
    """A reduce as reduce_scatter and gather, for long messages."""
    NATIVE = "native"
    """The library's own collective (NCCL's or MPI's). It has no schedule."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class AlgorithmEntry:
    """One algorithm for one collective.

    Attributes:
        algorithm: Its name: a member of ``Algorithm``, or the string a user registered it under.
        collective: The collective that it serves.
        function: Makes the schedule: ``function(size)``, with the keywords ``root`` where the collective is
            rooted, ``pieces`` where pipelined, ``groups`` where grouped.
        pipelined: Whether it takes ``pieces``.
        grouped: Whether it takes ``groups``.
        uneven: Whether blocks may have different sizes (allgatherv and so on). Collectives without blocks
            take any count with any algorithm.
        ordered: Whether sums are made in the order of ranks, 0 first, wherever they are made.
        closed_form: What the busiest rank sends; None where it is counted.
        trusted: Whether it is verified by the project's own tests; others are when a schedule is built.
    """

    algorithm: str
    collective: str
    function: Callable[..., Schedule]
    pipelined: bool
    grouped: bool = False
    uneven: bool = False
    ordered: bool = False
    closed_form: ClosedForm | None = None
    trusted: bool = False

    @property
    def rooted(self) -> bool:
        """Whether ``function`` takes a root."""
        return COLLECTIVES[self.collective].rooted

    @property
    def restriction(self) -> str:
        """What it asks of the number of ranks, in words; empty if nothing."""
        return "" if self.trusted else "its own function refuses that number"

    def allows(self, size: int) -> bool:
        """Whether it can serve ``size`` ranks."""
        if not self.trusted:
            try:
                self.function(size, **({"root": 0} if self.rooted else {}))
            except ArgumentError:
                return False
        return size >= 1

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
            ArgumentError: The algorithm does not take one of these arguments.
            RankError: The root is not one of the ranks.
        """
        name = f"algorithm {str(self.algorithm)!r} of {self.collective}"
        if not self.allows(size):
            raise ArgumentError(
                f"{name} cannot serve {size} ranks; {self.restriction or 'expected 1 or more'}"
            )
        if self.rooted != (root is not None):
            needed = f"needs a root from 0 to {size - 1}" if self.rooted else "has no root"
            raise ArgumentError(f"{name} {needed}, got root={root}")
        check(self.collective, size, pieces, root)
        if pieces != 1 and not self.pipelined:
            raise ArgumentError(f"{name} is not pipelined, got pieces={pieces}; leave it at 1")
        if groups is not None and not self.grouped:
            raise ArgumentError(f"{name} does not take groups, got groups={groups!r}; leave them out")
        keywords: dict[str, Any] = {"root": root} if self.rooted else {}
        keywords |= {"pieces": pieces} if self.pipelined else {}
        keywords |= {"groups": groups} if self.grouped else {}
        return self.function(size, **keywords)

    def _example(self, size: int, pieces: int) -> Schedule:
        return self.make(size, 0 if self.rooted else None, pieces)

    def steps(self, size: int, pieces: int = 1) -> int:
        """Steps in which messages are under way, for root 0."""
        schedule = self._example(size, pieces)
        if isinstance(schedule.make, Pattern):
            return schedule.make.rounds
        if self.trusted:  # rank 0 takes part in all of them
            return sum(1 for step in schedule.program(0).steps if step.transfers)
        return rounds_of(schedule).steps

    def sent(self, size: int, pieces: int = 1) -> Fraction:
        """What the busiest rank sends, as a share of the message (of all blocks, where there are blocks)."""
        if self.closed_form is not None:
            return self.closed_form(size, pieces)
        schedule = self._example(size, pieces)
        return Fraction(int(rounds_of(schedule).sent_chunks().max()), schedule.chunks)


def takes(function: Callable[..., Schedule], name: str) -> bool:
    """Whether an algorithm's function takes the keyword ``name``."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def builtin_entries() -> Iterator[AlgorithmEntry]:
    """The entries that come with flagcx, by collective, in the order of ``Algorithm``."""
    for function, closed_form, *traits in _table():
        made = function(1)
        yield AlgorithmEntry(
            Algorithm(made.algorithm),
            made.collective,
            function,
            pipelined=takes(function, "pieces"),
            grouped=takes(function, "groups"),
            uneven="uneven" in traits,
            ordered="ordered" in traits,
            closed_form=closed_form,
            trusted=True,
        )


def _table() -> tuple[tuple, ...]:
    """Each algorithm's function, what the busiest rank sends, and the traits that hold."""
    dbt, lanes = double_binary_tree, hierarchical.default_lanes
    return (
        (ring.ring_allreduce, _twice(_but_one)),
        (chain.chain_allreduce, _choose(0, 1, 2)),
        (tree.tree_allreduce, _choose(0, 1, 2, 2, 3)),
        (binomial.binomial_allreduce, _log_times),
        (dbt.double_binary_tree_allreduce, _choose(0, 1, 1.5, 2)),
        (recursive.recursive_doubling_allreduce, _doubled),
        (recursive.halving_doubling_allreduce, _halved),
        (direct.one_shot_allreduce, _to_each, "ordered"),
        (direct.two_shot_allreduce, _twice(_but_one), "ordered"),
        (bruck.bruck_allreduce, _twice(_but_one)),
        (hierarchical.hierarchical_allreduce, lambda n, k: hierarchical.allreduce_sent(lanes(n))),
        (chain.chain_reduce, _once),
        (tree.tree_reduce, _once),
        (binomial.binomial_reduce, _once),
        (dbt.double_binary_tree_reduce, _once),
        (direct.direct_reduce, _once, "ordered"),
        (hierarchical.hierarchical_reduce, _once),
        (scatter_allgather.reduce_scatter_gather_reduce, lambda n, k: _but_one(n) + _branch(n)),
        (chain.chain_broadcast, _once),
        (tree.tree_broadcast, _choose(0, 1, 2)),
        (binomial.binomial_broadcast, _log_times),
        (dbt.double_binary_tree_broadcast, _once),
        (direct.direct_broadcast, _to_each),
        (hierarchical.hierarchical_broadcast, lambda n, k: hierarchical.broadcast_sent(lanes(n))),
        (scatter_allgather.scatter_allgather_broadcast, _twice(_but_one)),
        (ring.ring_allgather, _but_one, "uneven"),
        (
            recursive.recursive_doubling_allgather,
            lambda n, k: Fraction(recursive.blocks_sent_by_rank_0(n), n),
            "uneven",
        ),
        (direct.direct_allgather, _but_one, "uneven"),
        (bruck.bruck_allgather, _but_one, "uneven"),
        (hierarchical.hierarchical_allgather, lambda n, k: hierarchical.allgather_sent(lanes(n)), "uneven"),
        (ring.ring_reduce_scatter, _but_one, "uneven"),
        (recursive.halving_reduce_scatter, _but_one, "uneven"),
        (direct.direct_reduce_scatter, _but_one, "uneven", "ordered"),
        (bruck.bruck_reduce_scatter, _but_one, "uneven"),
        (hierarchical.hierarchical_reduce_scatter, _but_one, "uneven"),
        (binomial.binomial_gather, _branch, "uneven"),
        (direct.direct_gather, lambda n, k: _once(n) / n, "uneven"),
        (binomial.binomial_scatter, _but_one, "uneven"),
        (direct.direct_scatter, _but_one, "uneven"),
        (direct.direct_alltoall, _but_one, "uneven"),
        (bruck.bruck_alltoall, lambda n, k: Fraction(bruck.blocks_moved(n), n)),
        (direct.pairwise_alltoall, _but_one, "uneven"),
        (binomial.binomial_barrier, _log_times),
        (recursive.recursive_doubling_barrier, _doubled),
        (dissemination.dissemination_barrier, _log_times),
    )


def _log_times(n: int, k: int = 1) -> Fraction:
    return Fraction(doublings(n))


def _once(n: int, k: int = 1) -> Fraction:
    return Fraction(min(n - 1, 1))


def _to_each(n: int, k: int = 1) -> Fraction:
    return Fraction(n - 1)


def _but_one(n: int, k: int = 1) -> Fraction:
    """(n-1)/n: all blocks but one, the least where each rank owns one of n."""
    return Fraction(n - 1, n)


def _branch(n: int, k: int = 1) -> Fraction:
    """The blocks that the busiest rank but the root sends up a binomial tree."""
    return Fraction(max((min(1 << j, n - (1 << j)) for j in range(doublings(n))), default=0), n)


def _twice(function: Callable) -> Callable:
    return lambda n, k: 2 * function(n, k)


def _choose(*sent: float) -> Callable[[int, int], Fraction]:
    """``sent[n - 1]``, the last from there on: how many children the busiest rank of a tree has."""
    return lambda n, k: Fraction(sent[min(n, len(sent)) - 1])


def _doubled(n: int, k: int = 1) -> Fraction:
    _, exponent, extra = recursive.core(n)
    return Fraction(exponent + (1 if extra else 0))


def _halved(n: int, k: int = 1) -> Fraction:
    power, _, extra = recursive.core(n)
    return 2 * _but_one(power) + (1 if extra else 0)
