"""The bound: against every partition one by one, known machines, and what no plan may exceed."""

import math

import pytest

from flagcx.errors import TopologyError
from flagcx.topology import bound, bounds, cluster, make_plan, nvidia_smi, preset
from flagcx.topology.bounds import nvls_bound
from flagcx.topology.routes import Routes
from tests.topology.graphs import min_cut, random_links, random_machine, slow_bound


@pytest.mark.parametrize("seed", range(30))
def test_a_least_cut_separates_and_is_no_wider_than_its_value(seed):
    links, terminals = random_links(seed, 4, 5)
    for other in terminals[1:]:
        value, side = bounds._min_cut(links, 1.0, [("source", terminals[0]), ("sink", other)])
        assert value == pytest.approx(min_cut(links, [terminals[0]], [other]))
        across = sum(bandwidth for ends, bandwidth in links.items() if len(ends & side) == 1)
        assert across == pytest.approx(value)
        assert terminals[0] in side and other not in side


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(("terminals", "others"), [(2, 2), (4, 0), (5, 3)])
def test_the_least_partition_is_the_least_of_all(seed, terminals, others):
    links, names = random_links(seed * 7 + terminals, terminals, others)
    value, groups = bounds.least_partition(links, names)
    assert value == pytest.approx(slow_bound(links, names))
    assert sorted(name for group in groups for name in group) == sorted(names)


def test_only_trying_single_gpus_would_not_do():
    """Two cliques with a thin link between: the two halves bound it, and no GPU alone does."""
    links = {frozenset(("t0", "t1")): 90.0, frozenset(("t2", "t3")): 90.0, frozenset(("t1", "t2")): 1.0}
    value, groups = bounds.least_partition(links, ["t0", "t1", "t2", "t3"])
    assert value == 1.0 and sorted(map(sorted, groups)) == [["t0", "t1"], ["t2", "t3"]]
    singles = sum(
        min_cut(links, [t], [o for o in ("t0", "t1", "t2", "t3") if o != t]) for t in ("t0", "t1", "t2", "t3")
    )
    assert singles / 6 > 60


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dgx-2", 120 * 16 / 30),
        ("dgx-a100", 240 * 8 / 14),
        ("dgx-h100", 370.8 * 8 / 14),
        ("dgx-1v", (120 + 12) * 8 / 14),
        ("8xa100-pcie", 16.0),
        ("4xpcie", 24 * 4 / 6),
    ],
)
def test_known_machines(name, expected):
    assert bound(preset(name)).bandwidth_gb_per_s == pytest.approx(expected)


def test_a_ring_of_equal_links_has_the_known_factor():
    for count in (3, 5, 8):
        names = [f"t{n}" for n in range(count)]
        links = {frozenset((a, b)): 7.0 for a, b in zip(names, names[1:] + names[:1], strict=True)}
        assert bounds.least_partition(links, names)[0] == pytest.approx(7.0 * count / (count - 1))


def test_one_gpu_sends_nothing_and_two_are_bound_by_their_link():
    assert bound(preset("dgx-a100"), [3]).bandwidth_gb_per_s == math.inf
    assert bound(preset("dgx-a100"), [3, 5]).bandwidth_gb_per_s == pytest.approx(240.0)
    assert bound(preset("dgx-1v"), [0, 5]).bandwidth_gb_per_s == pytest.approx(6.0)


def test_large_clusters_have_a_valid_bound_by_natural_partitions():
    for machine in ("dgx-a100", "8xa100-pcie", "dgx-1v"):
        small = cluster(preset(machine), 3)
        exact = bound(small)
        natural = bounds._natural(small, range(24), Routes(small))
        assert exact.exact and not natural.exact
        assert natural.bandwidth_gb_per_s >= exact.bandwidth_gb_per_s * (1 - 1e-9)
        assert natural.bandwidth_gb_per_s <= exact.bandwidth_gb_per_s * 1.05
    large = bound(cluster(preset("dgx-h100"), 64, hosts_per_leaf=16, oversubscription=64.0))
    assert large.bandwidth_gb_per_s == pytest.approx(4 * 8 * 12.5 / 6) and len(large.groups) == 4


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_exceeds_the_bound(seed):
    plan = make_plan(random_machine(seed, 3 + seed % 5))
    assert 0 < plan.bandwidth_gb_per_s <= plan.bound_gb_per_s * (1 + 1e-6)


def test_an_unknown_gpu_is_named():
    with pytest.raises(TopologyError, match="no GPU 9"):
        bound(preset("dgx-1v"), [0, 9])


def test_the_bound_of_nvswitches_that_add_up_is_that_of_one_gpus_links():
    for name, expected in (("dgx-h200", 18 * 20.6), ("hgx-b200", 18 * 40.1), ("gb200-nvl72", 18 * 40.1)):
        plan = make_plan(preset(name))
        assert plan.nvls_bound_gb_per_s == pytest.approx(expected)
        assert plan.nvls_bound_gb_per_s >= plan.bound_gb_per_s
    for name in ("dgx-a100", "dgx-2", "dgx-1v", "8xmi300x", "4xpcie"):
        assert make_plan(preset(name)).nvls_bound_gb_per_s is None
    assert nvls_bound(cluster(preset("dgx-h100"), 2), range(16)) is None
    assert nvls_bound(preset("dgx-h100"), [3]) is None


def test_an_unknown_generation_of_pcie_gives_a_range():
    text = "GPU0 GPU1\nGPU0 X {0}\nGPU1 {0} X\n"
    slow, fast = make_plan(nvidia_smi.parse(text.format("PIX"))).pcie_range
    assert (slow.generation, slow.bandwidth_gb_per_s, slow.bound_gb_per_s) == (3, 12.0, 12.0)
    assert (fast.generation, fast.bandwidth_gb_per_s) == (5, 48.0)
    assert make_plan(nvidia_smi.parse(text.format("NV4"))).pcie_range is None
    assert make_plan(preset("4xpcie")).pcie_range is None
