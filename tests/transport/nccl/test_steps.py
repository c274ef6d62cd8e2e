"""What a GPU would be given to do, done with NumPy, against the plain meaning of each collective."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from flagcx.algorithms import build, entries
from flagcx.dtypes import OPS, dtype_of, scaled_sum
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.schedule.compose import beside
from flagcx.schedule.lower import levels
from flagcx.schedule.model import Schedule
from flagcx.schedule.verify import verify
from flagcx.transport.base import Call
from flagcx.transport.nccl.steps import SCRATCH, device_program
from tests.transport.nccl.device_machine import counts_of, run_all

SCHEDULES = {
    f"{entry.collective}-{entry.algorithm}": entry
    for collective in COLLECTIVES
    for entry in entries(collective)
    if collective != "barrier"
}


def schedule_of(name: str, size: int, pieces: int = 1) -> Schedule:
    """A schedule of the catalogue, with the last rank as root, as the transport lowers it."""
    collective, algorithm = name.split("-")
    root = size - 1 if COLLECTIVES[collective].rooted else None
    return levels(build(collective, algorithm, size, root, pieces))


def expected_results(schedule, inputs, op):
    """Every rank's OUTPUT, from the collective's postcondition, with one chunk to a block."""
    kind = COLLECTIVES[schedule.collective]
    n = schedule.size
    results = []
    for rank in range(n):
        if not kind.has_output(rank, schedule.root):
            results.append(None)
            continue
        chunks = kind.output_blocks(n) if kind.blocks else 1
        parts = []
        for chunk in range(chunks):
            made = kind.expected(rank, chunk, n, 1, schedule.root)
            blocks = [_block(inputs[q], kind.input_blocks(n), c) for q, c in made]
            total = blocks[0]
            for block in blocks[1:]:
                total = op.ufunc(total, block)
            parts.append(total)
        results.append(np.concatenate(parts))
    return results


def _block(array, blocks, number):
    count = len(array) // blocks
    return array[number * count : (number + 1) * count]


def run_schedule(schedule, count, dtype, op, in_place):
    """Runs a schedule on fresh data; returns every rank's OUTPUT and what it should be."""
    kind = COLLECTIVES[schedule.collective]
    calls, given, results = [], [], []
    for rank in range(schedule.size):
        shift = kind.in_place_shift(rank, schedule.size, schedule.chunks, schedule.root)
        call = Call(schedule, rank, count, dtype, op, in_place and shift is not None)
        n_given, n_result = counts_of(call)
        numbers = (np.arange(n_given) * (rank + 3) + 7 * rank) % 11
        x = numbers.astype(dtype.numpy) if kind.has_input(rank, schedule.root) else None
        y = np.zeros(n_result, dtype.numpy) if kind.has_output(rank, schedule.root) else None
        if call.in_place:
            x, y = _overlaid(x, y, rank, count, kind)
        calls.append(call)
        given.append(x)
        results.append(y)
    before = [None if x is None else x.copy() for x in given]
    run_all(calls, given, results)
    if not in_place:
        for a, b in zip(before, given, strict=True):
            np.testing.assert_array_equal(a, b, err_msg="the caller's INPUT was written")
    return results, expected_results(schedule, before, op) if op or kind.name else None


def _overlaid(x, y, rank, count, kind):
    if len(x) == len(y):
        return x, x
    if len(x) < len(y):
        y[rank * count : (rank + 1) * count] = x
        return y[rank * count : (rank + 1) * count], y
    return x, x[rank * count : (rank + 1) * count]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_what_its_collective_says(name, size, in_place):
    if not SCHEDULES[name].allows(size):
        pytest.skip(f"{name} does not serve {size} ranks")
    schedule = schedule_of(name, size, 3 if SCHEDULES[name].pipelined else 1)
    for count in (0, 1, size - 1, size + 1, 37):
        got, expected = run_schedule(schedule, count, dtype_of("int64"), OPS["sum"], in_place)
        for rank in range(size):
            np.testing.assert_array_equal(got[rank], expected[rank], err_msg=f"rank {rank}, {count} elements")


