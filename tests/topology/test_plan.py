"""Plans: what they must reach on each machine, that they are the same every time, and what they refuse."""

import math
import subprocess
import sys
from dataclasses import replace
from itertools import permutations

import pytest

from flagcx.algorithms.candidate import Candidate
from flagcx.errors import TopologyError
from flagcx.schedule.model import Send
from flagcx.topology import (
    DeviceKind,
    LinkKind,
    best_order,
    cluster,
    make_plan,
    nccl_xml,
    nccl_xml_write,
    order_bandwidth,
    plan_rings,
    preset,
    preset_names,
    read,
)
from flagcx.topology.loads import add_loads
from flagcx.topology.plan import crossings
from flagcx.topology.routes import Routes
from tests.speed import within
from tests.topology.graphs import random_machine
from tests.topology.machines import CLASSLESS, FIXTURES, REFUSED, shared_files

READABLE = [
    path for path in sorted(FIXTURES.iterdir()) if path.name not in ("graph_file.xml", "cut_short.xml")
]


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
    assert plan.bandwidth_gb_per_s <= plan.bound_gb_per_s * (1 + 1e-6)
    if plan.exchange is not None:
        loads = {}
        add_loads(loads, routes, permutations(gpus, 2), plan.bandwidth_gb_per_s * 2 / len(gpus))
        for (a, b), load in loads.items():
            assert load <= machine.links_of(a)[b].bandwidth_gb_per_s * (1 + 1e-6), (a, b)
    assert plan.bandwidth_gb_per_s >= order_bandwidth(machine, gpus) * (1 - 1e-6)


def test_the_check_rejects_plans_that_are_wrong():
    """Each of these faults in a good plan must be seen by ``check``, or the tests below mean nothing."""
    machine = preset("dgx-1v")
    plan = make_plan(machine)
    ring, back = plan.rings
    faults = [
        replace(plan, rings=(replace(ring, bandwidth_gb_per_s=ring.bandwidth_gb_per_s * 1.1), back)),
        replace(plan, rings=(replace(ring, order=ring.order[:-1]), back)),
        replace(plan, rings=(replace(ring, order=(0, *ring.order[:-1])), back)),
        replace(plan, rings=(replace(ring, share=0.4), back)),
        replace(plan, rings=(replace(ring, order=(0, 2, 4, 6, 1, 3, 5, 7)), back)),
        replace(plan, rings=(ring, ring)),
        replace(plan, bound_gb_per_s=plan.bandwidth_gb_per_s * 0.99),
        replace(plan, rings=(replace(ring, bandwidth_gb_per_s=1.0), replace(back, bandwidth_gb_per_s=1.0))),
    ]
    check(machine, plan)
    for fault in faults:
        with pytest.raises(AssertionError):
            check(machine, fault)


def carried(machine, plan):
    """GB/s of the schedule that the plan names, from what its sends put on each link."""
    size = len(plan.gpus)
    order = tuple(plan.gpus.index(gpu) for gpu in plan.order)
    schedule = Candidate.parse(plan.method).along(order).build("allreduce", size)
    routes, loads = Routes(machine), {}
    for rank in range(size):
        for step in schedule.program(rank).steps:
            for send in (move for move in step.transfers if isinstance(move, Send)):
                hop = (plan.gpus[rank], plan.gpus[send.peer])
                add_loads(loads, routes, [hop], len(send.src) / schedule.chunks)
    return 1 / max(load / machine.links_of(a)[b].bandwidth_gb_per_s for (a, b), load in loads.items())


@pytest.mark.parametrize("name", [name for name in preset_names() if name != "gh200"])  # one GPU
def test_the_plan_is_what_runs(name):
    machine = preset(name)
    for gpus in (None, range(3), (3, 0, 2, 1)):
        plan = make_plan(machine, gpus)
        check(machine, plan)
        assert carried(machine, plan) == pytest.approx(plan.bandwidth_gb_per_s)


#: Presets whose links no single ring fills, as GPUs are joined one by one, and one with a single GPU.
UNEVEN = ("dgx-1v", "8xa100-pcie", "8xmi300x", "8xmi250x", "gh200")


def test_a_mesh_is_planned_as_an_exchange_of_all_with_all():
    mesh = make_plan(preset("8xmi300x"))
    assert mesh.method == "two_shot" and mesh.ratio == pytest.approx(1.0) and mesh.why == ""
    assert mesh.bandwidth_gb_per_s == pytest.approx(7 * 48.0 * 8 / 14)
    assert sum(ring.bandwidth_gb_per_s for ring in mesh.rings) == pytest.approx(2 * 48.0 * 8 / 14)
    check(preset("8xmi300x"), mesh)
    with pytest.raises(AssertionError):
        check(preset("8xmi300x"), replace(mesh, exchange=mesh.exchange._replace(bandwidth_gb_per_s=193.0)))
    part = make_plan(preset("8xmi250x"), [0, 1, 2, 3])
    assert part.exchange is None, "not every two of these GPUs are joined"
    two = make_plan(preset("8xmi300x"), [0, 5])
    assert two.exchange is None and two.method == "ring", "two exchange by a ring as well"


@pytest.mark.parametrize("name", [name for name in preset_names() if name not in UNEVEN])
def test_presets_reach_the_bound(name):
    plan = make_plan(preset(name))
    assert plan.ratio == pytest.approx(1.0) and plan.why == "" and plan.method == "ring"


