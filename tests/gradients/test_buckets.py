"""Which gradients travel together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagcx.gradients.buckets import ALONE_NBYTES, Gradient, form_buckets
from flagcx.gradients.overlap import LEAST_BUCKET_NBYTES, best_bucket_nbytes, step_us


def gradients(*sizes: int, dtypes: str = "", places: str = "") -> list[Gradient]:
    """Gradients of these sizes; dtypes and places by letter."""
    dtypes, places = dtypes or "a" * len(sizes), places or "h" * len(sizes)
    names = {"h": "host", "d": "device"}
    return [Gradient(i, (n,), dtypes[i], n, names[places[i]]) for i, n in enumerate(sizes)]


def test_neighbours_in_the_order_of_readiness_share_a_bucket():
    assert form_buckets([4, 3, 2, 1, 0], gradients(10, 10, 10, 10, 10), 20) == [(4, 3), (2, 1), (0,)]


def test_a_gradient_that_is_too_large_has_one_of_its_own():
    assert form_buckets([0, 1, 2, 3], gradients(10, 99, 10, 10), 30) == [(0,), (1,), (2, 3)]


def test_dtypes_and_places_are_kept_apart_and_do_not_close_each_others_buckets():
    made = form_buckets(range(6), gradients(10, 10, 10, 10, 10, 10, dtypes="abaabb"), 20)
    assert made == [(0, 2), (3,), (1, 4), (5,)]
    made = form_buckets(range(4), gradients(10, 10, 10, 10, places="hdhd"), 100)
    assert made == [(0, 2), (1, 3)]


@pytest.mark.parametrize(("place", "nbytes"), ALONE_NBYTES.items())
def test_what_is_large_goes_alone_and_leaves_the_bucket_open_for_small_ones(place, nbytes):
    sizes = (10, nbytes + 1, 10, nbytes, 10)
    known = [Gradient(i, (n,), "uint8", n, place) for i, n in enumerate(sizes)]
    assert form_buckets(range(5), known, 1 << 30) == [(1,), (0, 2, 3, 4)]


def test_buckets_are_ordered_by_when_they_become_full():
    made = form_buckets([0, 1, 2, 3], gradients(10, 10, 10, 10, dtypes="abba"), 100)
    assert made == [(1, 2), (0, 3)]


kinds_of_gradients = st.lists(st.tuples(st.integers(0, 50), st.sampled_from("ab")), min_size=1)


@given(kinds_of_gradients, st.integers(1, 120), st.randoms())
def test_every_gradient_is_in_one_bucket_that_is_not_too_large(kinds, size, random):
    known = gradients(*[n for n, _ in kinds], dtypes="".join(d for _, d in kinds))
    order = list(range(len(known)))
    random.shuffle(order)
    made = form_buckets(order, known, size)
    assert sorted(i for bucket in made for i in bucket) == sorted(order)
    place = {number: at for at, number in enumerate(order)}
    for bucket in made:
        assert len({known[i].dtype for i in bucket}) == 1
        assert len(bucket) == 1 or sum(known[i].nbytes for i in bucket) <= size
        assert [place[i] for i in bucket] == sorted(place[i] for i in bucket)
    ends = [place[bucket[-1]] for bucket in made]
    assert ends == sorted(ends)


def simulated_us(total: float, buckets: int, one_us: float, compute_us: float) -> float:
    """A step with equal buckets, event by event."""
    end = 0.0
    for i in range(buckets):
        end = max(end, compute_us * (i + 1) / buckets) + one_us
    return end


@pytest.mark.parametrize("compute_us", [0.0, 10.0, 333.0, 5000.0])
@pytest.mark.parametrize("buckets", [1, 2, 7, 64])
def test_the_time_of_a_step_is_what_a_simulation_gives(buckets, compute_us):
    def time_us(nbytes: float) -> float:
        return 5 + nbytes / 10

    got = step_us(6400, 6400 / buckets, time_us, compute_us)
    assert got == pytest.approx(simulated_us(6400, buckets, time_us(6400 / buckets), compute_us))


def test_the_best_bucket_follows_latency_and_computation():
    total = 256 << 20
    sizes = [best_bucket_nbytes(total, lambda n, a=a: a + n / 1000) for a in (1, 100, 10_000)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    assert best_bucket_nbytes(total, lambda n: 100 + n / 1000, compute_us=0) == total
    assert best_bucket_nbytes(1000, lambda n: 100 + n / 1000) == LEAST_BUCKET_NBYTES


def test_no_other_size_is_much_better():
    def time_us(nbytes: float) -> float:
        return 100 + nbytes / 1000

    total = 256 << 20
    best = best_bucket_nbytes(total, time_us, 1e5)
    steps = {1 << power: step_us(total, 1 << power, time_us, 1e5) for power in range(16, 29)}
    assert steps[best] <= 1.01 * min(steps.values())
    assert all(step > 1.01 * min(steps.values()) for size, step in steps.items() if size > best)
