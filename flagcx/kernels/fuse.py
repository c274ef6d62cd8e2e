"""Turns a list of local updates into chains, each computed in one pass by the fused kernel.

::

    updates, in order                    chains of one phase
    OUTPUT[0:8]  = SCRATCH[0:8]
    OUTPUT[0:8] += SCRATCH[8:16]   -->   OUTPUT[0:8] = SCRATCH[0:8] + SCRATCH[8:16] + SCRATCH[16:24]
    OUTPUT[0:8] += SCRATCH[16:24]

A *chain* writes a range of elements once and reads any number of sources: memory traffic of (sources + 1)
times its length and one rounding, where a launch for each update would need three times its length and one
rounding each. Chains of one *phase* run concurrently in one launch: none reads what another one writes. An
update that needs the result of an earlier one begins a new phase.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from flagcx.errors import ScheduleError
from flagcx.kernels.source import MAX_SOURCES

Place = tuple[int, int]
"""A memory's number and an element in it."""


class Finish(enum.IntEnum):
    """The last operation on a chain's result, before it is rounded and written."""

    NONE = 0
    SCALE = 1
    """Multiply by the launch's factor."""
    DIVIDE = 2
    """Divide by the launch's factor."""


@dataclass(frozen=True, slots=True)
class Update:
    """``to = source``, or ``to = op(to, source)`` where ``reduces``, for ``count`` elements."""

    to: Place
    source: Place
    count: int
    reduces: bool = False


@dataclass(frozen=True, slots=True)
class Chain:
    """``to = finish(op(... op(sources[0], sources[1]), ...))`` for ``count`` elements."""

    to: Place
    count: int
    sources: tuple[Place, ...]
    finish: Finish = Finish.NONE


Phase = tuple[Chain, ...]


def fuse(updates: Iterable[Update]) -> tuple[Phase, ...]:
    """Turns updates, in order, into as few phases as their dependencies allow.

    Raises:
        ScheduleError: A range is copied or reduced onto itself, shifted.

    Example:
        >>> sum_of_two = [Update((1, 0), (0, 0), 8), Update((1, 0), (2, 0), 8, reduces=True)]
        >>> fuse(sum_of_two)[0][0].sources
        ((0, 0), (2, 0))
    """
    phases: list[Phase] = []
    current: list[Update] = []
    for item in updates:
        if item.count == 0 or (not item.reduces and item.to == item.source):
            continue
        if item.to != item.source and overlap(item.to, item.source, item.count, item.count):
            raise ScheduleError(
                f"{item.count} elements at {item.source} are combined into themselves, shifted to {item.to}; "
                f"a copy needs a destination apart from its source"
            )
        if any(_depends(item, earlier) for earlier in current):
            phases.extend(_chains(current))
            current = []
        current.append(item)
    phases.extend(_chains(current))
    return tuple(phases)


def overlap(a: Place, b: Place, a_count: int, b_count: int) -> bool:
    """Whether ``a_count`` elements from ``a`` on and ``b_count`` from ``b`` on have one in common."""
    return a[0] == b[0] and a[1] < b[1] + b_count and b[1] < a[1] + a_count


def _depends(later: Update, earlier: Update) -> bool:
    reads_new = overlap(later.source, earlier.to, later.count, earlier.count)
    overwrites_read = overlap(later.to, earlier.source, later.count, earlier.count)
    return reads_new or overwrites_read


def _chains(updates: Sequence[Update]) -> list[Phase]:
    """The chains of updates that depend on each other only by a common destination."""
    edges: dict[int, set[int]] = {}
    for item in updates:
        edges.setdefault(item.to[0], set()).update((item.to[1], item.to[1] + item.count))
    ordered = {memory: sorted(at) for memory, at in edges.items()}
    found: dict[tuple[int, int, int], list[Place]] = {}
    for item in updates:
        memory, start = item.to
        at = ordered[memory]
        first, last = bisect_left(at, start), bisect_left(at, start + item.count)
        for a, b in zip(at[first:last], at[first + 1 : last + 1], strict=True):
            source = (item.source[0], item.source[1] + a - start)
            key = (memory, a, b)
            if not item.reduces:
                found[key] = [source]
            else:
                found.setdefault(key, [(memory, a)]).append(source)
    chains = [Chain((m, a), b - a, tuple(sources)) for (m, a, b), sources in sorted(found.items())]
    return _shortened(_merged(chains))


