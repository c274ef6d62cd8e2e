"""The sweep: its oracle agrees with the collectives' meaning, and its table with nccl-tests' layout."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import nccl_table
import numpy as np
import oracle
import pytest
from nccl_table import Row, Timing

from flagcx.collectives import COLLECTIVES
from flagcx.dtypes import OPS, dtype_of, resolve_op

SWEEP = Path(__file__).parents[2] / "bench" / "sweep.py"
NAMES = [name for name in COLLECTIVES if name != "barrier"]


def message(collective, size=3, root=1, count=5, dtype=np.float32, op="sum"):
    kind = COLLECTIVES[collective]
    return oracle.Message(
        collective,
        size,
        root if kind.rooted else None,
        count,
        dtype_of(dtype),
        resolve_op(op, dtype_of(dtype)) if kind.reduces else None,
    )


def carried_out(collective, given):
    """What NumPy makes of the ranks' inputs, by a rule for each collective."""
    size, root = 3, 1
    if collective in ("allreduce", "reduce"):
        results = [np.sum(given, axis=0)] * size
    elif collective == "broadcast":
        results = [given[root]] * size
    elif collective in ("allgather", "gather"):
        results = [np.concatenate(given)] * size
    elif collective == "reduce_scatter":
        results = np.split(np.sum(given, axis=0), size)
    elif collective == "scatter":
        results = np.split(given[root], size)
    else:
        blocks = [np.split(array, size) for array in given]
        results = [np.concatenate([blocks[source][rank] for source in range(size)]) for rank in range(size)]
    only_root = collective in ("reduce", "gather")
    return [result if rank == root or not only_root else None for rank, result in enumerate(results)]


def three_ranks(collective, in_place):
    sent = message(collective)
    ranks = []
    for rank in range(3):
        storage = np.empty(oracle.storage_count(sent, rank), np.float32)
        ranks.append(oracle.Buffers(sent, rank, storage, in_place))
        ranks[-1].fill()
    given = [None if buffers.given is None else buffers.given.copy() for buffers in ranks]
    return ranks, carried_out(collective, given)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("collective", NAMES)
def test_right_result_has_nothing_wrong(collective, in_place):
    ranks, results = three_ranks(collective, in_place)
    for buffers, result in zip(ranks, results, strict=True):
        assert (buffers.got is None) == (result is None)
        if result is not None:
            buffers.got[:] = result
            assert buffers.count_wrong() == 0


@pytest.mark.parametrize("collective", NAMES)
def test_wrong_results_are_counted(collective):
    ranks, results = three_ranks(collective, in_place=False)
    for buffers, result in zip(ranks, results, strict=True):
        if result is None:
            continue
        assert buffers.count_wrong() > 0  # nothing has been done yet
        for faulty in (np.roll(result, 5) if result.size > 5 else result[::-1], 2 * result):
            buffers.got[:] = faulty
            assert buffers.count_wrong() > result.size / 2
        buffers.got[:] = result
        buffers.got[-1] += 1
        assert buffers.count_wrong() == 1


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("collective", ["allgather", "gather", "reduce_scatter", "scatter"])
def test_in_place_the_own_block_is_shared(collective, in_place):
    sent = message(collective)
    storage = np.empty(oracle.storage_count(sent, 1), np.float32)
    buffers = oracle.Buffers(sent, 1, storage, in_place)
    assert np.shares_memory(buffers.given, buffers.got) == in_place
    larger, smaller = sorted((buffers.given, buffers.got), key=len, reverse=True)
    assert (smaller.ctypes.data == larger[5:].ctypes.data) == in_place  # rank 1's block of 5


DTYPES = [np.bool_, np.int8, np.uint64, np.float16, np.complex64, ml_dtypes.bfloat16]


@pytest.mark.parametrize(
    ("dtype", "op"), [(dtype, op) for dtype in DTYPES for op in OPS if dtype_of(dtype).kind in OPS[op].kinds]
)
def test_expected_is_exact_in_any_order(dtype, op):
    sent = message("allreduce", dtype=dtype, op=op)
    parts = [oracle.data(sent, rank, 0) for rank in range(3)]
    for order in ((0, 1, 2), (2, 0, 1)):
        total = parts[order[0]]
        for rank in order[1:]:
            total = OPS[op].ufunc(total, parts[rank]).astype(dtype)
        total = (total / 3).astype(dtype) if OPS[op].average else total
        np.testing.assert_array_equal(total, oracle.expected(sent, 0, 0))


