"""The ratios to its peers that flagcx holds itself to, and the verdict on a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from groups import OURS, OURS_SYMMETRIC
from report import Result, parse_size

SIZES = tuple(parse_size(text) for text in ("1K", "16K", "256K", "4M", "64M", "256M"))
"""The messages that are compared unless others are asked for, in bytes."""


@dataclass(frozen=True, slots=True)
class Target:
    """The least ratio, the peer's time to ours, at each of ``SIZES``.

    Attributes:
        ours: Which of our two ways: ``flagcx`` or ``flagcx.empty``.
        peer: The other library.
        ranks: The number of ranks that it's meant for.
        least: Size in bytes -> the least ratio; sizes without a target are left out.
    """

    ours: str
    peer: str
    ranks: int
    least: Mapping[int, float]


def _target(ours: str, peer: str, ranks: int, *ratios: float | None) -> Target:
    least = {size: ratio for size, ratio in zip(SIZES, ratios, strict=True) if ratio is not None}
    return Target(ours, peer, ranks, MappingProxyType(least))


TARGETS = (
    _target(OURS, "openmpi", 2, 0.7, 1.5, 1.5, 1.0, 3.0, 3.0),
    _target(OURS, "openmpi", 4, 0.7, 1.3, 1.3, 0.85, 2.5, 2.5),
    _target(OURS_SYMMETRIC, "openmpi", 2, None, None, 5.0, 5.0, 5.0, 5.0),
    *(_target(OURS, "mpich", ranks, *6 * [1.2]) for ranks in (2, 4)),
    *(_target(OURS, "gloo", ranks, *6 * [5.0]) for ranks in (2, 4)),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Our result beside a peer's.

    Attributes:
        ours: Our result.
        peer: The peer's, with the same ranks and size.
        least: The least ratio that we hold ourselves to; None where there is no target.
    """

    ours: Result
    peer: Result
    least: float | None

    @property
    def ratio(self) -> float:
        """The peer's median time as a multiple of ours."""
        return self.peer.median_us / self.ours.median_us

    @property
    def passed(self) -> bool:
        """Whether the target is reached (or there is none) and our results are right."""
        return not self.ours.wrong and (self.least is None or self.ratio >= self.least)

    @property
    def word(self) -> str:
        """``pass``, ``FAIL`` or, where there is no target and nothing wrong, nothing."""
        return "FAIL" if not self.passed else "" if self.least is None else "pass"


def judge(results: Sequence[Result], targets: Sequence[Target] = TARGETS) -> Iterator[Verdict]:
    """Compares each of our results with each peer's at the same number of ranks and size.

    Args:
        results: Results of one run.
        targets: What to hold them to.

    Yields:
        A verdict for each pair, in the order of ``results``.
    """
    least = {(t.ours, t.peer, t.ranks, size): ratio for t in targets for size, ratio in t.least.items()}
    for peer in results:
        for ours in results:
            alike = (peer.ranks, peer.nbytes) == (ours.ranks, ours.nbytes)
            if alike and ours.implementation in OUR_NAMES and peer.implementation not in OUR_NAMES:
                key = (ours.implementation, peer.implementation, peer.ranks, peer.nbytes)
                yield Verdict(ours, peer, least.get(key))


OUR_NAMES = (OURS, OURS_SYMMETRIC)
