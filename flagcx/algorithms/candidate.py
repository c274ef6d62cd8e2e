"""Candidates: everything that can run a call, as data, and the schedule that each stands for.

A candidate is an algorithm with its pieces, the order of the ranks, the groups of a hierarchy, the protocol
that moves the data, or two algorithms beside each other on parts of the message, where one alone leaves links
idle. Such a pair has a name as an algorithm has: ``ring|double_binary_tree`` cuts the message in halves, and
``ring 3/4|two_shot`` gives the ring three quarters. ``ring|ring`` goes round both ways at once: a ring sends
to one neighbour alone, and links carry as much in the other direction.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from fractions import Fraction
from functools import lru_cache

from flagcx.algorithms.catalogue import Algorithm, AlgorithmEntry
from flagcx.algorithms.registry import build, entry
from flagcx.errors import ArgumentError
from flagcx.schedule.compose import beside, relabel
from flagcx.schedule.model import Schedule

Order = tuple[int, ...]
Groups = tuple[tuple[int, ...], ...]

MOST_PIECES = 64
"""A message is cut into at most so many pieces."""
FOLLOWS_ORDER = (
    Algorithm.RING,
    Algorithm.CHAIN,
    Algorithm.TREE,
    Algorithm.BINOMIAL,
    Algorithm.DOUBLE_BINARY_TREE,
)
"""The algorithms in which most messages go between neighbours in rank order."""
BOTH_WAYS = (Algorithm.RING, Algorithm.CHAIN)
"""The algorithms that send in one direction of their order, so that a second one can use the other."""
_NAME = re.compile(r"([a-z_]+)(?: (\d{1,2})/(\d{1,2}))?\|([a-z_]+)")
_HALF = Fraction(1, 2)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a collective.

    Attributes:
        algorithm: Name of the algorithm; of the first, where there are two.
        pieces: Pieces that each block is cut into, so that they follow each other.
        protocol: How the transport moves the data; empty for its own rule.
        piece_nbytes: Bytes of a piece, where the message decides how many there are; else 0. See ``at``.
        order: The rank at each place of the schedule; None for the ranks as they are.
        groups: The ranks of each group, for a hierarchy; None for the algorithm's default.
        other: The candidate beside it on the rest of the message; None where it has all.
        share: The part of the message that the first has.
        reason: Why it is chosen, in a sentence. Candidates that differ in this alone are equal.
    """

    algorithm: str
    pieces: int = 1
    protocol: str = ""
    _: KW_ONLY
    piece_nbytes: int = 0
    order: Order | None = None
    groups: Groups | None = None
    other: Candidate | None = None
    share: Fraction = field(default=Fraction(1), hash=False)
    reason: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", str(self.algorithm))

    @classmethod
    def parse(cls, algorithm: str) -> Candidate:
        """The candidate that a call names with ``algorithm=``.

        Args:
            algorithm: A name, or two joined by "|".

        Raises:
            ArgumentError: Two are named otherwise than they must be, or to no use.

        Example:
            >>> Candidate.parse("ring 3/4|two_shot").share
            Fraction(3, 4)
        """
        name = str(algorithm)
        return _parse(name) if "|" in name else cls(name)

    @property
    def label(self) -> str:
        """The algorithm as a call names it, or both."""
        if self.other is None:
            return self.algorithm
        return f"{self.algorithm}{'' if self.share == _HALF else f' {self.share}'}|{self.other.label}"

    @property
    def name(self) -> str:
        """The algorithm with what is special about it, for people."""
        words = [self.algorithm]
        if self.pieces > 1:
            words.append(f"in {self.pieces} pieces")
        if self.piece_nbytes:
            words.append(f"in pieces of {self.piece_nbytes:,} B")
        if self.order is not None:
            shown = ",".join(map(str, self.order[:8])) + (",..." if len(self.order) > 8 else "")
            words.append(f"along {shown}")
        if self.groups is not None:
            words.append(f"in {len(self.groups)} groups")
        if self.protocol:
            words.append(f"({self.protocol})")
        if self.other is None:
            return " ".join(words)
        if len(words) == 1 and self.other.name == self.other.algorithm:
            return self.label
        return f"{' '.join(words)} ({self.share}) | {self.other.name}"

    def __str__(self) -> str:
        return self.name

    def __lt__(self, other: Candidate) -> bool:
        """By name: an order among equals that is the same on every rank."""
        return self.name < other.name

    def entries(self, collective: str) -> tuple[AlgorithmEntry, ...]:
        """What the catalogue says of the algorithm, or of both.

        Raises:
            ArgumentError: One does not serve the collective.
        """
        first = entry(collective, self.algorithm)
        return (first,) if self.other is None else (first, entry(collective, self.other.algorithm))

    def serves_uneven(self, collective: str) -> bool:
        """Whether it serves blocks of different sizes."""
        if self.algorithm == Algorithm.NATIVE:
            return True
        return self.other is None and entry(collective, self.algorithm).uneven

    def pieces_at(self, nbytes: int) -> int:
        """How many pieces a message (or block) of ``nbytes`` is cut into."""
        if not self.piece_nbytes:
            return self.pieces
        return max(min(-(-nbytes // self.piece_nbytes), MOST_PIECES), 1)

    def at(self, nbytes: int, reason: str = "") -> Candidate:
        """The candidate for messages (or blocks) of ``nbytes``, which settle its number of pieces."""
        return replace(self, pieces=self.pieces_at(nbytes), piece_nbytes=0, reason=reason or self.reason)

    def along(self, order: Sequence[int] | None, groups: Groups | None = None) -> Candidate:
        """The candidate along the links of the machine, as far as its algorithms follow these.

        Args:
            order: The ranks in an order in which neighbours are close; None where all are equally close.
            groups: The ranks of each host, for a hierarchy; None for the algorithm's default.
        """
        if order is None and groups is None:
            return self
        return replace(
            self,
            order=tuple(order) if order is not None and self.algorithm in FOLLOWS_ORDER else None,
            groups=groups if self.algorithm == Algorithm.HIERARCHICAL else None,
            other=None if self.other is None else self.other.along(order, groups),
        )

    def build(self, collective: str, size: int, root: int | None = None) -> Schedule:
        """The schedule, made once and kept.

        Args:
            collective: Name of the collective.
            size: Number of ranks.
            root: The root of a rooted collective, else None.

        Raises:
            ArgumentError: The algorithm does not serve the collective, or so many ranks.

        Example:
            >>> Candidate("tree", 4).build("broadcast", 8, root=3).chunks
            4
        """
        if self.order is None and self.other is None:
            return build(collective, self.algorithm, size, root, self.pieces, self.groups)
        return _composed(self, collective, size, root)


def _composed(candidate: Candidate, collective: str, size: int, root: int | None) -> Schedule:
    """A schedule along an order, or of two algorithms: where both are one, the second goes the other way."""
    order, other = candidate.order, candidate.other
    if other is not None:
        first = replace(candidate, other=None, share=Fraction(1))
        if (other.algorithm, other.order) == (first.algorithm, first.order):
            other = replace(other, order=(order or tuple(range(size)))[::-1])
        one, rest = (part.build(collective, size, root) for part in (first, other))
        return _beside(one, rest, candidate.share, candidate.label)
    assert order is not None
    place = None if root is None else order.index(root)
    plain = build(collective, candidate.algorithm, size, place, candidate.pieces, candidate.groups)
    return _relabelled(plain, order, candidate.algorithm)


# Kept by the schedules that they are made of, which change where an algorithm is registered again.
@lru_cache(maxsize=1024)
def _beside(one: Schedule, rest: Schedule, share: Fraction, label: str) -> Schedule:
    return beside(one, rest, share, algorithm=label)


@lru_cache(maxsize=1024)
def _relabelled(plain: Schedule, order: Order, algorithm: str) -> Schedule:
    return relabel(plain, order, algorithm=algorithm)


@lru_cache(maxsize=256)
def _parse(name: str) -> Candidate:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ArgumentError(
            f"algorithm={name!r} is no mix of two; expected two names such as 'ring|double_binary_tree', or "
            f"with the first one's part of the message 'ring 3/4|two_shot'"
        )
    first, over, under, second = match.groups()
    share = Fraction(int(over), int(under) or 1) if over else _HALF
    if not 0 < share < 1:
        raise ArgumentError(
            f"algorithm={name!r} gives the first {share} of the message; expected a part between 0 and 1"
        )
    if first == second and first not in BOTH_WAYS:
        both = " and ".join(map(str, BOTH_WAYS))
        raise ArgumentError(
            f"algorithm={name!r} is {first} twice, which does the same as once; {both} alone have a "
            f"direction, and gain by going both ways"
        )
    return Candidate(first, other=Candidate(second), share=share)
