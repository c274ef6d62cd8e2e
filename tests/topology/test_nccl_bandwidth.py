"""What NCCL is taken to reach: packed rings and trees fit the links; known machines have known figures."""

import math
from itertools import pairwise

import pytest

from flagcx.topology import LinkKind, cluster, nccl_bandwidth, orders, preset, read
from flagcx.topology.bounds import bound
from flagcx.topology.nccl_bandwidth import NcclBandwidth
from tests.topology.graphs import pair_loads_of, random_machine
from tests.topology.machines import FIXTURES


def tree_load(loads, edges):
    return sum(loads.load[a, b] + loads.load[b, a] for a, b in edges)


@pytest.mark.parametrize("seed", range(10))
def test_packed_rings_and_trees_fit_the_links(seed):
    machine = random_machine(seed, 3 + seed % 5)
    loads = pair_loads_of(machine)
    count = len(loads.gpus)
    first, _ = orders.search_ring(loads)
    rings = nccl_bandwidth._pack_rings(loads, first)
    assert (sum(loads.ring(order) * rate for order, rate in rings) <= loads.capacity * (1 + 1e-6)).all()
    assert all(sorted(order) == list(range(count)) for order, _ in rings)
    assert sum(rate for _, rate in rings) >= orders.ring_rate(loads, first)
    trees = nccl_bandwidth._pack_trees(loads)
    assert (sum(tree_load(loads, edges) * w for edges, w in trees) <= loads.capacity * (1 + 1e-6)).all()
    assert 0 < sum(weight for _, weight in trees) <= bound(machine).bandwidth_gb_per_s * (1 + 1e-6)
    for edges, _ in trees:
        joined = {0}
        for _ in edges:
            joined |= {end for edge in edges if joined & set(edge) for end in edge}
        assert len(edges) == count - 1 and joined == set(range(count))


def test_trees_without_shared_links_reach_the_tutte_nash_williams_number():
    """Every pair of 4 GPUs joined by one link of 24: 12 / 2 trees of 3 edges, so 2 x 24."""
    trees = nccl_bandwidth._pack_trees(pair_loads_of(read(FIXTURES / "xgmi_4.xml")))
    assert sum(weight for _, weight in trees) == pytest.approx(2 * 24.0, rel=0.01)


@pytest.mark.parametrize(
    ("name", "hosts", "rings", "levels"),
    [
        ("dgx-1v", 1, 120 * 8 / 14, 0.0),
        ("8xa100-pcie", 1, 16 * 8 / 14, 0.0),
        ("dgx-a100", 1, 240 * 8 / 14, 0.0),
        ("dgx-2", 1, 64.0, 0.0),
        ("dgx-a100", 2, 102.4, 137.142857),
        ("dgx-h100", 4, 198.193548, 211.885714),
        ("dgx-1v", 4, 23.594470, 32.0),
        ("8xa100-pcie", 2, 9.752381, 12.0),
        ("4xpcie", 8, 0.645161, 0.714286),
    ],
)
def test_known_machines(name, hosts, rings, levels):
    """Figures that the constants of ``flagcx.cost.nccl`` are fitted on."""
    found = nccl_bandwidth.nccl_bandwidth(cluster(preset(name), hosts))
    assert found.rings_gb_per_s == pytest.approx(rings, rel=1e-3)
    assert found.levels_gb_per_s == pytest.approx(levels, rel=1e-3)
    assert (found.levels_limit is None) == (hosts == 1)


def test_hosts_of_different_widths_have_rings_alone():
    found = nccl_bandwidth.nccl_bandwidth(cluster(preset("dgx-a100"), 2), [0, 1, 2, 8, 9])
    assert found.rings_gb_per_s > 0 and found.rings_limit is not None
    assert found.levels_gb_per_s == 0.0 and found.levels_limit is None


def test_one_gpu_and_kinds_of_links():
    assert nccl_bandwidth.nccl_bandwidth(preset("dgx-1v"), [3]) == NcclBandwidth(math.inf, None)
    assert nccl_bandwidth.nccl_bandwidth(preset("dgx-a100")).rings_limit is LinkKind.NVLINK
    assert nccl_bandwidth.nccl_bandwidth(preset("8xa100-pcie")).rings_limit is LinkKind.SOCKET
    assert nccl_bandwidth.nccl_bandwidth(cluster(preset("4xpcie"), 2)).rings_limit is LinkKind.NETWORK


def test_rails_join_gpus_that_share_a_rails_switch():
    machine = cluster(preset("dgx-h100"), 3)
    routes = nccl_bandwidth.Routes(machine)
    chains, _ = orders.host_chains(machine, machine["gpus"], routes)
    rails = nccl_bandwidth._rails(chains, routes)
    assert sorted(gpu for rail in rails for gpu in rail) == machine["gpus"]
    for rail in rails:
        assert [machine.gpu(gpu).host for gpu in rail] == [0, 1, 2]
        edges = {edge for pair in pairwise(rail) for edge, _ in routes.route(*pair)}
        assert not any("spine" in edge for edge in edges)
