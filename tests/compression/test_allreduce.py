"""``compression=`` on real ranks: every codec and size, every way of calling, and what bad calls get."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flagcx as fc
from flagcx.compression import two_step
from flagcx.compression.peers import Peers
from flagcx.dtypes import dtype_of
from flagcx.errors import ArrayError
from tests.communicator.jobs import job, outcome_of
from tests.ranks import run_ranks

NAMES = ("fp16", "bf16", "fp8", "fp8_e5m2", "int8", "int4", "topk", "randomk", "powersgd", "sparse", "auto")
BOUNDS = {"fp16": 2e-3, "bf16": 1e-2, "fp8": 0.08, "fp8_e5m2": 0.15, "int8": 0.03, "int4": 0.4}


def data(rank: int, count: int, dtype="float32") -> np.ndarray:
    return np.random.default_rng([rank, count]).standard_normal(count).astype(dtype)


def faults_of(results: list[list[str]]) -> list[str]:
    """What went wrong on any rank."""
    return [fault for faults in results for fault in faults]


def every_codec(counts: list[int], ops: tuple = ("sum", "avg", "scaled"), names: tuple = NAMES) -> list[str]:
    """What is wrong: ranks that differ, results that are far off, INPUT that was written."""
    comm, faults = fc.init(), []
    for count in counts:
        exact = np.sum([data(q, count) for q in range(comm.size)], axis=0, dtype=np.float64)
        factors = {"sum": 1.0, "avg": 1 / comm.size, "scaled": 0.5}
        for name in names:
            for word in ops:
                op, factor = fc.scaled_sum(0.5) if word == "scaled" else word, factors[word]
                x, out = data(comm.rank, count), np.full(count, np.nan, np.float32)
                comm.allreduce(x, op, out=out, compression=name)
                y = comm.allreduce(x.copy(), op, compression=name)
                where = f"{name} of {count} by {op} on {comm.size} ranks"
                if len(set(comm.allgather_object(out.tobytes()))) > 1:
                    faults.append(f"{where}: ranks differ")
                if not np.array_equal(x, data(comm.rank, count)):
                    faults.append(f"{where}: INPUT was written")
                if name != "randomk" and not np.array_equal(out, y):
                    faults.append(f"{where}: not the same in place")
                error = np.linalg.norm(out - factor * exact) / np.linalg.norm(factor * exact)
                if error > BOUNDS.get(name, 1e-6 if name in ("sparse", "auto") else 1.5):
                    faults.append(f"{where}: off by {error:.2g}")
    return faults


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_codec(size):
    assert not faults_of(run_ranks(every_codec, size, [1, size + 1, 5000]))


@pytest.mark.slow
def test_long_messages_go_in_pieces():
    names = ("int8", "int4", "topk", "powersgd")
    assert not faults_of(run_ranks(every_codec, 2, [2_200_001], ("sum",), names))


def other_dtypes() -> list[str]:
    comm, faults = fc.init(), []
    for dtype in ("float64", "float16"):
        for name in ("int8", "topk", "sparse"):
            feedback = fc.compression.Feedback(name)
            x = data(comm.rank, 3000, dtype)
            got = comm.allreduce(x, compression=feedback)
            exact = np.sum([data(q, 3000, dtype).astype(np.float64) for q in range(comm.size)], axis=0)
            if got is not x or got.dtype != dtype:
                faults.append(f"{name} of {dtype}: not in place")
            bound = 0.03 if name == "int8" else 1.5 if name == "topk" else 1e-3
            if np.linalg.norm(got - exact) > bound * np.linalg.norm(exact):
                faults.append(f"{name} of {dtype}: far off")
    return faults


def test_other_dtypes_are_converted():
    assert not faults_of(run_ranks(other_dtypes, 3))


def other_dtypes_in_pieces(piece_nbytes: int) -> list[str]:
    """Pieces are decoded, and sums made, while others of the converted array wait."""
    comm, faults, before = fc.init(), [], two_step.PIECE_NBYTES
    two_step.PIECE_NBYTES = piece_nbytes
    count = piece_nbytes  # four pieces of float32
    for dtype in ("float64", "float16", "bfloat16"):
        given = [data(q, count, "float32").astype(dtype_of(dtype).numpy) for q in range(comm.size)]
        exact = np.sum([x.astype(np.float64) for x in given], axis=0)
        for name in ("fp16", "fp8", "int8", "int4"):
            got = comm.allreduce(given[comm.rank].copy(), compression=name).astype(np.float64)
            error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
            if not error < BOUNDS[name]:
                faults.append(f"{name} of {dtype}: off by {error:.2g} on rank {comm.rank}")
    two_step.PIECE_NBYTES = before
    return faults


def test_other_dtypes_in_pieces():
    assert not faults_of(run_ranks(other_dtypes_in_pieces, 3, 48 << 10))


def test_no_two_modules_share_the_name_of_an_intermediate_array():
    """What plans keep in an array would be overwritten by what a codec puts there."""
    users: dict[str, set[str]] = {}
    for path in Path(two_step.__file__).parent.glob("*.py"):
        for name in re.findall(r"(?:scratch\.get|_rows|_buffer)\(\s*f?\"(\w+)", path.read_text()):
            users.setdefault(name, set()).add(path.name)
    assert {"wide", "unpacked", "total", "coded"} <= users.keys()
    assert not {name: found for name, found in users.items() if len(found) > 1}


def ways_of_calling() -> list[str]:
    """async, in a group, of a view, overlapping, and with a slot; beside plain calls."""
    comm, faults, count = fc.init(), [], 4000
    want = comm.allreduce(data(comm.rank, count), compression="int8")
    work = comm.allreduce(data(comm.rank, count), compression="int8", async_op=True)
    if not np.array_equal(work.wait(), want):
        faults.append("async_op")
    x, plain = data(comm.rank, count), np.ones(3, np.float32)
    with comm.group():
        comm.allreduce(x, compression="int8")
        comm.allreduce(plain)
    if not np.array_equal(x, want) or plain[0] != comm.size:
        faults.append("group")
    matrix = np.zeros((3, count), np.float32)
    matrix[1] = data(comm.rank, count)
    comm.allreduce(matrix[1].reshape(40, 100), compression=fc.compression.Quantized("int8"))
    if not np.array_equal(matrix[1], want) or matrix[0].any() or matrix[2].any():
        faults.append("view")
    memory = np.zeros(count + 5, np.float32)
    memory[:count] = data(comm.rank, count)
    comm.allreduce(memory[:count], out=memory[5:], compression="int8")
    if not np.array_equal(memory[5:], want):
        faults.append("overlap")
    shared = comm.empty(count)
    shared[...] = data(comm.rank, count)
    comm.allreduce(shared, compression="int8")
    if not np.array_equal(shared, want):
        faults.append("shared array")
    half = comm.split(comm.rank % 2)
    lone = half.allreduce(data(comm.rank, count), compression="int8")
    if half.size == 1 and np.linalg.norm(lone - data(comm.rank, count)) > 0.02 * np.linalg.norm(lone):
        faults.append("split")
    return faults


def test_ways_of_calling():
    assert not faults_of(run_ranks(ways_of_calling, 3))


def without_leftovers(steps: int) -> tuple[list[str], list[str], int]:
    """Threads of the library after some steps and after the end, and kinds of records."""

    earlier = set(threading.enumerate())  # a rank of other tests may serve a store still

    def threads() -> list[str]:
        new = set(threading.enumerate()) - earlier
        return [thread.name for thread in new if thread.name.startswith("flagcx")]

    comm = fc.init()
    feedback = fc.compression.Feedback("int8")
    x = data(comm.rank, 3_000_000)
    for _ in range(steps):
        comm.allreduce(x, "avg", compression=feedback["x"])
    names = {r.operation.algorithm for r in comm.profiler.records() if r.operation.protocol == "int8"}
    before = threads()
    comm.close()
    return before, threads(), len(names)


def test_the_thread_ends_with_the_communicator_and_calls_are_recorded():
    for before, after, kinds in run_ranks(without_leftovers, 2, 3):
        assert "flagcx-compressed_0" in before and not after and kinds == 1


def bad_calls() -> list[tuple[str, str]]:
    comm, said = fc.init(), []
    x, feedback = np.ones(8, np.float32), fc.compression.Feedback("int8")
    comm.allreduce(x, compression=feedback)
    calls = [
        lambda: comm.allreduce(x, compression="int7"),
        lambda: comm.allreduce(x, compression=8),
        lambda: comm.allreduce(x, "max", compression="int8"),
        lambda: comm.allreduce(np.ones(8, int), compression="int8"),
        lambda: comm.allreduce(x, compression="int8", algorithm="ring"),
        lambda: comm.allreduce(np.ones(9, np.float32), compression=feedback),
        lambda: comm.allreduce([x, x], compression="int8"),
    ]
    for call in calls:
        try:
            call()
            said.append(("nothing", ""))
        except fc.ArgumentError as error:
            said.append((type(error).__name__, str(error)))
    comm.allreduce(x, compression="int8")  # the communicator goes on
    return said


def test_bad_calls_say_what_is_wrong():
    expected = [
        ("ArgumentError", "compression='int7' is not known; expected one of fp16, bf16"),
        ("ArgumentError", "compression=8 is not known; expected one of"),
        ("OperationError", "compression needs op='sum', op='avg' or fc.scaled_sum(factor), got op='max'"),
        ("ArrayError", "floating-point numbers, and x has dtype int64; leave it out"),
        ("ArgumentError", "algorithm='ring' and compression='int8' exclude each other"),
        ("ArgumentError", "remembers an array of 8 elements, and got one of 9; use a slot for each"),
        ("ArgumentError", "a list of arrays cannot be compressed in one call"),
    ]
    for said in run_ranks(bad_calls, 2):
        for (kind, text), (want, part) in zip(said, expected, strict=True):
            assert kind == want and part in text, (kind, text)


def disagree(*codecs: Any) -> str:
    comm = fc.init()
    try:
        comm.allreduce(np.ones(1000, np.float32), compression=codecs[comm.rank])
    except fc.CommunicationError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    "codecs",
    [
        ("int8", "int4"),
        [fc.compression.Feedback("int8", momentum=momentum) for momentum in (0.0, 0.9)],
        [fc.compression.Feedback("topk", clip=clip) for clip in (1.0, 2.0)],
        ("int8", fc.compression.Feedback("int8")),
    ],
)
def test_ranks_with_different_codecs_hear_of_it(codecs):
    said = run_ranks(disagree, 2, *codecs)
    assert any(s.startswith("MismatchError") for s in said), said
    assert all(s.startswith(("MismatchError", "AbortedError")) for s in said), said


@pytest.mark.slow
def test_a_peer_that_dies_in_the_middle_is_named():
    body = """