def test_no_exact_data_is_said():
    sent = message("allreduce", size=9, dtype=ml_dtypes.float8_e5m2)
    with pytest.raises(ValueError, match="sum of float8_e5m2 over 9 ranks can't be verified exactly"):
        oracle.data(sent, 0, 0)


def test_sizes_count_the_whole_message():
    assert message("allreduce").nbytes == 20
    assert message("allgather").nbytes == message("scatter").nbytes == 60


@pytest.mark.parametrize(
    ("collective", "size", "share"),
    [("allreduce", 2, 1), ("allreduce", 8, 1.75), ("allgather", 4, 0.75), ("alltoall", 4, 0.75)]
    + [("broadcast", 8, 1), ("reduce", 8, 1), ("reduce_scatter", 1, 0)],
)
def test_bus_share(collective, size, share):
    assert nccl_table.bus_share(collective, size) == pytest.approx(share)


ROW = Row("allreduce", 4, 1 << 20, 1 << 18, "float32", "sum", -1, Timing(100.0, 0), Timing(200.0, 3))


def test_row_has_the_columns_of_nccl_tests():
    columns = nccl_table.format_row(ROW).split()
    assert columns[:5] == ["1048576", "262144", "float32", "sum", "-1"]
    assert columns[5:9] == ["100.00", "10.49", "15.73", "0"]
    assert columns[9:] == ["200.00", "5.24", "7.86", "3"]
    names = nccl_table.header().splitlines()[1].replace("#", "", 1).split()
    assert len(names) == len(columns)
    assert len(nccl_table.header().splitlines()[1]) == len(nccl_table.format_row(ROW))


def test_missing_form_shows_as_dashes():
    row = Row("alltoall", 4, 64, 4, "float32", "none", -1, Timing(1.0, 0), None)
    assert nccl_table.format_row(row).split()[-4:] == ["-"] * 4
    assert "in_place_us" not in row.as_json()


def test_json_has_both_halves():
    row = ROW.as_json()
    assert (row["ranks"], row["out_of_place_us"], row["in_place_wrong"]) == (4, 100.0, 3)
    assert row["in_place_busbw_gb_per_s"] == pytest.approx(7.8643)


def test_footer_tells_wrong_elements_and_average():
    assert "3 FAILED" in nccl_table.footer([ROW])
    assert "0 OK" in nccl_table.footer([])
    assert "11.8" in nccl_table.footer([ROW])


def test_sizes_from_begin_to_end():
    assert nccl_table.sizes(8, 64 << 20, 4)[-1] == 8 * 4**11
    with pytest.raises(ValueError, match="don't end"):
        nccl_table.sizes(0, 8, 4)


def flagcx_run(ranks, *words):
    """Runs the sweep on some ranks; returns its exit code and its output."""
    command = [sys.executable, "-m", "flagcx.cli", "run", "-n", ranks, SWEEP, "--rounds", 1, *words]
    done = subprocess.run(
        [str(word) for word in command],
        cwd=SWEEP.parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("collective", NAMES)
def test_sweep_runs_every_collective_and_finds_nothing_wrong(collective, tmp_path):
    path = tmp_path / "sweep.jsonl"
    sizes = ["--begin", "64", "--end", "4K", "--factor", "64"]
    code, output = flagcx_run(3, "--collective", collective, *sizes, "--json", path)
    assert code == 0, output
    assert "# Out of bounds values : 0 OK" in output
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["collective"] for row in rows] == [collective] * 2
    assert all(row["ranks"] == 3 and row["versions"]["numpy"] == np.__version__ for row in rows)


@pytest.mark.slow
def test_sweep_takes_algorithm_dtype_op_and_shared_arrays():
    code, output = flagcx_run(
        2,
        "--begin",
        "1K",
        "--end",
        "1K",
        "--algorithm",
        "ring",
        "--dtype",
        "int8",
        "--op",
        "max",
        "--symmetric",
    )
    assert code == 0, output
    assert "arrays of comm.empty, algorithm ring" in output
    assert "int8     max" in output


def test_sweep_counts_wrong_elements(monkeypatch, capsys):
    """A collective that loses a contribution is found out, and the exit code says so."""
    import sweep

    class Lossy:
        rank, size = 0, 2

        def allreduce(self, x, op="sum", **options):
            return x  # what the other rank contributes is lost

        def barrier(self):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(sweep.fc, "init", Lossy)
    assert sweep.main(["--begin", "1K", "--end", "1K", "--rounds", "1"]) == 1
    assert "FAILED" in capsys.readouterr().out
