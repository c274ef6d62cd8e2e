"""The simulated transport: exact, in any order of events, and strict about what a schedule may do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flagcx.algorithms import build
from flagcx.dtypes import OPS, scaled_sum
from flagcx.errors import ArgumentError, ScheduleError
from flagcx.schedule.model import (
    Buffer,
    Copy,
    Program,
    Recv,
    RecvReduce,
    Reduce,
    Schedule,
    Send,
    Span,
    Step,
)
from tests.simulated import run

INPUT, OUTPUT, SCRATCH = Buffer
A, B = Span(INPUT, 0, 1), Span(OUTPUT, 0, 1)
SUM = OPS["sum"]


def schedule(*programs: list[Step], collective: str = "allreduce", chunks: int = 1, root: int | None = None):
    """A schedule of programs written out."""
    made = [Program(rank, tuple(steps)) for rank, steps in enumerate(programs)]
    return Schedule(collective, "mine", len(programs), chunks, made.__getitem__, root)


def exchange(**changes):
    """Two ranks that add what the other has; ``changes`` replace a rank's step."""
    steps = {
        "rank0": Step((Send(A, 1), RecvReduce(B, 1))),
        "rank1": Step((Send(A, 0), RecvReduce(B, 0))),
    } | changes
    before = Step((), (Copy(A, B),))
    return schedule([before, steps["rank0"]], [before, steps["rank1"]])


def two(dtype=np.int64):
    return [np.array([1, 2, 3], dtype), np.array([10, 20, 30], dtype)]


def test_a_schedule_written_out_runs():
    given = two()
    for in_place in (False, True):
        got = run(exchange(), given, 3, SUM, in_place=in_place)
        assert [array.tolist() for array in got] == [[11, 22, 33]] * 2
    assert [array.tolist() for array in given] == [[1, 2, 3], [10, 20, 30]]


@pytest.mark.parametrize(
    ("op", "dtype", "wanted"),
    [
        (OPS["prod"], np.int32, [10, 40, 90]),
        (OPS["min"], np.float32, [1, 2, 3]),
        (OPS["max"], np.uint8, [10, 20, 30]),
        (OPS["bor"], np.int16, [11, 22, 31]),
        (OPS["land"], np.int64, [1, 1, 1]),
        (OPS["avg"], np.float64, [5.5, 11, 16.5]),
        (OPS["avg"], np.int8, [5, 11, 16]),
        (OPS["sum"], np.complex64, [11, 22, 33]),
        (OPS["sum"], np.float16, [11, 22, 33]),
        (OPS["sum"], ml_dtypes.bfloat16, [11, 22, 33]),
        (scaled_sum(0.5), np.float32, [5.5, 11, 16.5]),
    ],
    ids=lambda value: getattr(value, "name", None) or getattr(value, "__name__", None),
)
def test_operations_and_dtypes(op, dtype, wanted):
    for array in run(exchange(), two(dtype), 3, op):
        assert array.dtype == dtype
        assert array.astype(np.complex128).tolist() == wanted


def test_averages_of_integers_are_rounded_toward_zero():
    given = [np.array([-1, -7, 7]), np.array([-2, 0, 0])]
    assert run(exchange(), given, 3, OPS["avg"])[0].tolist() == [-1, -3, 3]


def test_bool_arrays():
    given = [np.array([True, False, False]), np.array([True, True, False])]
    assert run(exchange(), given, 3, OPS["lor"])[1].tolist() == [True, True, False]


def test_the_order_of_events_differs_by_seed_and_shows_a_race():
    """Two messages land in one span of the same step: last come, last served."""
    racing = schedule(
        [Step((Recv(B, 1), Recv(B, 2)))],
        [Step((Send(A, 0),))],
        [Step((Send(A, 0),))],
        collective="reduce",
        root=0,
    )
    given = [np.array([0]), np.array([1]), np.array([2])]
    seen = {int(run(racing, given, 1, SUM, seed=seed)[0][0]) for seed in range(20)}
    assert seen == {1, 2}


def test_a_right_schedule_ends_alike_for_every_seed():
    chance = np.random.default_rng(2)
    given = [chance.standard_normal(11).astype(np.float32) for _ in range(6)]
    for algorithm in ("ring", "double_binary_tree", "hierarchical", "halving_doubling"):
        seen = {run(build("allreduce", algorithm, 6), given, 11, SUM, seed=s)[3].tobytes() for s in range(8)}
        assert len(seen) == 1


def test_what_was_never_written_is_poison():
    never = schedule([Step()], [Step()])
    assert np.isnan(run(never, two(np.float32), 3, SUM)[0]).all()
    early = schedule([Step((Send(B, 1),))], [Step((Recv(B, 0),))])
    assert np.isnan(run(early, two(np.float32), 3, SUM)[1]).all()
    for array in run(never, two(np.int32), 3, SUM):
        assert set(array.tolist()) == {int(np.array([0xA5] * 4, np.uint8).view(np.int32)[0])}