def test_an_nvl72_is_planned_fast():
    machine = nccl_xml.parse(nccl_xml_write.format_xml(preset("gb200-nvl72")))
    assert (len(machine.gpus), len(machine["numa_nodes"]), len(machine["nics"])) == (72, 36, 72)
    make_plan(preset("dgx-1v"))  # imports what it needs
    with within(2):
        plan = make_plan(machine)
    assert plan.exact and plan.ratio == pytest.approx(1.0)
    check(machine, plan)


@pytest.mark.parametrize("path", READABLE, ids=lambda path: path.name)
def test_fixtures(path):
    machine = read(path)
    if machine.gpus:
        check(machine, make_plan(machine))


@pytest.mark.parametrize(
    "path",
    [
        *shared_files("nccl-topology-xml", "*.xml", without=REFUSED + CLASSLESS),
        *shared_files("nvidia-smi-topo", "*.txt"),
    ],
)
def test_real_machines(path):
    machine = read(path)
    with within(5):  # it takes well under a second
        plan = make_plan(machine)
    check(machine, plan)
    if any(device.kind is DeviceKind.NVSWITCH for device in machine.devices()):
        assert plan.ratio == pytest.approx(1.0)
    assert bool(plan.why) == (plan.ratio < 0.9)


def test_the_cube_mesh_plans_over_nvlink_alone_and_both_ways_round():
    machine = preset("dgx-1v")
    plan = make_plan(machine)
    assert plan.method == "ring|ring" and plan.rings[1].order == (0, 4, 7, 6, 5, 1, 2, 3)
    for ring in plan.rings:
        assert crossings(machine, ring.order, LinkKind.PCIE) == 0
    assert plan.bandwidth_gb_per_s == pytest.approx(80 * 8 / 14)
    for ring in plan.rings:
        hops = [(f"gpu{a}", f"gpu{b}") for a, b in zip(ring.order, [*ring.order[1:], 0], strict=True)]
        assert (ring.bottleneck.a, ring.bottleneck.b) in hops


def test_bridged_pairs_cross_pcie_as_seldom_as_can_be():
    for machine in (preset("8xa100-pcie"), read(FIXTURES / "pairs_tabs_8.txt")):
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


def test_the_reason_for_staying_below_the_bound_names_the_slowest_hop():
    plan = make_plan(preset("8xa100-pcie"))
    assert plan.method == "ring" and plan.bound_gb_per_s == pytest.approx(16.0)
    assert plan.bandwidth_gb_per_s == pytest.approx(16 * 8 / 14)
    assert plan.why == (
        "each hop of a ring carries 1.75 of the ring's part of the message, and all wait for "
        "cpu0 -> cpu1 (socket, 16 GB/s, loaded 1 x); in the bound all links share the work"
    )


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
    assert plan.order == (3,) and plan.method == "ring" and plan.ratio == 1.0
    assert plan.bandwidth_gb_per_s == math.inf
    assert plan_rings(preset("dgx-1v"), [3])[0].order == (3,)


@pytest.mark.parametrize("seed", range(10))
def test_random_machines(seed):
    machine = random_machine(seed + 100, 2 + seed % 7)
    plan = make_plan(machine)
    check(machine, plan)
    assert carried(machine, plan) == pytest.approx(plan.bandwidth_gb_per_s)
    assert plan.exact and best_order(machine) == plan.order


def test_sixteen_gpus_in_a_second_each():
    for seed in range(2):
        machine = random_machine(seed, 16, mesh=0.25)
        with within(5):  # it takes about half a second
            plan = make_plan(machine)
        check(machine, plan)
        assert not plan.exact


def test_the_plan_is_the_same_in_every_process():
    code = (
        "from flagcx.topology import make_plan, preset\n"
        "from flagcx.topology.nccl_bandwidth import nccl_bandwidth\n"
        "for name in ('dgx-1v', '8xa100-pcie'):\n"
        "    print(make_plan(preset(name)), nccl_bandwidth(preset(name)))"
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
    check(machine, plan)
    assert [machine.gpu(gpu).host for gpu in plan.order] == [gpu.host for gpu in machine.gpus]
    for ring in plan.rings:
        assert crossings(machine, ring.order, LinkKind.NETWORK) == hosts
    assert bool(plan.why) == (plan.ratio < 0.9)


def test_a_cluster_carries_what_its_plan_says():
    machine = cluster(preset("dgx-a100"), 2)
    for gpus in (None, [0, 1, 2, 8, 9]):
        plan = make_plan(machine, gpus)
        check(machine, plan)
        assert carried(machine, plan) == pytest.approx(plan.bandwidth_gb_per_s)


def test_hosts_below_one_leaf_stay_together():
    machine = cluster(preset("4xpcie"), 4, hosts_per_leaf=2)
    gpus = [12, 0, 4, 8]
    hosts = [machine.gpu(gpu).host for gpu in make_plan(machine, gpus).order]
    assert hosts == [0, 1, 2, 3]


@pytest.mark.exhaustive
def test_a_thousand_hosts_in_seconds():
    machine = cluster(preset("dgx-h100"), 1024)
    with within(10):
        plan = make_plan(machine)
    assert plan.bandwidth_gb_per_s > 0 and len(plan.order) == 8192


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
    with pytest.raises(TopologyError, match="gpu0 has no NIC that is joined to the network"):
        best_order(cut)
    split = [replace(link, b="other") if link.a == "host1/nic0" else link for link in machine.links]
    other = replace(machine.device("leaf0.0"), id="other", index=9)
    with pytest.raises(TopologyError, match="no switch joins nic0 and host1/nic0"):
        make_plan(Topology([*machine.devices(), other], split))


def test_no_gpu_is_refused():
    with pytest.raises(TopologyError, match="has no GPU to plan over"):
        make_plan(read(FIXTURES / "classless.xml"))
