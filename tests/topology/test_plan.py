"""Plans: what they must reach on each machine, that they are the same every time, and what they refuse."""

import itertools
import math
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from flagcx.errors import TopologyError
from flagcx.topology import (
    LinkKind,
    best_order,
    cluster,
    make_plan,
    nccl_xml,
    nvidia_smi,
    order_bandwidth,
    plan_rings,
    plan_trees,
    preset,
    preset_names,
)
from flagcx.topology.plan import crossings
from flagcx.topology.routes import Routes, add_loads
from flagcx.topology.trees import binary_parent, double_binary
from tests.topology.graphs import random_machine
from tests.topology.machines import CLASSLESS, FIXTURES, REFUSED, shared_files

READABLE = [
    path for path in sorted(FIXTURES.iterdir()) if path.name not in ("graph_file.xml", "cut_short.xml")
]


def read(path):
    return nccl_xml.read(path) if path.suffix == ".xml" else nvidia_smi.read(path)


def check(machine, plan):
    """What holds of every plan: its parts are whole, fit the links, and add up."""
    gpus = sorted(plan.gpus)
    assert sorted(plan.order) == gpus
    assert sum(ring.share for ring in plan.rings) == pytest.approx(1.0)
    routes, loads = Routes(machine), {}
    for ring in plan.rings:
        assert sorted(ring.order) == gpus
        hops = zip(ring.order, [*ring.order[1:], ring.order[0]], strict=True)
        rate = ring.bandwidth_gb_per_s * 2 * (len(gpus) - 1) / len(gpus)
        add_loads(loads, routes, hops if len(gpus) > 1 else (), rate)
    for (a, b), load in loads.items():
        assert load <= machine.links_of(a)[b].bandwidth_gb_per_s * (1 + 1e-6), (a, b)
    used = {}
    for tree in plan.forest:
        assert sorted([tree.root, *(child for child, _ in tree.parents)]) == gpus
        both = [hop for pair in tree.parents for hop in (pair, pair[::-1])]
        add_loads(used, routes, both, tree.bandwidth_gb_per_s)
    for (a, b), load in used.items():
        assert load <= machine.links_of(a)[b].bandwidth_gb_per_s * (1 + 1e-6), (a, b)
    assert plan.bandwidth_gb_per_s <= plan.bound_gb_per_s * (1 + 1e-6)
    assert plan.bandwidth_gb_per_s >= order_bandwidth(machine, gpus) * (1 - 1e-6)


def test_the_check_rejects_plans_that_are_wrong():
    """Each of these faults in a good plan must be seen by ``check``, or the tests below mean nothing."""
    machine = preset("8xa100-pcie")
    plan = make_plan(machine)
    ring, tree = plan.rings[0], plan.forest[0]
    faults = [
        replace(plan, rings=(replace(ring, bandwidth_gb_per_s=ring.bandwidth_gb_per_s * 1.1),)),
        replace(plan, rings=(replace(ring, order=ring.order[:-1]),)),
        replace(plan, rings=(replace(ring, share=0.9),)),
        replace(plan, rings=(replace(ring, order=(0, 2, 4, 6, 1, 3, 5, 7)),)),
        replace(plan, order=(0, 0, *plan.order[2:])),
        replace(plan, forest=(replace(tree, parents=tree.parents[1:]), *plan.forest[1:])),
        replace(plan, forest=(replace(tree, bandwidth_gb_per_s=12.0), *plan.forest[1:])),
        replace(plan, bandwidth_gb_per_s=plan.bound_gb_per_s * 1.01),
        replace(plan, bandwidth_gb_per_s=1.0),
    ]
    check(machine, plan)
    for fault in faults:
        with pytest.raises(AssertionError):
            check(machine, fault)


@pytest.mark.parametrize("name", preset_names())
def test_presets(name):
    machine = preset(name)
    plan = make_plan(machine)
    check(machine, plan)
    assert plan.ratio >= 0.9


@pytest.mark.parametrize("path", READABLE, ids=lambda path: path.name)
def test_fixtures(path):
    machine = read(path)
    if machine.gpus:
        plan = make_plan(machine)
        check(machine, plan)
        assert plan.bandwidth_gb_per_s >= 0.9 * plan.reachable_gb_per_s


@pytest.mark.parametrize(
    "path",
    [
        *shared_files("nccl-topology-xml", "*.xml", without=REFUSED + CLASSLESS),
        *shared_files("nvidia-smi-topo", "*.txt"),
    ],
)
def test_real_machines(path):
    machine = read(path)
    start = time.perf_counter()
    plan = make_plan(machine)
    took = time.perf_counter() - start
    check(machine, plan)
    assert plan.bandwidth_gb_per_s >= 0.9 * plan.reachable_gb_per_s
    if any(link.kind is LinkKind.NVLINK for link in machine.links):
        assert plan.ratio >= 0.9
    if plan.rings_gb_per_s < 0.9 * plan.bound_gb_per_s:
        assert plan.why
    assert took < 5, "planning takes well under a second on a free machine"


