"""Each collective as the data that every rank holds before and after, and the size of its buffers.

A contribution is named ``(rank, chunk)``: chunk ``chunk`` of the INPUT of ``rank``. ``Collective.expected``
says of which contributions each chunk of each rank's OUTPUT is made, each exactly once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from flagcx.errors import ArgumentError
from flagcx.schedule.model import Buffer, Span

Contribution = tuple[int, int]
Counts = int | tuple
"""Elements of a message: one number where all blocks are alike; else one number a rank; for alltoall
a pair: the elements that this rank sends to each, and those that it receives from each."""


def cut(count: int, pieces: int) -> tuple[int, ...]:
    """Cuts ``count`` elements into ``pieces`` parts that differ by at most one element.

    The only function that decides how many elements a chunk has.

    Returns:
        The ``pieces + 1`` boundaries, from 0 to ``count``.

    Example:
        >>> cut(10, 4)
        (0, 3, 6, 8, 10)
    """
    small, larger = divmod(count, pieces)
    return tuple(i * small + min(i, larger) for i in range(pieces + 1))


@dataclass(frozen=True, slots=True)
class Collective:
    """The meaning of a collective.

    Attributes:
        name: As MPI and NCCL call it.
        before: Where the message is before the call: the whole message on "all" ranks or on the "root"; or a
            block of it on "each" rank, its own.
        after: Where the result is after the call, in the same terms.
        reduces: Whether contributions are combined by an operation.
        repeats: Whether a contribution may count more than once (a barrier carries no data).
    """

    name: str
    before: str
    after: str
    reduces: bool = False
    repeats: bool = False

    @property
    def rooted(self) -> bool:
        """Whether one rank, the root, is set apart."""
        return "root" in (self.before, self.after)

    @property
    def blocks(self) -> bool:
        """Whether the message has one block a rank."""
        return "each" in (self.before, self.after) or self.name == "alltoall"

    def has_input(self, rank: int, root: int | None) -> bool:
        """Whether ``rank`` contributes."""
        return self.before != "root" or rank == root

    def has_output(self, rank: int, root: int | None) -> bool:
        """Whether ``rank`` gets a result."""
        return self.after != "root" or rank == root

    def input_blocks(self, size: int) -> int:
        """Blocks in an INPUT; 1 where the message is not made of blocks."""
        return size if self.blocks and self.before != "each" else 1

    def output_blocks(self, size: int) -> int:
        """Blocks in an OUTPUT; 1 where the message is not made of blocks."""
        return size if self.blocks and self.after != "each" else 1

    def per_block(self, size: int, chunks: int) -> int:
        """Chunks in one block, of a schedule with ``chunks`` chunks."""
        return chunks // size if self.blocks else chunks

    def buffer_chunks(self, buffer: Buffer, rank: int, size: int, chunks: int, root: int | None) -> int:
        """How many chunks the INPUT or OUTPUT of ``rank`` has."""
        per_block = self.per_block(size, chunks)
        if buffer is Buffer.INPUT:
            return self.input_blocks(size) * per_block if self.has_input(rank, root) else 0
        return self.output_blocks(size) * per_block if self.has_output(rank, root) else 0

    def expected(
        self, rank: int, chunk: int, size: int, per_block: int, root: int | None
    ) -> tuple[Contribution, ...]:
        """The contributions that OUTPUT chunk ``chunk`` of ``rank`` must end with, each exactly once."""
        block, place = divmod(chunk, per_block)
        if self.name == "alltoall":
            return ((block, rank * per_block + place),)
        in_message = rank * per_block + chunk if self.after == "each" else chunk
        if self.reduces:
            return tuple((source, in_message) for source in range(size))
        return ((block, place),) if self.before == "each" else ((root or 0, in_message),)

    def in_place_shift(self, rank: int, size: int, chunks: int, root: int | None) -> tuple[int, int] | None:
        """How INPUT and OUTPUT of ``rank`` lie over each other in a call in place.

        Returns:
            ``(i, o)``: INPUT chunk ``i`` is OUTPUT chunk ``o``, and so on up by ones to the end of the
            smaller buffer. None where the rank has only one of the two, or the collective has no form
            in place (alltoall).
        """
        if not (self.has_input(rank, root) and self.has_output(rank, root)) or self.name == "alltoall":
            return None
        own = rank * self.per_block(size, chunks)
        if self.input_blocks(size) < self.output_blocks(size):
            return 0, own
        if self.input_blocks(size) > self.output_blocks(size):
            return own, 0
        return 0, 0


COLLECTIVES: dict[str, Collective] = {
    c.name: c
    for c in (
        Collective("allreduce", "all", "all", reduces=True),
        Collective("reduce", "all", "root", reduces=True),
        Collective("broadcast", "root", "all"),
        Collective("allgather", "each", "all"),
        Collective("reduce_scatter", "all", "each", reduces=True),
        Collective("gather", "each", "root"),
        Collective("scatter", "root", "each"),
        Collective("alltoall", "all", "all"),
        Collective("barrier", "all", "all", reduces=True, repeats=True),
    )
}


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Where each chunk of one rank's buffers lies, in elements.

    Attributes:
        bounds: For each buffer, by its number, the boundaries of its chunks.
    """

    bounds: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

    def slice(self, span: Span) -> tuple[int, int]:
        """The elements ``(start, stop)`` of the buffer that the span covers."""
        bounds = self.bounds[span.buffer]
        return bounds[span.start], bounds[span.stop]

    def count(self, buffer: Buffer) -> int:
        """Elements in the buffer."""
        return self.bounds[buffer][-1]


