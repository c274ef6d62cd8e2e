"""The shape of a launch: how many blocks of threads, and how much each processes; the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from flagcx.kernels.peer import MOST_PACKETS, PACKET_THREADS, WARP, PeerLayout

_MOST_BLOCKS = 128
_PACK_NBYTES = 16
_MOST_SENT_TOGETHER = 3072
"""Most packs that a block sends in each hop of two where ranks share a GPU; beyond, chunks are faster."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The shape of a launch.

    Attributes:
        blocks: Blocks of threads.
        threads: Threads of a block.
        chunk: Packs of 16 bytes of a block's chunk; for packets, of the whole block.
        part: Packs that one rank processes.
        steps: Chunks of each block.
    """

    blocks: int
    threads: int
    chunk: int
    part: int
    steps: int


EMPTY = Grid(0, 0, 0, 0, 0)
"""The grid of a call with no elements, which launches nothing."""


def most_blocks(processors: int, sharing: int, taken: int) -> int:
    """How many blocks of threads a communicator may launch, so that those of all ranks are resident together.

    Blocks that wait for a peer must not keep the peer's blocks off the GPU, even if several communicators are
    active. Two blocks fit on a multiprocessor; but processes that share a GPU never use one multiprocessor at
    the same time, so a block may need a whole one there. Each communicator gets three quarters of the rest.

    Args:
        processors: Multiprocessors of a GPU, the fewest of all ranks' GPUs.
        sharing: Ranks that use one GPU, the most on any.
        taken: Blocks that a rank's other communicators may launch, the most of any rank.

    Returns:
        The number, at most 128; 0 if there is no room.

    Example:
        >>> most_blocks(132, 8, 0), most_blocks(132, 8, 12), most_blocks(132, 1, 0)
        (12, 3, 128)
    """
    room = 2 * processors if sharing == 1 else processors // sharing
    return min(max(-(-3 * (room - taken) // 4), 0), _MOST_BLOCKS)


def blocks_beside(layout: PeerLayout) -> int:
    """The blocks of a launch that runs while a computation does too; the same on every rank.

    Chosen by the time of a step with overlap, of two ranks on one and on two H200: more blocks slow the
    computation, and fewer are slow while it uses the memory. Ranks that share a GPU use a quarter of its
    multiprocessors together.

    Example:
        >>> blocks_beside(PeerLayout(2, 128, one_gpu=False)), blocks_beside(PeerLayout(2, 49, one_gpu=True))
        (48, 16)
    """
    return max(layout.blocks // 3 if layout.one_gpu else layout.blocks * 3 // 8, 1)


def started_grid(layout: PeerLayout, items: int) -> Grid:
    """The grid of a message that was started, which may wait on the GPU for as long as its peer likes.

    Those of all pairs of ranks find room beside a collective's blocks. Ranks that share a GPU have small
    blocks for that, of which one fits on a multiprocessor beside a collective's.

    Args:
        layout: The memory.
        items: Channels that the message has.

    Example:
        >>> started_grid(PeerLayout(2, 128, one_gpu=False), 64).blocks
        21
    """
    room = layout.blocks if layout.one_gpu else layout.blocks // 3
    most = max(room // (2 * (layout.ranks - 1)), 1)
    return Grid(min(most, items), started_work(layout) + WARP, 0, 0, 1)


def started_work(layout: PeerLayout) -> int:
    """Threads of a block that move the data of a message that was started."""
    return 2 * WARP if layout.one_gpu else layout.shape.work


def parts_of(form: str, count: int, itemsize: int, layout: PeerLayout, packets: bool) -> int:
    """Packs that one rank processes: a part of the message, or the whole message or block."""
    packs = 1 if form == "barrier" else -(-count // (_PACK_NBYTES // itemsize))
    if form == "two_shot":
        return -(-packs // layout.ranks)
    if packets or form not in ("broadcast", "reduce"):
        return packs
    root_apart = layout.ranks > 2 and not layout.one_gpu  # the root has no part
    return -(-packs // (layout.ranks - root_apart))


def packet_grid(
    form: str, count: int, itemsize: int, layout: PeerLayout, bare: bool = False, blocks: int = 0
) -> Grid | None:
    """The grid of ``flagcx_packets``; None if the message is too large.

    ``count`` is in elements of the message, or of a block; ``blocks`` overrides the rule if not 0.
    """
    part = parts_of(form, count, itemsize, layout, packets=True)
    wanted = blocks or _packet_blocks(form, part)
    chunk = -(-part // max(1, min(wanted, layout.blocks)))
    if part == 0:
        return EMPTY
    if chunk > most_packets(form, layout, bare):
        return None
    threads = min(-(-chunk // WARP) * WARP, PACKET_THREADS)
    return Grid(-(-part // chunk), threads, chunk, part, 1)


def most_packets(form: str, layout: PeerLayout, bare: bool) -> int:
    """Most packs that a block sends to each peer in a hop: limited by the slots, and by speed."""
    slot = layout.most_bare if bare else MOST_PACKETS
    if form != "two_shot":
        return slot
    half = slot // 2  # Each hop has its own half of a slot.
    return min(half, _MOST_SENT_TOGETHER // (layout.ranks - 1)) if layout.one_gpu else half


def _packet_blocks(form: str, part: int) -> int:
    """The fastest number of blocks on two and four H200; two-shot has more work for each pack."""
    if form == "two_shot":
        return max(-(-part // 512), min(-(-part // 128), 32))
    return -(-part // 256)


def chunk_grid(
    form: str, count: int, itemsize: int, layout: PeerLayout, blocks: int = 0, chunk: int = 0
) -> Grid:
    """The grid of ``flagcx_exchange``; ``blocks`` and ``chunk`` override the rule if not 0."""
    part = parts_of(form, count, itemsize, layout, packets=False)
    if part == 0:
        return EMPTY
    most = min(blocks or layout.blocks, layout.blocks)
    work = layout.shape.work
    chunk = min(layout.most_chunk, chunk or max(-(-part // (most * 4 * work)), 1) * work)
    used = min(most, -(-part // chunk))
    return Grid(used, work + WARP, chunk, part, -(-part // (used * chunk)))