def test_the_cube_mesh_plans_over_nvlink_alone_with_several_rings():
    machine = preset("dgx-1v")
    plan = make_plan(machine)
    assert len(plan.rings) == 6 and plan.method == "rings"
    for ring in plan.rings:
        assert crossings(machine, ring.order, LinkKind.PCIE) == 0
    assert plan.bandwidth_gb_per_s == pytest.approx(120 * 8 / 14)


def test_bridged_pairs_cross_pcie_as_seldom_as_can_be():
    for machine in (preset("8xa100-pcie"), nvidia_smi.read(FIXTURES / "pairs_tabs_8.txt")):
        shuffled = (0, 4, 2, 6, 1, 5, 3, 7)
        for gpus in (None, shuffled):
            order = best_order(machine, gpus)
            assert crossings(machine, order, LinkKind.PCIE) == 4
            assert crossings(machine, order, LinkKind.SOCKET) == 2


def test_numa_nodes_are_entered_once_each_and_sockets_crossed_twice():
    """Four NUMA nodes, 0 and 1 of one socket, 2 and 3 of the other: sockets are crossed twice."""
    text = "".join(
        f'<cpu numaid="{numa}" arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49">'
        + "".join(
            f'<pci busid="0000:{numa}{slot}:00.0" class="0x030000" link_speed="16 GT/s" link_width="16">'
            f'<gpu dev="{dev}" sm="89"/></pci>'
            for slot, dev in enumerate(devs)
        )
        + "</cpu>"
        for numa, devs in ((2, (0, 5)), (0, (1, 7)), (3, (2, 4)), (1, (3, 6)))
    )
    machine = nccl_xml.parse(f'<system version="1">{text}</system>')
    order = best_order(machine)
    assert crossings(machine, order, LinkKind.SOCKET) == 4
    sockets = [machine["numa_node"][gpu] in ("cpu0", "cpu1") for gpu in order]
    assert sum(a != b for a, b in zip(sockets, [sockets[-1], *sockets], strict=False)) == 2


def test_trees_are_taken_where_every_ring_must_cross_a_slow_link():
    plan = make_plan(preset("8xa100-pcie"))
    assert plan.method == "trees" and plan.ratio == pytest.approx(1.0, rel=0.03)
    assert plan.rings_gb_per_s == pytest.approx(16 * 8 / 14)
    assert "every ring crosses between GPUs [0, 1, 2, 3] and the rest (16 GB/s)" in plan.why
    assert sum(tree.share for tree in plan.forest) == pytest.approx(1.0)


def test_the_gain_over_the_plain_order():
    machine = preset("dgx-1v")
    assert order_bandwidth(machine, range(8)) < 0.1 * make_plan(machine).bandwidth_gb_per_s


def test_any_subset_and_any_order_of_gpus():
    machine = preset("dgx-1v")
    for gpus in ([5], [6, 1], [7, 0, 3], [4, 2, 1, 5], [6, 5, 4, 3, 2, 1, 0]):
        plan = make_plan(machine, gpus)
        check(machine, plan)
        assert plan.gpus == tuple(gpus) and plan.order[0] == gpus[0]


def test_one_gpu():
    plan = make_plan(preset("dgx-1v"), [3])
    assert plan.order == (3,) and plan.trees == () and plan.ratio == 1.0
    assert plan.bandwidth_gb_per_s == math.inf
    assert plan_rings(preset("dgx-1v"), [3])[0].order == (3,)


@pytest.mark.parametrize("seed", range(10))
def test_random_machines(seed):
    machine = random_machine(seed + 100, 2 + seed % 7)
    plan = make_plan(machine)
    check(machine, plan)
    assert plan.bandwidth_gb_per_s >= 0.9 * plan.reachable_gb_per_s


def test_sixteen_gpus_in_a_second_each():
    for seed in range(2):
        machine = random_machine(seed, 16, mesh=0.25)
        start = time.perf_counter()
        plan = make_plan(machine)
        took = time.perf_counter() - start
        check(machine, plan)
        assert plan.bandwidth_gb_per_s >= 0.9 * plan.reachable_gb_per_s
        assert took < 5, "about half a second on a free machine"


