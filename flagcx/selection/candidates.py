"""What is asked for, and the candidates for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isqrt
from typing import TYPE_CHECKING, NamedTuple

from flagcx.algorithms import AlgorithmEntry, entries
from flagcx.algorithms.candidate import Candidate
from flagcx.dtypes import DType, ReduceOp
from flagcx.errors import ArgumentError
from flagcx.selection.placement import best_groups, best_ring

if TYPE_CHECKING:
    from flagcx.topology import Topology

#: Up to so many ranks an algorithm in which a rank talks to all others at once is a candidate.
MOST_DIRECT = 512
SPLIT = ("ring|ring", "ring|double_binary_tree", "ring|two_shot", "ring 3/4|two_shot")
"""The pairs of algorithms on parts of the message that are candidates on GPUs."""
_ALONG_LINKS = ("ring", "chain")
_TO_ALL = ("one_shot", "two_shot", "direct", "pairwise")


class Request(NamedTuple):
    """What is asked for: a call, less its arrays. The same on every rank.

    Attributes:
        collective: Name of the collective.
        nbytes: Bytes of the message; of one block, where the collective has one a rank.
        size: Number of ranks.
        uneven: Whether the blocks differ in size.
        dtype: The element type, where it counts: on GPUs.
        op: The operation, where it counts and there is one.
    """

    collective: str
    nbytes: int
    size: int
    uneven: bool = False
    dtype: DType | None = None
    op: ReduceOp | None = None


def schedules(request: Request, piece_nbytes: Sequence[int]) -> list[Candidate]:
    """The schedules for a request that come with flagcx, with the pieces that differ at its size.

    Args:
        request: What is asked for.
        piece_nbytes: Lengths of piece that are tried, besides whole blocks.
    """
    found = []
    for known in entries(request.collective):
        if known.grouped or not known.trusted or not known.allows(request.size):
            continue
        plain = Candidate(known.algorithm)
        cut = [replace(plain, piece_nbytes=nbytes) for nbytes in piece_nbytes] if known.pipelined else []
        pieces = {1: plain} | {one.pieces_at(request.nbytes): one for one in cut}
        found += [plain if number == 1 else pieces[number] for number in sorted(pieces)]
    return found


def split_messages(collective: str, size: int) -> tuple[Candidate, ...]:
    """Two algorithms at once, where there are two ways round, or a tree can spare a ring its steps."""
    names = SPLIT if size > 2 and collective == "allreduce" else ()
    return tuple(Candidate.parse(name) for name in names)


def why_not(candidate: Candidate, request: Request) -> str:
    """Why a candidate, perhaps from a file, cannot serve a request by its schedule; empty if it can."""
    try:
        parts = candidate.entries(request.collective)
    except ArgumentError as error:
        return str(error)
    for part in parts:
        if part.grouped or not (part.trusted and part.allows(request.size)):
            return f"{candidate.label} is not used for {request.size} ranks"
    if request.uneven and (len(parts) > 1 or not parts[0].uneven):
        return f"{candidate.label} needs blocks of one size"
    if candidate.pieces_at(request.nbytes) > 1 and (len(parts) > 1 or not parts[0].pipelined):
        return f"{candidate.label} is not pipelined"
    return ""


def candidates(
    collective: str, size: int, topology: Topology | None = None, gpus: Sequence[int] | None = None
) -> tuple[Candidate, ...]:
    """The candidates for a collective over a topology, each with one piece, and none of two algorithms.

    Left out are algorithms that do not serve so many ranks, and above ``MOST_DIRECT`` ranks those in which
    each rank talks to all others.

    Args:
        collective: Name of the collective.
        size: Number of ranks.
        topology: Where they run: gives orders and groups. None for ranks that are all alike.
        gpus: The GPU of each rank; the first ones by index by default.

    Raises:
        ArgumentError: There is no such collective.

    Example:
        >>> [c.algorithm for c in candidates("scatter", 4)]
        ['binomial', 'direct']
    """
    if topology is None:
        gpus = ()
    elif gpus is None:
        gpus = [gpu.index for gpu in topology.gpus[:size]]
    order, groups = best_ring(topology, gpus), best_groups(topology, gpus)
    found: list[Candidate] = []
    for one in entries(collective):
        if one.allows(size) and not (size > MOST_DIRECT and one.algorithm in _TO_ALL):
            found += _placed(one, size, order, groups)
    return tuple(found)


def _placed(one: AlgorithmEntry, size: int, order, groups) -> Iterator[Candidate]:
    plain = Candidate(one.algorithm)
    if not one.grouped:
        yield plain
        if order is not None and one.algorithm in _ALONG_LINKS:
            yield replace(plain, order=order)
    elif groups is not None:
        yield replace(plain, groups=groups)
    elif isqrt(size) > 1:
        yield plain
