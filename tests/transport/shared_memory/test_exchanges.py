"""Exchanges through slots: the bits of rows, broadcasts that run ahead, and calls that differ."""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np
import pytest

import flagcx as fc
from flagcx.dtypes import OPS, dtype_of
from flagcx.errors import MismatchError, ResourceError
from flagcx.transport.shared_memory.areas import EXCHANGE_NBYTES, ONE_SHOT_NBYTES, Areas
from flagcx.transport.shared_memory.call_log import CallLog
from flagcx.transport.shared_memory.reduction import accumulator_dtype, combiner, row_combiner
from flagcx.transport.shared_memory.segment import Rows, Segment
from flagcx.transport.shared_memory.words import EXCHANGE, SIGNATURE_SHIFT, words_nbytes
from tests.ranks import run_ranks

DTYPES = [
    np.dtype(one)
    for one in (
        *(np.bool_, np.int8, np.uint16, np.int64, np.float16, np.float32, np.complex64),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn),
    )
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_combined_with_the_bits_of_one_after_the_other(dtype):
    known, random = dtype_of(dtype), np.random.default_rng(3)
    for size in (4, 5, 8, 17):
        for count in (2, 3, 7, 64, 1000):
            rows = (random.standard_normal((size, count + 5)) * 3).astype(dtype)[:, 2 : count + 2]
            if known.kind == "float":
                rows[:, 0] = -0.0
            for op in OPS.values():
                if known.kind not in op.kinds or (op.average and dtype == np.bool_):
                    continue
                combine = row_combiner(op, known, size, count)
                if combine is None:
                    continue
                wide = accumulator_dtype(op, known, size)
                found, expected = np.empty(count, dtype), np.empty(count, dtype)
                with np.errstate(all="ignore"):
                    combine(rows, found, np.empty(count, wide))
                    combiner(op, known, size)(list(rows), expected, np.empty(count, wide))
                assert found.tobytes() == expected.tobytes(), (op.name, size, count)


def test_rows_serve_what_they_are_faster_for():
    f32 = dtype_of(np.dtype(np.float32))
    assert row_combiner(OPS["sum"], f32, 4, 1024) and row_combiner(OPS["avg"], f32, 8, 1024)
    assert not row_combiner(OPS["sum"], f32, 3, 1024), "few rows"
    assert not row_combiner(OPS["sum"], f32, 4, 1), "NumPy adds up a single column in pairs"
    assert not row_combiner(OPS["sum"], f32, 4, 1 << 20), "long rows"


def test_successive_exchanges_never_share_memory():
    areas = Areas.of(4, 1 << 20)
    lengths = [1, 1000, 32 << 10, ONE_SHOT_NBYTES, 100_000, 1 << 19, EXCHANGE_NBYTES]
    places = [(areas.exchanges(nbytes), nbytes) for nbytes in lengths]
    for turn in range(64):
        for here, nbytes in places:
            start = here[turn & (len(here) - 1)]
            assert areas.one_shot <= start and start + nbytes <= areas.broadcasts
            for there, other in places:
                after = there[(turn + 1) & (len(there) - 1)]
                assert start + nbytes <= after or after + other <= start


def test_segments_side_by_side():
    segments = [Segment.create(3 * 4096) for _ in range(3)]
    rows = Rows(3, 2 * 4096)
    for q, segment in enumerate(segments):
        rows.map(q, segment.handle, 4096)
        segment.memory[4096 + q] = 7 + q
    assert [rows.array[q, q] for q in range(3)] == [7, 8, 9]
    with pytest.raises(ValueError, match="read-only"):
        rows.array[0, 0] = 1
    view = rows.array[:, :3]
    rows.close()
    for segment in segments:
        segment.close()
    assert view.sum() == 24, "the mapping goes with its last view"
    with pytest.raises(ResourceError, match="cannot be opened"):
        Rows(1, 4096).map(0, segments[0].handle, 4096)