x = np.ones(4_000_000, np.float32)
comm = fc.init()
comm.allreduce(x, compression="int8")
if comm.rank == 1:
    tell("fine", None, 0.0, "|")
    os._exit(3)
outcome(lambda: comm.allreduce(x, compression="int8"))
"""
    with job(2, "import os\n" + body) as (first, second):
        second.stdout.readline()
        name, culprit, seconds, text = outcome_of(first.stdout.readline())
    assert name == "PeerDiedError" and culprit == 1 and seconds < 20, text


def many_steps(codecs: list[str], steps: int) -> dict[str, bytes]:
    """Parameters after steps that each rank makes by the sums that it gets."""
    comm, ends = fc.init(), {}
    for codec in codecs:
        slot = fc.compression.Feedback(codec).slot("p", [(30, 20), (17,)])
        parameters = np.zeros(617, np.float32)
        random = np.random.default_rng(comm.rank)
        for _ in range(steps):
            gradient = parameters * np.float32(0.1) + random.standard_normal(617, np.float32)
            parameters -= np.float32(0.1) * comm.allreduce(gradient, "avg", compression=slot)
        assert np.isfinite(parameters).all()
        ends[codec] = parameters.tobytes()
    return ends


@pytest.mark.slow
def test_ranks_stay_equal_over_many_steps():
    ends = run_ranks(many_steps, 4, [n for n in NAMES if n != "auto"], 100)
    assert all(end == ends[0] for end in ends)
    assert len(set(ends[0].values())) == len(ends[0])


def chooses(throttle: str, count: int, density: float) -> tuple[str, str, str, int]:
    comm = fc.init(throttle=throttle)
    x = np.where(
        np.random.default_rng(comm.rank).random(count) < density, data(comm.rank, count), np.float32(0)
    )
    exact = np.sum(comm.allgather_object(x), axis=0, dtype=np.float32)
    plain = comm.explain_compression(x)
    allowed = fc.compression.Auto(lossy=("int8",))
    lossy = comm.explain_compression(x, allowed)
    comm.profiler.clear()
    got = comm.allreduce(x, compression="auto")
    transfers = sum(r.operation.collective == "transfer" for r in comm.profiler.records())
    np.testing.assert_allclose(got, exact, atol=1e-5)
    return plain.chosen, lossy.chosen, lossy.reason, transfers


def test_auto_declines_on_shared_memory_and_says_why():
    for plain, lossy, reason, transfers in run_ranks(chooses, 2, "", 1 << 20, 1.0):
        assert (plain, lossy, transfers) == ("dense", "dense", 0)
        assert "no codec, since the link was measured at" in reason
        assert "coding takes longer than it saves" in reason


def test_auto_compresses_on_a_slow_link_what_it_may():
    for plain, lossy, reason, _ in run_ranks(chooses, 2, "0.0125", 1 << 18, 1.0):
        assert (plain, lossy) == ("dense", "int8")
        assert "int8, since the link has 0.0125 GB/s" in reason


def test_auto_finds_sparse_gradients_by_their_density():
    done = run_ranks(chooses, 2, "0.0125", 1 << 18, 0.01)
    assert all(plain == "dense" for plain, *_ in done)


def tells_what_it_sends(count: int) -> list[tuple[str, int, int, str]]:
    comm, told = fc.init(), []
    for name in ("int8", "topk", "powersgd", "sparse"):
        x = np.where(np.arange(count) % 100 == comm.rank, data(comm.rank, count), np.float32(0))
        before = comm.explain_compression(x, name)
        comm.profiler.clear()
        comm.allreduce(x, compression=name)
        (row,) = [row for row in comm.profiler.summary().rows if row.algorithm == f"compressed ({name})"]
        told.append(
            (name, before.sent_nbytes[name], row.sent_nbytes, comm.explain_compression(x, name).reason)
        )
    return told


def test_bytes_on_the_wire_are_told_before_and_counted_after():
    """By hand: int8 a factor for 256 bytes; top-k and sparse 6 bytes for each element, own and of all."""
    count, n = 1 << 18, 4
    dense = 2 * (n - 1) * 4 * count // n
    counted = {}
    for told in run_ranks(tells_what_it_sends, n, count):
        for name, predicted, sent, reason in told:
            counted.setdefault(name, []).append(sent)
            assert f"{name}: named by the caller" in reason and "in the last call it sent" in reason
            assert sent <= 1.02 * predicted, (name, predicted, sent)
    assert np.mean(counted["int8"]) == pytest.approx(0.254 * dense, rel=0.01)
    elements = count // 100 * (n - 1) / n * (1 + n) * 6  # of each rank to the owners, and of all back
    assert np.mean(counted["sparse"]) == pytest.approx(elements, rel=0.03)
    assert np.mean(counted["topk"]) == pytest.approx(elements, rel=0.03)


@pytest.mark.parametrize("residual", [True, False])
def test_auto_prices_a_codec_as_it_would_run(residual, monkeypatch):
    """With the cost of feedback, where there is some, and on the device of the arrays."""
    from flagcx.compression import allreduce

    asked = []
    monkeypatch.setattr(
        allreduce, "measure_speed", lambda codec, *how: asked.append((codec.name, how)) or 1.0
    )
    feedback = fc.compression.Feedback(fc.compression.Auto(lossy=("int8", "topk")), residual=residual)
    with fc.init() as comm:
        comm.explain_compression(np.ones(1000, np.float32), feedback["x"])
    assert asked == [(name, (False, 1, residual, 1000)) for name in ("int8", "topk")]


def test_a_slot_forgets_the_plans_of_a_closed_communicator():
    """Whose number in memory a later one may have."""
    slot = fc.compression.Feedback("int8")["x"]
    for step in range(40):
        comm = fc.init()
        assert comm.allreduce(np.ones(100, np.float32), compression=slot)[0] == pytest.approx(1, rel=0.01)
        assert len(slot.plans) == 1
        comm.close()
        assert not slot.plans, step
        del comm


def test_arrays_on_a_gpu_that_kernels_cannot_take_are_refused():
    calls = []
    executor = SimpleNamespace(
        rank=0, size=2, transport=SimpleNamespace(transfer=lambda *moves: calls.append(moves))
    )
    peers = Peers(executor, on_device=True)
    arrays = [SimpleNamespace(dtype=np.dtype(np.float32), data=SimpleNamespace(ptr=at)) for at in (512, 514)]
    peers.enter("", arrays[0], arrays[0])
    with pytest.raises(
        ArrayError, match="begins at address 0x202, and its dtype needs a multiple of 4 bytes"
    ):
        peers.enter("", arrays[0], arrays[1])
    assert calls == [([], [])]


def empty_arrays() -> list[str]:
    comm = fc.init()
    for codec in NAMES:
        assert comm.allreduce(np.ones(0, np.float32), compression=codec).size == 0
    return comm.allreduce(np.ones(2), compression="fp16").tolist()


def test_an_array_of_no_elements_is_left_alone():
    assert run_ranks(empty_arrays, 2) == [[2.0, 2.0]] * 2


def _steps_apart():
    comm = fc.init()
    feedback = fc.compression.Feedback("randomk")
    slot = feedback["layer"]
    x = np.random.default_rng(comm.rank).normal(size=5000).astype(np.float32)
    comm.allreduce(x.copy(), compression=slot)
    slot.step += comm.rank  # as where a rank was lost in the middle of a step
    smaller = comm.split(color=0 if comm.rank < 2 else None)
    if smaller is None:
        return None
    same = smaller.allgather_object(smaller.allreduce(x.copy(), compression=slot).tobytes())
    return slot.step, len(set(same))


def test_ranks_that_left_off_in_different_steps_draw_the_same_elements_again():
    assert run_ranks(_steps_apart, 3) == [(3, 1), (3, 1), None]
