"""Pools: blocks, figures, and how far fragmentation can go."""

from __future__ import annotations

import gc
import itertools
import math
import random

import pytest

from flagcx.memory import ALIGNMENT, MemoryReport, Pool, PoolStats, memory_stats, track_memory

PAGE = ALIGNMENT


def pool_of(least_nbytes: int = 1 << 20, kind: str = "shared") -> tuple[Pool, list[int]]:
    """A pool over no memory at all, and the sizes that it asked the system for."""
    asked: list[int] = []

    def allocate(nbytes: int) -> tuple[str, int]:
        asked.append(nbytes)
        return f"piece {len(asked) - 1}", nbytes

    return Pool(kind, allocate, least_nbytes), asked


def test_blocks_of_one_piece_do_not_overlap_and_come_back():
    pool, asked = pool_of()
    blocks = [pool.take(n) for n in (1, PAGE, PAGE + 1, 100_000)]
    ends = sorted((b.offset, b.offset + b.nbytes) for b in blocks)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    assert all(b.offset % PAGE == 0 and b.memory == "piece 0" for b in blocks)
    pool.give(blocks[1])
    assert pool.take(PAGE).offset == blocks[1].offset
    assert asked == [1 << 20]


def test_pieces_double_and_a_large_block_gets_one_that_fits():
    pool, asked = pool_of(4 * PAGE)
    for _ in range(3):
        pool.take(4 * PAGE)
    pool.take(100 * PAGE + 1)
    assert asked == [4 * PAGE, 8 * PAGE, 101 * PAGE]  # the second piece has room for two


def test_figures():
    pool, _ = pool_of(10 * PAGE)
    a, b, c = (pool.take(2 * PAGE) for _ in range(3))
    pool.give(b)
    assert pool.stats() == PoolStats(10 * PAGE, 4 * PAGE, 6 * PAGE, 2, 3, 1, 4 * PAGE)
    assert pool.stats().fragmentation == pytest.approx(1 / 3)  # 2 of 6 free pages are not in the largest part
    pool.give(a)
    pool.give(c)
    assert pool.stats().fragmentation == 0 and pool.stats().used_nbytes == 0
    assert "0 of 40,960 bytes in use" in repr(pool)
    pool.close()
    assert pool.stats() == PoolStats(0, 0, 6 * PAGE, 0, 3, 1, 0)
    pool.close()


def test_a_block_given_back_after_close_is_ignored():
    pool, _ = pool_of()
    block = pool.take(1)
    pool.close()
    pool.give(block)
    assert pool.take(1).piece == 0


def test_giving_back_while_a_block_is_taken():
    """As the garbage collector may, at any point: what was given waits until the call is over."""
    held: list = []

    def allocate(nbytes: int) -> tuple[None, int]:
        while held:
            pool.give(held.pop())
        return None, nbytes

    pool = Pool("shared", allocate, 4 * PAGE)
    held += [pool.take(PAGE), pool.take(PAGE)]
    large = pool.take(8 * PAGE)
    assert large.piece == 1 and pool.stats().used_nbytes == 8 * PAGE


def test_a_loop_asks_the_system_for_nothing_after_its_first_round():
    pool, asked = pool_of(16 * PAGE)
    for _ in range(100):
        blocks = [pool.take(n * PAGE) for n in (3, 1, 7, 2)]
        for block in blocks:
            pool.give(block)
    assert len(asked) == 1 and pool.stats().peak_nbytes == 13 * PAGE