def mixed(calls: int) -> int:
    """Random calls of random lengths, one after the other, with the results of NumPy."""
    comm, wrong = fc.init(), 0
    for number in range(calls):
        random = np.random.default_rng(number)
        kind, root = random.integers(7), int(random.integers(comm.size))
        count = int(random.choice([1, 2, 17, 1000, 5000, 16384]))
        blocks = comm.size if kind in (2, 3) else 1
        all_x = random.integers(0, 4, (comm.size, count * blocks)).astype(random.choice(["f4", "i8", "f2"]))
        x, total = all_x[comm.rank].copy(), all_x.sum(0).astype(all_x.dtype)
        mine = slice(comm.rank * count, (comm.rank + 1) * count)
        if kind < 2:
            found, expected = comm.allreduce(x, algorithm=("one_shot", "two_shot")[kind]), total
        elif kind == 2:
            found, expected = comm.reduce_scatter(x), total[mine]
        elif kind == 3:
            found, expected = comm.alltoall(x, out=x), all_x[:, mine]
        elif kind == 4:
            found, expected = comm.allgather(x), all_x
        else:
            found, expected = comm.broadcast(x, root), all_x[root]
        wrong += not np.array_equal(found.reshape(-1), expected.reshape(-1))
    return wrong


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_exchanges_of_all_lengths_follow_each_other(ranks):
    assert run_ranks(mixed, ranks, 120) == [0] * ranks


def ahead(calls: int) -> bool:
    """The root goes on while its peer has yet to see that all have come to the call before."""
    comm = fc.init(timeout_s=20)
    x, good = np.zeros(100, np.float32), True
    for round_ in range(4):
        comm.allgather(x)
        if comm.rank == 1:
            time.sleep(0.05)
        for number in range(calls):
            x[...] = number + round_ if comm.rank == 0 else -1
            comm.broadcast(x, 0)
            good &= bool((x == number + round_).all())
        comm.barrier()
    return good


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_root_runs_ahead_of_its_readers(ranks):
    assert run_ranks(ahead, ranks, 40) == [True] * ranks


def differ(kind: str) -> str:
    comm = fc.init(timeout_s=30)
    comm.barrier()
    x = np.zeros(10, np.float32)
    try:
        if kind == "root":
            comm.broadcast(x, comm.rank % 2)
        elif kind == "count":
            comm.broadcast(x[: 10 - comm.rank], 0)
        elif comm.rank == 0:
            comm.broadcast(x, 0)
        elif kind == "allreduce":
            comm.allreduce(x)
        else:
            comm.reduce_scatter(np.zeros(10 * comm.size, np.float32))
        comm.allreduce(x)
    except MismatchError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["root", "count", "allreduce", "reduce_scatter"])
def test_broadcasts_that_differ_are_told(kind):
    for told in run_ranks(differ, 3, kind):
        assert "ranks disagree on call 1" in told and "broadcast" in told


def test_a_call_that_differed_longer_ago_than_the_log_goes_is_told():
    memory = [memoryview(bytearray(words_nbytes(2))) for _ in range(2)]
    words = [one.cast("Q") for one in memory]
    log = CallLog(0, words, memory)
    call = log.signature("allreduce of 4 float32") | 40 << 1
    for rank, before in enumerate((5 << SIGNATURE_SHIFT, 6 << SIGNATURE_SHIFT)):
        words[rank][40 % 16] = call
        words[rank][EXCHANGE] = call ^ before
    with pytest.raises(MismatchError, match="ranks 0 and 1 came to call 40 by different calls, longer ago"):
        log.compare(41)
    words[1][EXCHANGE] = words[0][EXCHANGE]
    log.compare(41)


def reached_by_some() -> bool:
    """All-reduces of arrays of ``comm.empty`` on some ranks and private ones on others."""
    comm, good = fc.init(timeout_s=20), True
    random = np.random.default_rng(5)
    for number in range(60):
        count = int(random.choice([1, 13, 8192, 30_000, 65536, 262144]))
        reached = random.integers(2, size=comm.size)
        x = comm.empty(count, np.float32) if reached[comm.rank] else np.empty(count, np.float32)
        x[...] = comm.rank + number
        comm.allreduce(x)
        good &= bool((x == comm.size * number + comm.size * (comm.size - 1) // 2).all())
    return good


@pytest.mark.parametrize("ranks", [2, 3])
def test_arrays_of_both_kinds_in_one_call(ranks):
    assert run_ranks(reached_by_some, ranks) == [True] * ranks