def check_collective(name: Any) -> str:
    """Checks the name of a collective.

    Raises:
        ArgumentError: There is none of that name.
    """
    if not isinstance(name, str) or name not in COLLECTIVES:
        raise ArgumentError(f"collective={name!r} is not known; expected one of {', '.join(COLLECTIVES)}")
    return name


def chunk_layout(
    collective: str,
    rank: int,
    size: int,
    chunks: int,
    root: int | None,
    counts: Counts,
    scratch: Collection[int],
) -> ChunkLayout:
    """The layout of ``rank``'s buffers: how many elements each chunk has.

    Args:
        collective: Name of the collective.
        rank: The rank whose buffers are laid out.
        size: Number of ranks.
        chunks: The schedule's chunks.
        root: Root, or None.
        counts: See ``Counts``. A single number is the message's elements, or those of one block where
            the collective has blocks.
        scratch: The chunks of SCRATCH that the rank's program uses; the others get no memory.
    """
    kind = COLLECTIVES[collective]
    blocks: Any = counts if isinstance(counts, tuple) else (int(counts),) * (size if kind.blocks else 1)
    paired = len(blocks) == 2 and isinstance(blocks[0], tuple)
    sent, received = blocks if paired else (blocks, blocks)
    per_block = kind.per_block(size, chunks)
    message = _bounds(received, per_block)
    own = _bounds((sent[rank],), per_block) if kind.blocks else message
    source = own if kind.before == "each" else _bounds(sent, per_block)
    result = own if kind.after == "each" else message
    sizes = [message[i + 1] - message[i] for i in range(chunks)]
    needed = (sizes[i % chunks] if i in scratch else 0 for i in range(max(scratch, default=-1) + 1))
    return ChunkLayout(
        (
            source if kind.has_input(rank, root) else (0,),
            result if kind.has_output(rank, root) else (0,),
            tuple(accumulate(needed, initial=0)),
        )
    )


def largest_block(counts: Counts) -> int:
    """Elements of a message, or of its largest block.

    0 where each rank knows its own blocks alone: all must choose alike.
    """
    if isinstance(counts, int):
        return counts
    return 0 if counts and isinstance(counts[0], tuple) else max(counts, default=0)


def _bounds(counts: Sequence[int], per_block: int) -> tuple[int, ...]:
    """The boundaries of the chunks of blocks that follow each other."""
    bounds = [0]
    for count in counts:
        start = bounds[-1]
        bounds.extend(start + b for b in cut(count, per_block)[1:])
    return tuple(bounds)


def bus_share(collective: str, size: int) -> float:
    """Bus bandwidth as a multiple of algorithm bandwidth, for ``size`` ranks, as nccl-tests has them.

    Example:
        >>> bus_share("allreduce", 4)
        1.5
    """
    if collective == "allreduce":
        return 2 * (size - 1) / size
    return (size - 1) / size if COLLECTIVES[collective].blocks else 1.0