def reserved_pages(events, most_pages: int) -> int:
    """The least single piece of memory, in pages, in which first fit can serve a series of events."""
    pool, asked = pool_of(most_pages * PAGE)
    blocks: dict = {}
    top = 0
    for take, name, pages in events:
        if take:
            blocks[name] = pool.take(pages * PAGE)
            top = max(top, blocks[name].offset // PAGE + pages)
        else:
            pool.give(blocks.pop(name))
    assert len(asked) == 1
    return top


def bound_pages(most_used: int, largest: int) -> float:
    """Robson's bound: pages that first fit needs at most, with blocks of up to ``largest`` pages."""
    return most_used * (1 + math.log(largest)) / math.log(2)


def robson(live_pages: int, largest_pages: int):
    """Robson's series against first fit: blocks of 1, 2, 4, ... pages; of each size those stay that spoil
    the most places for the next."""
    names = itertools.count()
    at: dict[int, tuple[int, int]] = {}
    pool, _ = pool_of(1000 * live_pages * PAGE)
    blocks, events = {}, []

    def take(pages: int) -> None:
        name = next(names)
        blocks[name] = pool.take(pages * PAGE)
        at[name] = blocks[name].offset // PAGE, pages
        events.append((True, name, pages))

    def give(name: int) -> None:
        pool.give(blocks.pop(name))
        events.append((False, name, at.pop(name)[1]))

    size, residue = 1, 0
    for _ in range(live_pages):
        take(1)
    while size * 2 <= largest_pages:
        size *= 2
        residue = max((residue, residue + size // 2), key=lambda r: _kept(at, r, size))
        for name in [n for n, (start, pages) in at.items() if not _covers(start, pages, residue, size)]:
            give(name)
        while sum(pages for _, pages in at.values()) + size <= live_pages:
            take(size)
    return events


def _covers(start: int, pages: int, residue: int, size: int) -> bool:
    """Whether a block has a page whose number is ``residue`` modulo ``size``."""
    return (residue - start) % size < pages


def _kept(at: dict, residue: int, size: int) -> int:
    return sum(_covers(start, pages, residue, size) for start, pages in at.values())


@pytest.mark.parametrize("largest", [4, 16, 64, 256])
def test_robsons_series_needs_much_but_no_more_than_his_bound(largest):
    live = 2048
    events = robson(live, largest)
    needed = reserved_pages(events, 1000 * live)
    bound = bound_pages(live, largest)
    assert needed <= bound
    assert needed > (1 + 0.25 * largest.bit_length()) * live  # it is a series that hurts


@pytest.mark.parametrize("seed", range(5))
def test_random_sizes_stay_far_below_the_bound(seed):
    draw = random.Random(seed)
    live, used, largest, events = {}, 0, 1, []
    most = 0
    for name in range(4000):
        pages = int(2 ** draw.uniform(0, 8))
        while live and (used + pages > 4096 or draw.random() < 0.4):
            victim = draw.choice(list(live))
            used -= live[victim]
            events.append((False, victim, live.pop(victim)))
        live[name] = pages
        used, largest, most = used + pages, max(largest, pages), max(most, used + pages)
        events.append((True, name, pages))
    needed = reserved_pages(events, 100_000)
    assert needed <= 1.6 * most < bound_pages(most, largest)


def test_the_report_adds_up_pools_of_a_kind_and_forgets_those_that_are_gone():
    before = memory_stats()["pinned"].used_nbytes
    pools = [pool_of(kind="pinned")[0] for _ in range(2)]
    for pool in pools:
        pool.take(5 * PAGE)
    assert memory_stats()["pinned"].used_nbytes == before + 10 * PAGE
    del pools, pool
    gc.collect()
    assert memory_stats()["pinned"].used_nbytes == before


def test_the_report_prints_as_a_table():
    report = MemoryReport({"shared": PoolStats(10 * PAGE, 4 * PAGE, 6 * PAGE, 2, 3, 1, 4 * PAGE)})
    head, row = str(report).splitlines()
    assert head.split() == ["memory", "reserved", "used", "peak", "blocks", "allocations", "fragmentation"]
    assert row.split() == ["shared", "40,960", "16,384", "24,576", "2", "1", "33%"]
    assert list(memory_stats()) == ["shared", "device", "pinned"] and len(report) == 1
    assert '">shared</td><td>40,960</td>' in report._repr_html_()
    assert report.to_dict()["shared"]["fragmentation"] == pytest.approx(1 / 3)


def test_anything_with_figures_can_be_counted():
    class Holder:
        kind = "device"

        def stats(self) -> PoolStats:
            return PoolStats(reserved_nbytes=7)

    before = memory_stats()["device"].reserved_nbytes
    holder = Holder()
    track_memory(holder)
    assert memory_stats()["device"].reserved_nbytes == before + 7
