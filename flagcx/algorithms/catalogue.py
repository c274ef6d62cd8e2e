"""The algorithms: their names, and those that come with flagcx.

An algorithm is a function of the number of ranks that returns a schedule. All else, such as its steps and
bytes, follows from that function and its schedules.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from flagcx.errors import ArgumentError, FlagcxError, ScheduleError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.model import Schedule
from flagcx.schedule.pattern import Pattern, check
from flagcx.schedule.traffic import rounds_of, sent_chunks

_FEW = 16
"""Of more ranks than this, only some are counted to find the busiest."""


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
        trusted: Whether it is verified by the project's own tests; others are when a schedule is built.
    """

    algorithm: str
    collective: str
    function: Callable[..., Schedule]
    pipelined: bool
    grouped: bool = False
    uneven: bool = False
    trusted: bool = False

    @property
    def rooted(self) -> bool:
        """Whether ``function`` takes a root."""
        return COLLECTIVES[self.collective].rooted

    def refusal(self, size: int) -> str:
        """Why it cannot serve ``size`` ranks, in its function's words; empty if it can."""
        if size < 1:
            return "expected 1 or more"
        if not self.trusted:
            try:
                self._call(size, {"root": 0} if self.rooted else {})
            except ArgumentError as error:
                return str(error) or "its function refuses that number"
        return ""

    def allows(self, size: int) -> bool:
        """Whether it can serve ``size`` ranks."""
        return not self.refusal(size)

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
            ScheduleError: The function of a user's algorithm raised another exception.
        """
        name = f"algorithm {str(self.algorithm)!r} of {self.collective}"
        if refusal := self.refusal(size):
            raise ArgumentError(f"{name} cannot serve {size} ranks: {refusal}")
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
        return self._call(size, keywords)

    def _call(self, size: int, keywords: dict[str, Any]) -> Schedule:
        try:
            return self.function(size, **keywords)
        except FlagcxError:
            raise
        except Exception as error:
            raise self.broken(size, keywords.get("root"), error) from error

    def broken(self, size: int, root: int | None, error: Exception) -> ScheduleError:
        """What is raised where the user's own code raised ``error``."""
        said = str(error) if isinstance(error, FlagcxError) else f"it raised {type(error).__name__}: {error}"
        ranks = "1 rank" if size == 1 else f"{size} ranks"
        rooted = "" if root is None else f", root {root}"
        return ScheduleError(
            f"algorithm {str(self.algorithm)!r} of {self.collective}, {ranks}{rooted}: {said}"
        )

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
        """The part of the message (of all blocks, where it has blocks) that the busiest rank sends.

        Of many ranks of a trusted algorithm, a few are counted: in all of these algorithms, the busiest is
        among the first and last ranks, those in the middle, and those at a power of two.
        """
        schedule = self._example(size, pieces)
        power = 1 << (size.bit_length() - 1)
        ranks: Iterable[int] = range(size)
        if size > _FEW and self.trusted:
            ranks = {0, 1, 2, 3, size // 2 - 1, size // 2, power // 2, power - 1, power % size, size - 1}
        return Fraction(max(sent_chunks(schedule, rank) for rank in ranks), schedule.chunks)


def takes(function: Callable[..., Schedule], name: str) -> bool:
    """Whether an algorithm's function takes the keyword ``name``."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def builtin_entries() -> Iterator[AlgorithmEntry]:
    """The entries that come with flagcx, by collective, in the order of ``Algorithm``."""
    for function in _FUNCTIONS:
        made = function(1)
        kind = COLLECTIVES[made.collective]
        yield AlgorithmEntry(
            Algorithm(made.algorithm),
            kind.name,
            function,
            pipelined=takes(function, "pieces"),
            grouped=takes(function, "groups"),
            uneven=kind.blocks and function is not bruck.bruck_alltoall,
            trusted=True,
        )


_FUNCTIONS: tuple[Callable[..., Schedule], ...] = (
    ring.ring_allreduce,
    chain.chain_allreduce,
    tree.tree_allreduce,
    binomial.binomial_allreduce,
    double_binary_tree.double_binary_tree_allreduce,
    recursive.recursive_doubling_allreduce,
    recursive.halving_doubling_allreduce,
    direct.one_shot_allreduce,
    direct.two_shot_allreduce,
    bruck.bruck_allreduce,
    hierarchical.hierarchical_allreduce,
    chain.chain_reduce,
    tree.tree_reduce,
    binomial.binomial_reduce,
    double_binary_tree.double_binary_tree_reduce,
    direct.direct_reduce,
    hierarchical.hierarchical_reduce,
    scatter_allgather.reduce_scatter_gather_reduce,
    chain.chain_broadcast,
    tree.tree_broadcast,
    binomial.binomial_broadcast,
    double_binary_tree.double_binary_tree_broadcast,
    direct.direct_broadcast,
    hierarchical.hierarchical_broadcast,
    scatter_allgather.scatter_allgather_broadcast,
    ring.ring_allgather,
    recursive.recursive_doubling_allgather,
    direct.direct_allgather,
    bruck.bruck_allgather,
    hierarchical.hierarchical_allgather,
    ring.ring_reduce_scatter,
    recursive.halving_reduce_scatter,
    direct.direct_reduce_scatter,
    bruck.bruck_reduce_scatter,
    hierarchical.hierarchical_reduce_scatter,
    binomial.binomial_gather,
    direct.direct_gather,
    binomial.binomial_scatter,
    direct.direct_scatter,
    direct.direct_alltoall,
    bruck.bruck_alltoall,
    direct.pairwise_alltoall,
    binomial.binomial_barrier,
    recursive.recursive_doubling_barrier,
    dissemination.dissemination_barrier,
)
