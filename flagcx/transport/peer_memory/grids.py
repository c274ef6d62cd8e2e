"""How many blocks of threads carry a call, and how much each takes at a time; the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from flagcx.kernels.peer import MOST_PACKETS, PACKET_THREADS, WARP, PeerLayout

_MOST_BLOCKS = 128
_PACK_NBYTES = 16
_MOST_SENT_TOGETHER = 3072
"""Packs that a block may send in a hop of two where ranks share a GPU, and few blocks; chunks are faster."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The shape of a launch.

    Attributes:
        blocks: Blocks of threads.
        threads: Threads of a block.
        chunk: Packs of 16 bytes that a block takes at a time; for packets, in all.
        part: Packs of what one rank deals with.
        steps: Chunks of each block.
    """

    blocks: int
    threads: int
    chunk: int
    part: int
    steps: int


NOTHING = Grid(0, 0, 0, 0, 0)
"""The launch of a call that has nothing to do."""


def most_blocks(processors: int, sharing: int, taken: int) -> int:
    """How many blocks of threads a communicator may launch, so that those of all ranks find room together.

    Threads that wait for a peer's must not keep these off the GPU, also where several communicators are at
    work at once. Two blocks fit on a multiprocessor; but processes that share a GPU never run on one at the
    same time, so there a block may cost a whole one. Each communicator gets three quarters of what is left.

    Args:
        processors: Multiprocessors of a GPU, the fewest of all ranks' GPUs.
        sharing: Ranks that use one GPU, the most on any.
        taken: Blocks that a rank's other communicators may launch, the most of any rank.

    Returns:
        The number, at most 128; 0 if nothing is left.

    Example:
        >>> most_blocks(132, 8, 0), most_blocks(132, 8, 12), most_blocks(132, 1, 0)
        (12, 3, 128)
    """
    room = 2 * processors if sharing == 1 else processors // sharing
    return min(max(-(-3 * (room - taken) // 4), 0), _MOST_BLOCKS)


def blocks_beside(layout: PeerLayout) -> int:
    """How many blocks a launch has that runs beside a computation; the same on every rank.

    Measured with two ranks on one and on two H200, as the time of a step that overlaps: more keep the
    computation off the GPU, and fewer are slow while it uses the memory. Sharing ranks take a quarter of the
    multiprocessors together.

    Example:
        >>> blocks_beside(PeerLayout(2, 128, one_gpu=False)), blocks_beside(PeerLayout(2, 49, one_gpu=True))
        (48, 16)
    """
    return max(layout.blocks // 3 if layout.one_gpu else layout.blocks * 3 // 8, 1)


def parts_of(form: str, count: int, itemsize: int, ranks: int) -> int:
    """Packs that one rank deals with: a part of the message, or the whole message or block."""
    packs = -(-count // (_PACK_NBYTES // itemsize))
    return -(-packs // ranks) if form in ("two_shot", "broadcast") else packs


def packet_grid(
    form: str, count: int, itemsize: int, layout: PeerLayout, bare: bool = False, blocks: int = 0
) -> Grid | None:
    """The launch of ``flagcx_packets``; None if the message is too large for packets.

    Args:
        form: What is done.
        count: Elements of the message or of a block.
        itemsize: Bytes of an element.
        layout: The memory.
        bare: Whether the packets are bare.
        blocks: The number of blocks to use, if another than the rule's.
    """
    part = parts_of(form, count, itemsize, layout.ranks)
    wanted = blocks or _packet_blocks(form, part)
    chunk = -(-part // max(1, min(wanted, layout.blocks)))
    if part == 0:
        return NOTHING
    if chunk > most_packets(form, layout, bare):
        return None
    threads = min(-(-chunk // WARP) * WARP, PACKET_THREADS)
    return Grid(-(-part // chunk), threads, chunk, part, 1)


def most_packets(form: str, layout: PeerLayout, bare: bool) -> int:
    """Packs that a block may send to each peer in a hop: as many as a slot holds, and as pay."""
    slot = layout.most_bare if bare else MOST_PACKETS
    if form != "two_shot":
        return slot
    half = slot // 2  # Each hop has a part of the slots of its own.
    return min(half, _MOST_SENT_TOGETHER // (layout.ranks - 1)) if layout.one_gpu else half


def _packet_blocks(form: str, part: int) -> int:
    """Blocks that were quickest on two and four H200; one that sends twice has more to do for each pack."""
    if form == "two_shot":
        return max(-(-part // 512), min(-(-part // 128), 32))
    return -(-part // 256)


def chunk_grid(
    form: str, count: int, itemsize: int, layout: PeerLayout, blocks: int = 0, chunk: int = 0
) -> Grid:
    """The launch of ``flagcx_exchange``.

    Args:
        form: What is done.
        count: Elements of the message or of a block.
        itemsize: Bytes of an element.
        layout: The memory.
        blocks: The number of blocks to use, if another than the rule's.
        chunk: The packs of a chunk, if others than the rule's.
    """
    part = parts_of(form, count, itemsize, layout.ranks)
    if part == 0:
        return NOTHING
    most = min(blocks or layout.blocks, layout.blocks)
    work = layout.shape.work
    chunk = min(layout.most_chunk, chunk or max(-(-part // (most * 4 * work)), 1) * work)
    used = min(most, -(-part // chunk))
    return Grid(used, work + WARP, chunk, part, -(-part // (used * chunk)))