@pytest.mark.parametrize("parts", [("ring", "tree"), ("binomial", "recursive_doubling"), ("chain", "bruck")])
def test_what_is_run_after_lowering_is_what_is_verified(parts):
    """Two algorithms beside each other and not aligned: levels make groups of them that are right."""
    first, second = (build("allreduce", name, 5) for name in parts)
    mixed = replace(beside(first, second, 0.5), aligned=False)
    lowered = levels(mixed)
    verify(lowered)
    got, expected = run_schedule(lowered, 29, dtype_of("int64"), OPS["sum"], False)
    for rank in range(5):
        np.testing.assert_array_equal(got[rank], expected[rank])


def test_a_machine_that_loses_a_message_is_noticed():
    schedule = schedule_of("allreduce-ring", 3)
    calls = [Call(schedule, r, 6, dtype_of("int64"), OPS["sum"], False) for r in range(3)]
    calls[1] = Call(schedule_of("allreduce-one_shot", 3), 1, 6, dtype_of("int64"), OPS["sum"], False)
    with pytest.raises(AssertionError, match=r"elements, gets|wait for each other"):
        run_all(calls, [np.ones(6, np.int64)] * 3, [np.ones(6, np.int64) for _ in range(3)])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["allreduce-one_shot", "allreduce-two_shot"])
def test_direct_sums_in_half_precision_round_once(name, dtype):
    size, count = 8, 101
    schedule = schedule_of(name, size)
    numpy = dtype_of(dtype).numpy
    inputs = [np.random.default_rng(r).uniform(-1, 1, count).astype(numpy) for r in range(size)]
    exact = sum(x.astype(np.float32) for x in inputs).astype(numpy)
    results = [np.zeros(count, numpy) for _ in range(size)]
    run_all(
        [Call(schedule, r, count, dtype_of(dtype), OPS["sum"], False) for r in range(size)], inputs, results
    )
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result.view(np.uint8), exact.view(np.uint8), err_msg=f"rank {rank}")


@pytest.mark.parametrize("name", ["allreduce-one_shot", "allreduce-ring", "allreduce-recursive_doubling"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16"])
def test_the_average_is_the_sum_divided_and_equal_on_all_ranks(name, in_place, dtype):
    for size in (2, 3, 4):
        schedule = schedule_of(name, size)
        got, summed = run_schedule(schedule, 13, dtype_of(dtype), OPS["avg"], in_place)
        for rank in range(size):
            np.testing.assert_array_equal(got[rank], got[0])
            exact = summed[rank].astype(np.float64) / size
            if dtype == "int32":
                np.testing.assert_array_equal(got[rank], np.fix(exact))
            else:
                epsilon = 2.0**-8 if dtype == "bfloat16" else 2.0**-23
                np.testing.assert_allclose(got[rank].astype(np.float64), exact, rtol=2 * epsilon)


def test_the_average_of_one_shot_costs_no_launch_of_its_own():
    call = Call(schedule_of("allreduce-one_shot", 4), 1, 64, dtype_of("bfloat16"), OPS["avg"], False)
    assert sum(len(s.phases) for s in device_program(call).steps) == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_a_scaled_sum_scales_what_is_given_first(in_place):
    got, summed = run_schedule(
        schedule_of("allreduce-ring", 4), 21, dtype_of("float64"), scaled_sum(0.5), in_place
    )
    for rank in range(4):
        np.testing.assert_array_equal(got[rank], summed[rank] * 0.5)


def test_a_direct_step_is_one_group_and_one_launch_of_one_chain():
    call = Call(schedule_of("allreduce-one_shot", 8), 5, 1 << 20, dtype_of("float32"), OPS["sum"], False)
    (step,) = device_program(call).steps
    assert len(step.messages) == 14
    ((chain,),) = step.phases
    assert len(chain.sources) == 8
    assert chain.count == 1 << 20


@pytest.mark.parametrize("count", [96, 97, 1003])
def test_what_arrives_lies_as_far_from_16_bytes_as_what_it_is_added_to(count):
    call = Call(schedule_of("allreduce-ring", 4), 0, count, dtype_of(ml_dtypes.bfloat16), OPS["sum"], False)
    for step in device_program(call).steps:
        for phase in step.phases:
            for chain in phase:
                if len(chain.sources) == 2:
                    (arrived,) = (s for s in chain.sources if s[0] == SCRATCH)
                    assert (arrived[1] - chain.to[1]) % 8 == 0