def test_the_plan_is_the_same_in_every_process():
    code = (
        "from flagcx.topology import make_plan, preset\n"
        "plan = make_plan(preset('dgx-1v')); print(plan.rings, plan.trees)\n"
        "print(make_plan(preset('8xa100-pcie')).forest)"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(runs) == 1


# -- several hosts


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-a100", "dgx-1v", "4xpcie"])
@pytest.mark.parametrize("hosts", [2, 3, 8])
def test_clusters(name, hosts):
    machine = cluster(preset(name), hosts)
    plan = make_plan(machine)
    assert plan.ratio >= 0.9 and plan.method == "hierarchy"
    assert sorted(plan.order) == list(range(len(machine.gpus)))
    levels = plan.hierarchy
    assert sorted(gpu for rail in levels.rails for gpu in rail) == list(range(len(machine.gpus)))
    for rail in levels.rails:
        assert [machine.gpu(gpu).host for gpu in rail] == list(range(hosts))
    for ring in plan.rings:
        assert sorted(ring.order) == list(range(len(machine.gpus)))
        assert crossings(machine, ring.order, LinkKind.NETWORK) == hosts


def test_rails_join_gpus_that_share_a_rails_switch():
    machine = cluster(preset("dgx-h100"), 3)
    routes = Routes(machine)
    for rail in make_plan(machine).hierarchy.rails:
        edges = {edge for a, b in itertools.pairwise(rail) for edge, _ in routes.route(a, b)}
        assert not any("spine" in edge for edge in edges)


def test_hosts_without_nvlink_between_sockets_use_trees():
    plan = make_plan(cluster(preset("8xa100-pcie"), 4))
    assert plan.hierarchy.local == "trees" and len(plan.hierarchy.rails) == 2
    assert plan.bandwidth_gb_per_s > 1.05 * plan.rings_gb_per_s
    assert plan.ratio > 0.8
    small = make_plan(cluster(preset("8xa100-pcie"), 2))
    assert small.method == "trees" and small.ratio > 0.95


def test_unequal_hosts_have_no_levels_but_rings_and_trees():
    machine = cluster(preset("dgx-a100"), 2)
    plan = make_plan(machine, [0, 1, 2, 8, 9])
    check(machine, plan)
    assert plan.hierarchy is None and plan.method == "trees" and plan.ratio > 0.9
    large = cluster(preset("4xpcie"), 9)
    gpus = [gpu for gpu in range(36) if gpu != 5]
    many = make_plan(large, gpus)
    assert many.hierarchy is None and many.method == "rings"
    assert sorted(many.order) == gpus


def test_hosts_below_one_leaf_stay_together():
    machine = cluster(preset("4xpcie"), 4, hosts_per_leaf=2)
    gpus = [12, 0, 4, 8]
    hosts = [machine.gpu(gpu).host for gpu in make_plan(machine, gpus).order]
    assert hosts == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_thousand_hosts_in_seconds():
    machine = cluster(preset("dgx-h100"), 1024)
    start = time.perf_counter()
    plan = make_plan(machine)
    took = time.perf_counter() - start
    assert plan.ratio >= 0.95 and len(plan.order) == 8192
    assert took < 10


# -- trees


def test_the_binary_tree_is_a_tree_of_little_depth():
    for count in range(1, 70):
        parents = [binary_parent(rank, count) for rank in range(count)]
        assert parents[0] is None
        for rank in range(1, count):
            steps = 0
            while rank:
                rank, steps = parents[rank], steps + 1
            assert steps <= count.bit_length() + 1


def test_no_rank_is_inside_both_trees_but_an_odd_root():
    for count in range(2, 40):
        inside = [{parent for _, parent in tree} for tree in double_binary(range(count))]
        both = inside[0] & inside[1]
        assert both <= ({0} if count % 2 else set())
        for tree in double_binary(range(count)):
            assert len(tree) == count - 1 and len({child for child, _ in tree}) == count - 1


def test_planned_trees_span_and_their_bandwidth_is_honest():
    for machine in (preset("dgx-a100"), preset("dgx-1v"), cluster(preset("dgx-h100"), 5)):
        pair = plan_trees(machine)
        routes, loads = Routes(machine), {}
        for tree in pair:
            assert len(tree.parents) == len(machine.gpus) - 1
            assert sorted([tree.root, *(child for child, _ in tree.parents)]) == machine["gpus"]
            both = [hop for edge in tree.parents for hop in (edge, edge[::-1])]
            add_loads(loads, routes, both, tree.bandwidth_gb_per_s)
        assert max(
            load / machine.links_of(a)[b].bandwidth_gb_per_s for (a, b), load in loads.items()
        ) == pytest.approx(1.0)
    assert max(tree.depth for tree in plan_trees(cluster(preset("dgx-h100"), 5))) <= 7 + 4


# -- refusals


@pytest.mark.parametrize(
    ("gpus", "message"),
    [([], "gpus is empty"), ([0, 0], "a GPU is named twice in \\(0, 0\\)"), ([0, 11], "no GPU 11 in")],
)
def test_bad_gpus_are_refused(gpus, message):
    with pytest.raises(TopologyError, match=message):
        make_plan(preset("dgx-1v"), gpus)


def test_hosts_that_are_not_joined_are_refused():
    from flagcx.topology import Topology

    machine = cluster(preset("4xpcie"), 2)
    cut = Topology(machine.devices(), [link for link in machine.links if link.kind is not LinkKind.NETWORK])
    with pytest.raises(TopologyError, match="gpu0 has no NIC that is joined to the network"):
        make_plan(cut)
    split = [replace(link, b="other") if link.a == "host1/nic0" else link for link in machine.links]
    other = replace(machine.device("leaf0.0"), id="other", index=9)
    with pytest.raises(TopologyError, match="no switch joins nic0 and host1/nic0"):
        make_plan(Topology([*machine.devices(), other], split))


def test_no_gpu_is_refused():
    with pytest.raises(TopologyError, match="has no GPU to plan over"):
        make_plan(nccl_xml.read(FIXTURES / "classless.xml"))
