"""Tours and ring orders: the best of all where the search is exact."""

import random
from itertools import permutations

import numpy as np
import pytest

from flagcx.topology import orders, preset, tours
from tests.topology.graphs import pair_loads_of, random_machine


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7])
def test_exact_tours_are_the_cheapest_of_all(count):
    for seed in range(6):
        cost = np.random.default_rng(seed * 10 + count).random((count, count))
        every = min(tours.tour_cost(cost, (0, *rest)) for rest in permutations(range(1, count)))
        found = tours.cheapest_tour(cost)
        assert sorted(found) == list(range(count)) and found[0] == 0
        assert tours.tour_cost(cost, found) == pytest.approx(every)


def test_long_tours_by_local_search_are_tours_and_near_the_best():
    points = np.random.default_rng(3).random((14, 2))
    cost = np.linalg.norm(points[:, None] - points[None], axis=2)
    found = tours.cheapest_tour(cost)
    assert sorted(found) == list(range(14))
    around = min(tours.tour_cost(cost, random.Random(n).sample(range(14), 14)) for n in range(300))
    assert tours.tour_cost(cost, found) < 0.8 * around


@pytest.mark.parametrize("seed", range(10))
def test_the_best_ring_has_the_best_rate_of_all(seed):
    loads = pair_loads_of(random_machine(seed, 6))
    order, exact = orders.search_ring(loads)
    every = max(orders.ring_rate(loads, (0, *rest)) for rest in permutations(range(1, 6)))
    assert exact and sorted(order) == list(range(6))
    assert orders.ring_rate(loads, order) == pytest.approx(every)


def test_links_that_two_hops_share_are_halved():
    loads = pair_loads_of(preset("8xa100-pcie"))
    assert orders.ring_rate(loads, range(8)) == pytest.approx(16.0)
    assert orders.ring_rate(loads, (0, 4, 1, 5, 2, 6, 3, 7)) == pytest.approx(4.0)