def test_messages_of_a_pair_keep_their_order():
    first, second, both = Span(INPUT, 0, 1), Span(INPUT, 1, 2), Span(INPUT, 0, 2)
    sends = [Step((Send(first, 1), Send(second, 1)), (Copy(both, Span(OUTPUT, 0, 2)),))]
    receives = [Step((Recv(Span(OUTPUT, 0, 1), 0), Recv(Span(OUTPUT, 1, 2), 0)))]
    ordered = schedule(sends, receives, collective="broadcast", chunks=2, root=0)
    for seed in range(10):
        assert run(ordered, [np.array([5, 6]), None], 2, seed=seed)[1].tolist() == [5, 6]


def test_in_place_lays_a_block_over_its_own_place():
    blocks = [np.array([1, 2]), np.array([3, 4]), np.array([5, 6])]
    for array in run(build("allgather", "ring", 3), blocks, 2, in_place=True):
        assert array.tolist() == [1, 2, 3, 4, 5, 6]
    whole = [np.arange(6) * 10**rank for rank in range(3)]
    got = run(build("reduce_scatter", "direct", 3), whole, 2, SUM, in_place=True)
    assert [array.tolist() for array in got] == [[0, 111], [222, 333], [444, 555]]


def test_ranks_without_input_or_output():
    got = run(build("gather", "binomial", 3, 1), [np.array([r]) for r in range(3)], 1)
    assert got[0] is None and got[2] is None and got[1].tolist() == [0, 1, 2]
    got = run(build("scatter", "binomial", 3, 1), [None, np.array([7, 8, 9]), None], 1)
    assert [int(array[0]) for array in got] == [7, 8, 9]


def test_ranks_that_wait_for_each_other_are_reported():
    """Each sends before it receives: with buffers it would go well, so it must not here."""
    before = Step((), (Copy(A, B),))
    sends_first = [[before, Step((Send(A, 1 - r),)), Step((RecvReduce(B, 1 - r),))] for r in (0, 1)]
    message = (
        r"rank 0, step 1: the ranks wait for each other for ever: rank 0 to send INPUT\[0:1\] to rank 1; "
        r"rank 1 to send INPUT\[0:1\] to rank 0"
    )
    with pytest.raises(ScheduleError, match=message) as caught:
        run(schedule(*sends_first), two(), 3, SUM)
    assert (caught.value.rank, caught.value.step) == (0, 1)


def test_a_receive_that_nobody_sends_to_is_reported():
    with pytest.raises(ScheduleError, match=r"for ever: rank 0 to receive OUTPUT\[0:1\] from rank 1"):
        run(exchange(rank1=Step((RecvReduce(B, 0),))), two(), 3, SUM)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step((Send(A, 1), RecvReduce(A, 1))), r"INPUT\[0:1\] is written to, and the call is out of place"),
        (
            Step((Send(A, 1), Recv(Span(OUTPUT, 0, 2), 1))),
            r"OUTPUT\[0:2\] leaves the buffer, which has 1 chunk",
        ),
        (Step((), (Copy(B, A),)), r"rank 0, step 1: INPUT\[0:1\] is written to"),
        (Step((Send(A, 0),)), "is with the rank itself; use Copy or Reduce"),
    ],
    ids=["input", "span", "copy", "self"],
)
def test_forbidden_steps_are_reported(step, message):
    with pytest.raises(ScheduleError, match=message):
        run(exchange(rank0=step), two(), 3, SUM)


def test_a_message_of_another_length_is_reported():
    """Chunks 0 and 1 of three elements have two and one."""
    sends = [Step((Send(Span(INPUT, 0, 1), 1),))]
    receives = [Step((Recv(Span(OUTPUT, 1, 2), 0),))]
    shifted = schedule(sends, receives, collective="broadcast", chunks=2, root=0)
    with pytest.raises(
        ScheduleError, match=r"step 0: 2 elements of INPUT\[0:1\] go to rank 1, which expects 1"
    ):
        run(shifted, [np.arange(3), None], 3)
    unlike = schedule([Step((), (Copy(Span(INPUT, 0, 1), Span(OUTPUT, 1, 2)),))], chunks=2)
    with pytest.raises(ScheduleError, match="has spans of 2 and 1 elements"):
        run(unlike, [np.arange(3)], 3, SUM)


def test_combining_needs_an_operation():
    with pytest.raises(ScheduleError, match="contributions are combined, and no operation was given"):
        run(exchange(), two(), 3)
    lone = schedule([Step((), (Copy(A, B), Reduce(A, B)))])
    assert run(lone, [np.array([4])], 1, SUM)[0].tolist() == [8]


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(ArgumentError, match="1 inputs for 2 ranks; expected one a rank"):
        run(exchange(), two()[:1], 3, SUM)
    with pytest.raises(ArgumentError, match=r"rank 0: an input of shape \(3,\); expected \(4,\)"):
        run(exchange(), two(), 4, SUM)
    with pytest.raises(ArgumentError, match=r"inputs of dtypes .*float32.*int64.*; expected one dtype"):
        run(exchange(), [two()[0], two(np.float32)[1]], 3, SUM)
    with pytest.raises(ArgumentError, match=r"rank 1: an input of shape \(0,\); expected \(3,\)"):
        run(exchange(), [two()[0], None], 3, SUM)