def _merged(chains: Iterable[Chain]) -> list[Chain]:
    """Joins neighbours whose sources are neighbours too."""
    merged: list[Chain] = []
    for chain in chains:
        last = merged[-1] if merged else None
        if last is not None and _continues(last, chain):
            merged[-1] = replace(last, count=last.count + chain.count)
        else:
            merged.append(chain)
    return merged


def _continues(last: Chain, chain: Chain) -> bool:
    def follows(a: Place, b: Place) -> bool:
        return a[0] == b[0] and a[1] + last.count == b[1]

    same = len(last.sources) == len(chain.sources) and follows(last.to, chain.to)
    return same and all(follows(a, b) for a, b in zip(last.sources, chain.sources, strict=True))


def _shortened(chains: list[Chain]) -> list[Phase]:
    """Splits chains of more than MAX_SOURCES sources over several phases."""
    phases = []
    while chains:
        phases.append(tuple(replace(c, sources=c.sources[:MAX_SOURCES]) for c in chains))
        chains = [
            replace(c, sources=(c.to, *c.sources[MAX_SOURCES:]))
            for c in chains
            if len(c.sources) > MAX_SOURCES
        ]
    return phases


def forward(phases: Sequence[Phase], is_dead: Callable[[Place, int], bool]) -> tuple[Phase, ...]:
    """Writes a sum straight to where the next phase would copy it, if nothing else reads it.

    ::

        SCRATCH = SCRATCH + INPUT     -->   OUTPUT = SCRATCH + INPUT
        OUTPUT  = SCRATCH

    Args:
        phases: As ``fuse`` returns them.
        is_dead: (place, count) -> whether nothing reads that range after these phases.
    """
    result: list[Phase] = []
    for number, phase in enumerate(phases):
        later = phases[number + 1 :]
        joined = _joined(result[-1], phase, later, is_dead) if result else None
        if joined is None:
            result.append(phase)
        else:
            result[-1] = joined
    return tuple(result)


def _joined(
    earlier: Phase, copies: Phase, later: Sequence[Phase], is_dead: Callable[[Place, int], bool]
) -> Phase | None:
    """The earlier phase with its chains redirected to where ``copies`` puts them, or None."""
    chains = list(earlier)
    for copy in copies:
        if len(copy.sources) != 1 or copy.finish is not Finish.NONE:
            return None
        source = copy.sources[0]
        inside = [i for i, c in enumerate(chains) if overlap(c.to, source, c.count, copy.count)]
        if sum(chains[i].count for i in inside) != copy.count or not is_dead(source, copy.count):
            return None
        if any(_reads(c, source, copy.count) for phase in (copies, *later) for c in phase if c is not copy):
            return None
        for i in inside:
            shift = chains[i].to[1] - source[1]
            if not 0 <= shift <= copy.count - chains[i].count:
                return None
            chains[i] = replace(chains[i], to=(copy.to[0], copy.to[1] + shift))
    return tuple(_merged(sorted(chains, key=attrgetter("to")))) if _independent(chains) else None


def _reads(chain: Chain, place: Place, count: int) -> bool:
    return any(overlap(source, place, chain.count, count) for source in chain.sources)


def _independent(chains: Sequence[Chain]) -> bool:
    """Whether no chain writes a range that another writes or reads, or that it reads itself shifted."""
    for i, chain in enumerate(chains):
        if any(s != chain.to and overlap(s, chain.to, chain.count, chain.count) for s in chain.sources):
            return False
        for j, other in enumerate(chains):
            apart = not overlap(chain.to, other.to, chain.count, other.count)
            if i != j and (not apart or _reads(other, chain.to, chain.count)):
                return False
    return True
