"""The linear program, tours, rings and trees: right where the answer is known, and never overfull."""

import random
from itertools import permutations

import numpy as np
import pytest

from flagcx.topology import forest, packing, preset, rings, tours, traffic
from flagcx.topology.bounds import bound
from flagcx.topology.routes import Routes
from tests.topology.graphs import random_machine


def loads_of(machine, gpus=None):
    gpus = [gpu.index for gpu in machine.gpus] if gpus is None else gpus
    return traffic.measure(machine, gpus, Routes(machine))


def listed(columns):
    def cheapest(prices):
        place = int((columns @ prices).argmin())
        return place, columns[place]

    return cheapest


@pytest.mark.parametrize("seed", range(20))
def test_the_simplex_method_finds_the_optimum(seed):
    """Weak duality both ways: the packing fits, and the prices prove that none is greater."""
    rng = np.random.default_rng(seed)
    columns = rng.integers(0, 3, (12, 8)).astype(float)
    columns[:, 0] = 1.0
    capacity = rng.integers(1, 10, 8).astype(float)
    found = packing.pack(capacity, listed(columns), gap=1e-9)
    load = sum(columns[key] * weight for key, weight in found.columns)
    assert (load <= capacity * (1 + 1e-9)).all()
    assert found.value == pytest.approx(found.limit, rel=1e-3)
    for key, weight in found.columns:
        assert weight > 0 and key in found.seen


def test_a_packing_of_one_column_is_its_narrowest_link():
    found = packing.pack(np.array([6.0, 4.0]), listed(np.array([[1.0, 2.0]])))
    assert found.columns == ((0, pytest.approx(2.0)),)


def test_a_dive_keeps_the_value_with_fewer_columns():
    loads = loads_of(preset("dgx-1v"))

    def cheapest(prices):
        order = tuple(tours.cheapest_tour(loads.load @ prices + np.where(loads.fabric, 0, 1e6)))
        return order, loads.hops(order)

    full = packing.pack(loads.capacity, cheapest)
    fewer = packing.dive(full, loads.capacity, cheapest, rounds=400, keep=0.98, most=16)
    assert fewer.value >= 0.98 * full.value
    assert len(fewer.columns) <= 6
    total = sum(loads.hops(order) * weight for order, weight in fewer.columns)
    assert (total <= loads.capacity * (1 + 1e-6)).all()


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
    loads = loads_of(random_machine(seed, 6))
    order, exact = rings.best_ring(loads)
    every = max(rings.rate(loads, (0, *rest)) for rest in permutations(range(1, 6)))
    assert exact and sorted(order) == list(range(6))
    assert rings.rate(loads, order) == pytest.approx(every)


def test_links_that_two_hops_share_are_halved():
    loads = loads_of(preset("8xa100-pcie"))
    assert rings.rate(loads, range(8)) == pytest.approx(16.0)
    assert rings.rate(loads, (0, 4, 1, 5, 2, 6, 3, 7)) == pytest.approx(4.0)


@pytest.mark.parametrize("seed", range(10))
def test_packed_rings_and_trees_fit_the_links(seed):
    machine = random_machine(seed, 3 + seed % 5)
    loads = loads_of(machine)
    first, _ = rings.best_ring(loads)
    several, _ = rings.pack_rings(loads, first)
    assert (sum(loads.hops(order) * rate for order, rate in several) <= loads.capacity * (1 + 1e-6)).all()
    trees, limit = forest.pack_trees(loads)
    assert (
        sum(forest.tree_load(loads, edges) * w for edges, w in trees) <= loads.capacity * (1 + 1e-6)
    ).all()
    value = sum(weight for _, weight in trees)
    best = bound(machine).bandwidth_gb_per_s
    assert 0.95 * min(limit, best) <= value <= best * (1 + 1e-6)
    for edges, _ in trees:
        root, parents = forest.rooted(edges)
        assert sorted([root, *(child for child, _ in parents)]) == list(range(len(machine.gpus)))


def test_trees_without_shared_links_reach_the_tutte_nash_williams_number():
    """Every pair of 4 GPUs joined by one link of 20: 12 / 2 trees of 3 edges, so 2 x 20."""
    from flagcx.topology import nccl_xml
    from tests.topology.machines import FIXTURES

    loads = loads_of(nccl_xml.read(FIXTURES / "xgmi_4.xml"))
    trees, limit = forest.pack_trees(loads)
    assert sum(weight for _, weight in trees) == pytest.approx(2 * 24.0, rel=0.02)
    assert limit == pytest.approx(2 * 24.0, rel=0.01)


def test_a_tree_is_rooted_at_its_middle():
    root, parents = forest.rooted([(0, 1), (1, 2), (2, 3), (3, 4)])
    assert root == 2 and forest.Tree(root, parents, 1.0, 1.0, None).depth == 2
