"""``flagcx bench``: its oracle agrees with the collectives' meaning, its table with nccl-tests' layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import flagcx as fc
from flagcx.cli import bench, bench_table
from flagcx.cli import bench_oracle as oracle
from flagcx.cli.bench_ranks import ArraySource, rows
from flagcx.cli.bench_subjects import check_compare
from flagcx.cli.bench_table import BenchRow, BenchTiming
from flagcx.cli.bench_task import BenchTask
from flagcx.dtypes import OPS, dtype_of, resolve_op
from flagcx.errors import ArgumentError
from flagcx.schedule.collectives import COLLECTIVES, bus_share

ROOT = Path(__file__).parents[2]
NAMES = [name for name in COLLECTIVES if name != "barrier"]


def message(collective, size=3, root=1, count=5, dtype=np.float32, op="sum"):
    kind = COLLECTIVES[collective]
    return oracle.BenchMessage(
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
    given = [None if buffers.sendbuf is None else buffers.sendbuf.copy() for buffers in ranks]
    return ranks, carried_out(collective, given)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("collective", NAMES)
def test_right_result_has_nothing_wrong(collective, in_place):
    ranks, results = three_ranks(collective, in_place)
    for buffers, result in zip(ranks, results, strict=True):
        assert (buffers.recvbuf is None) == (result is None)
        if result is not None:
            buffers.recvbuf[:] = result
            assert buffers.count_wrong() == 0


@pytest.mark.parametrize("collective", NAMES)
def test_wrong_results_are_counted(collective):
    ranks, results = three_ranks(collective, in_place=False)
    for buffers, result in zip(ranks, results, strict=True):
        if result is None:
            continue
        assert buffers.count_wrong() > 0  # nothing has been done yet
        for faulty in (np.roll(result, 5) if result.size > 5 else result[::-1], 2 * result):
            buffers.recvbuf[:] = faulty
            assert buffers.count_wrong() > result.size / 2
        buffers.recvbuf[:] = result
        buffers.recvbuf[-1] += 1
        assert buffers.count_wrong() == 1


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("collective", ["allgather", "gather", "reduce_scatter", "scatter"])
def test_in_place_the_own_block_is_shared(collective, in_place):
    sent = message(collective)
    storage = np.empty(oracle.storage_count(sent, 1), np.float32)
    buffers = oracle.Buffers(sent, 1, storage, in_place)
    assert np.shares_memory(buffers.sendbuf, buffers.recvbuf) == in_place
    larger, smaller = sorted((buffers.sendbuf, buffers.recvbuf), key=len, reverse=True)
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
    with pytest.raises(ArgumentError, match="sum of float8_e5m2 over 9 ranks can't be verified exactly"):
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
    assert bus_share(collective, size) == pytest.approx(share)


ROW = BenchRow(message("allreduce", 4, count=1 << 18), BenchTiming(100.0, 0), BenchTiming(200.0, 3))


def test_row_has_the_columns_of_nccl_tests():
    columns = bench_table.format_row(ROW).split()
    assert columns[:5] == ["1048576", "262144", "float32", "sum", "-1"]
    assert columns[5:9] == ["100.00", "10.49", "15.73", "0"]
    assert columns[9:] == ["200.00", "5.24", "7.86", "3"]
    names = bench_table.header().splitlines()[1].replace("#", "", 1).split()
    assert len(names) == len(columns)
    assert len(bench_table.header().splitlines()[1]) == len(bench_table.format_row(ROW))


def test_missing_form_shows_as_dashes():
    row = BenchRow(message("alltoall", 4, count=4), BenchTiming(1.0, 0), None)
    assert bench_table.format_row(row).split()[-4:] == ["-"] * 4
    assert "in_place_us" not in row.as_json()


def test_json_has_both_halves():
    row = ROW.as_json()
    assert (row["ranks"], row["out_of_place_us"], row["in_place_wrong"]) == (4, 100.0, 3)
    assert row["in_place_busbw_gb_per_s"] == pytest.approx(7.8643)


def test_footer_tells_wrong_elements_and_average():
    assert "3 FAILED" in bench_table.footer([ROW])
    assert "0 OK" in bench_table.footer([])
    assert "11.8" in bench_table.footer([ROW])


def test_sizes_from_begin_to_end():
    assert bench_table.sizes(8, 64 << 20, 4)[-1] == 8 * 4**11
    with pytest.raises(ArgumentError, match="don't end"):
        bench_table.sizes(0, 8, 4)
    with pytest.raises(ArgumentError, match="sizes from 4096 to 1024 bytes are none; begin at 1024 or less"):
        bench_table.sizes(4096, 1024, 4)


def flagcx_bench(*words, under=()):
    """Runs the command; returns its exit code and its output."""
    command = [sys.executable, "-m", "flagcx.cli", *under, "bench", "--rounds", 1, *words]
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout, done.stderr


def _every_collective():
    comm = fc.init()
    found = []
    for collective in NAMES:
        task = BenchTask(collective, 60, 7680, 64, root=comm.size - 1, rounds=1)
        found += [row.as_json() for row in rows(comm, task, ArraySource(comm, task))]
    return found


def test_every_collective_and_nothing_wrong():
    found = fc.launch(_every_collective, 3)[0]
    assert [row["collective"] for row in found] == [name for name in NAMES for _ in range(2)]
    for row in found:
        assert row["ranks"] == 3 and row["nbytes"] in (60, 3840)
        assert row.get("out_of_place_wrong", 0) == row.get("in_place_wrong", 0) == 0
        assert row.get("out_of_place_us", 1) > 0


def test_the_table_on_the_command_line():
    options = ("-n", 2, "-b", "1K", "-e", "4K", "-a", "ring", "-d", "int8", "-o", "max", "--symmetric")
    code, output, errors = flagcx_bench("allreduce", *options)
    assert code == 0, output + errors
    lines = output.splitlines()
    assert lines[0] == "# allreduce, 2 ranks, NumPy arrays of comm.empty, algorithm ring"
    assert [line.split()[:4] for line in lines[4:6]] == [
        ["1024", "1024", "int8", "max"],
        ["4096", "4096", "int8", "max"],
    ]
    assert lines[6] == "# Out of bounds values : 0 OK"


def test_json_from_the_ranks_of_a_job():
    script = "flagcx.cli"
    code, output, errors = flagcx_bench(
        "alltoall", "-b", "64", "-e", "64", "--json", under=("run", "-n", 2, "--no-prefix", "-m", script)
    )
    assert code == 0, output + errors
    (row,) = [json.loads(line) for line in output.splitlines()]
    assert (row["collective"], row["ranks"], row["count"], row["out_of_place_wrong"]) == ("alltoall", 2, 8, 0)
    assert row["versions"]["numpy"] == np.__version__ and "in_place_us" not in row


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("barrier",), "collective='barrier' is not known; expected one of allreduce"),
        (("allreduce", "-o", "mean"), "op='mean' is not known; expected one of sum"),
        (("allreduce", "-b", "0"), "sizes from 0 by a factor of 4 don't end"),
        (("allreduce", "-f", "1"), "sizes from 8 by a factor of 1 don't end"),
        (("allreduce", "--share-gpu"), "--share-gpu was given without --gpu"),
        (("allreduce", "-d", "float31"), "float31"),
    ],
)
def test_a_wrong_call_is_told_in_a_line(words, message, capsys):
    given = dict(zip(("collective", "flag", "value"), words, strict=False))
    options = {"-o": "op", "-b": "begin", "-f": "factor", "-d": "dtype", "--share-gpu": "share_gpu"}
    settings = {"op": "sum", "begin": "8", "factor": 4, "dtype": "float32", "share_gpu": False}
    if "flag" in given:
        name = options[given["flag"]]
        settings[name] = type(settings[name])(given.get("value", True))
    with pytest.raises(Exception) as ended:
        bench.bench(given["collective"], end="64M", **settings)
    assert ended.value.exit_code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-n", 2, "-a", "rong"), "algorithm='rong' does not serve allreduce; expected one of ring, "),
        (("-n", 2, "-a", "ring|rung"), "algorithm='rung' does not serve allreduce; expected one of ring, "),
        (("-n", 2, "-a", "native"), "it is the library's own"),
        (("broadcast", "-n", 2, "-r", 5), "root 5 is no rank; expected 0 to 1"),
        (("-b", "4K", "-e", "1K"), "sizes from 4096 to 1024 bytes are none"),
    ],
)
def test_what_the_ranks_could_not_do_is_told_before_they_start(words, message, monkeypatch):
    def launched(*_, **__):
        raise AssertionError("ranks were started")

    monkeypatch.setattr("flagcx._launch.notebook.launch", launched)
    result = call_bench(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("flagcx bench: ") and message in line


def call_bench(*words):
    made = typer.Typer()
    made.command()(bench.bench)
    return CliRunner().invoke(made, [str(word) for word in words])


@pytest.mark.exhaustive
def test_what_only_a_rank_finds_out_is_told_without_its_traceback():
    code, _, errors = flagcx_bench("-n", 9, "-d", "float8_e5m2", "-e", 8)
    assert code == 2
    assert errors == (
        "flagcx bench: sum of float8_e5m2 over 9 ranks can't be verified exactly; use fewer ranks or a wider "
        "dtype\n"
    )


def test_algorithms_that_bench_takes():
    for algorithm in ("ring", "ring|ring", "ring 3/4|two_shot"):
        BenchTask(algorithm=algorithm).check_ranks(4)
    BenchTask(algorithm="native", gpu=True).check_ranks(4)
    BenchTask("broadcast", root=3).check_ranks(4)


class Lossy:
    """A communicator that loses what the other rank contributes."""

    rank, size = 0, 2

    def allreduce(self, x, op="sum", **options):
        return x

    def barrier(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_wrong_elements_are_counted(monkeypatch):
    monkeypatch.setattr(fc, "init", Lossy)
    told = []
    wrong = bench.measure(BenchTask(begin=1024, end=1024, rounds=1), lambda *what: told.append(what))
    assert wrong >= 2 * 250, "out of place and in place"
    assert [what for what, _ in told] == ["head", "row", "end"]
    assert "FAILED" in bench_table.footer(told[2][1])


def test_arrays_on_a_gpu_are_filled_and_compared_as_bytes():
    """A module that takes bytes alone, as CuPy does for bfloat16."""

    class Bytes:
        @staticmethod
        def asarray(array):
            assert array.dtype == np.uint8
            return array.copy()

        @staticmethod
        def asnumpy(array):
            assert array.dtype == np.uint8
            return array.copy()

    sent = message("allreduce", dtype=ml_dtypes.bfloat16)
    buffers = [
        oracle.Buffers(sent, rank, np.zeros(10, ml_dtypes.bfloat16), False, Bytes) for rank in range(3)
    ]
    for each in buffers:
        each.fill()
        assert each.count_wrong() == 5
    buffers[0].recvbuf[:] = sum(each.sendbuf.astype(np.float32) for each in buffers)
    assert buffers[0].count_wrong() == 0


def test_a_batch_on_a_gpu_ends_when_its_work_is_done(monkeypatch):
    settled = []
    stream = SimpleNamespace(synchronize=lambda: settled.append(1))
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream), zeros=np.zeros)
    monkeypatch.setattr("flagcx.kernels.cuda.load_cupy", lambda: cupy)
    memory = ArraySource(Lossy(), BenchTask(gpu=True))
    assert memory.storage(3, np.dtype(np.float32)).shape == (3,)
    assert memory.describe() == "CuPy arrays"
    memory.settle()
    assert settled == [1]


def test_several_algorithms_take_turns_and_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    from flagcx.cli.bench_plot import draw_rows

    def measured():
        comm = fc.init()
        task = BenchTask(begin=64, end=256, algorithm="one_shot,ring", rounds=1)
        task.check()
        return list(rows(comm, task, ArraySource(comm, task)))

    found = fc.launch(measured, ranks=2, threads=True)[0]
    assert [(row.name, row.message.nbytes) for row in found] == [
        ("flagcx one_shot", 64), ("flagcx ring", 64), ("flagcx one_shot", 256), ("flagcx ring", 256)
    ]  # fmt: skip
    assert bench_table.format_row(found[1]).endswith("  flagcx ring")
    assert bench_table.footer(found).splitlines()[2].endswith("  flagcx ring")
    assert found[0].as_json()["measured"] == "flagcx one_shot"
    times, bandwidths = draw_rows("title", found, tmp_path / "b.png").axes
    assert [line.get_label() for line in times.lines] == ["flagcx one_shot", "flagcx ring"]
    assert list(times.lines[0].get_ydata()) == [found[0].in_place.time_us, found[2].in_place.time_us]
    assert "GB/s" in bandwidths.get_title("left") and (tmp_path / "b.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (BenchTask(compare=("ucc",)), r"--compare ucc is not known; expected some of mpi,gloo,nccl"),
        (BenchTask(compare=("nccl",)), r"--compare nccl is for CuPy arrays; add --gpu"),
        (BenchTask("gather", compare=("mpi",)), r"--compare mpi measures allreduce, broadcast, allgather of"),
        (BenchTask(dtype="bfloat16", compare=("gloo",)), r"got allreduce of bfloat16 by sum"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused(task, message):
    with pytest.raises(ArgumentError, match=message):
        check_compare(task)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_beside_gloo_and_mpi_in_one_run(tmp_path):
    for package in ("torch", "mpi4py", "matplotlib"):
        pytest.importorskip(package, reason=f"this comparison needs {package}")
    sizes = ["-b", "1K", "-e", "8K", "-f", "8", "--rounds", "1"]
    ran = subprocess.run(
        [sys.executable, "-m", "flagcx.cli", "bench", "-n", "2", *sizes]
        + ["--compare", "gloo,mpi", "--json", "--plot", "out.png"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [row["measured"].split()[0].strip(",") for row in found] == ["flagcx", "gloo", "Open"] * 2
    assert all(row["in_place_wrong"] == 0 for row in found) and (tmp_path / "out.png").exists()
