"""The timing loop and its check: a result that's wrong in any way is counted, on any rank."""

import harness
import numpy as np
import pytest

COUNTS = (0, 1, 5, harness.PERIOD - 1, harness.PERIOD, harness.PERIOD + 1, 3 * harness.PERIOD + 7)


def measurement(allreduce, rank=0, size=2, barrier=lambda: None):
    """A measurement of one rank of ``size``, with the others' part played by ``allreduce``."""

    def allocate(count):
        array = np.empty(count, np.float32)
        return array, array

    return harness.Measurement(harness.Subject(rank, size, allreduce, barrier, allocate))


def add_rank_1(array):
    """A right all-reduce of two ranks, seen from rank 0."""
    other = np.empty_like(array)
    harness.fill(other, harness.pattern(1))
    array += other


@pytest.mark.parametrize("count", COUNTS)
def test_right_result_has_nothing_wrong(count):
    assert measurement(add_rank_1).prepare(count) == {"wrong": 0}


def test_verify_leaves_zeros_so_that_timed_calls_do_not_overflow():
    subject = measurement(add_rank_1)
    subject.prepare(100)
    assert not subject._array.any()


def _swapped_chunks(array):
    add_rank_1(array)
    half = array.size // 2
    array[:] = np.concatenate([array[half:], array[:half]])


def _rank_1_twice(array):
    add_rank_1(array)
    add_rank_1(array)


def _rank_1_lost(array):
    pass


def _own_part_in_place_of_rank_1(array):
    array *= 2


@pytest.mark.parametrize(
    "faulty", [_swapped_chunks, _rank_1_twice, _rank_1_lost, _own_part_in_place_of_rank_1]
)
def test_faulty_result_is_counted(faulty):
    count = 2 * harness.PERIOD + 2
    wrong = measurement(faulty).prepare(count)["wrong"]
    assert wrong > 0.99 * count


def test_one_wrong_element_is_counted_wherever_it_is():
    for position in (0, harness.PERIOD - 1, harness.PERIOD, 2 * harness.PERIOD + 5):

        def one_off(array, position=position):
            add_rank_1(array)
            array[position] += 1

        assert measurement(one_off).prepare(2 * harness.PERIOD + 6) == {"wrong": 1}


def test_nan_is_wrong():
    def not_a_number(array):
        array[:] = np.nan

    assert measurement(not_a_number).prepare(9) == {"wrong": 9}


def test_sums_over_64_ranks_are_exact_in_float32():
    exact = sum(harness.pattern(rank).astype(np.int64) for rank in range(64))
    assert exact.max() < 1 << 24
    np.testing.assert_array_equal(harness.expected_pattern(64).astype(np.int64), exact)


def test_sample_counts_calls_after_warmup_and_barrier():
    events = []
    subject = measurement(lambda array: events.append("call"), barrier=lambda: events.append("barrier"))
    subject.prepare(4)
    events.clear()
    assert subject.sample(calls=3, warmup=2)["seconds"] > 0
    assert events == ["call"] * 2 + ["barrier"] + ["call"] * 3


def exchanged(collective: str, count: int, spoil: int = 0) -> int:
    """The wrong elements of a collective of two ranks that this process makes up, of rank 1."""
    sent = np.empty((2, 2 * count), np.float32)
    for rank in range(2):
        harness.fill(sent[rank], harness.pattern(rank))

    def call(sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        blocks = sent[:, count:] if collective in ("alltoall", "reduce_scatter") else sent[:, :count]
        out = {"broadcast": blocks[0], "reduce_scatter": blocks.sum(axis=0)}.get(
            collective, blocks.reshape(-1)
        )
        recvbuf[...] = np.roll(out, spoil)

    subject = harness.Subject(1, 2, int, int, lambda count: (0, np.empty(0)), calls={collective: call})
    measured = harness.Measurement(subject)
    wrong = measured.prepare(count, collective)["wrong"]
    assert measured.sample(2, 1)["seconds"] > 0
    return wrong


@pytest.mark.parametrize("collective", ["broadcast", "allgather", "reduce_scatter", "alltoall"])
def test_other_collectives_are_verified(collective):
    assert exchanged(collective, 1000) == 0
    assert exchanged(collective, 1000, spoil=1) > 900
