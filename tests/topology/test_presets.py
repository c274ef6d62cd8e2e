"""Known machines, and clusters of them."""

import pytest

from flagcx.errors import TopologyError
from flagcx.topology import (
    DeviceKind,
    LinkKind,
    bound,
    cluster,
    make_plan,
    matrix,
    nccl_xml,
    nccl_xml_write,
    nvidia_smi,
    preset,
    preset_names,
)


@pytest.mark.parametrize(
    ("name", "gpus", "fabric_gb_per_s", "nics"),
    [
        ("8xa100-pcie", 8, 240.0, 2),
        ("dgx-1v", 8, 120.0, 4),
        ("dgx-2", 16, 120.0, 8),
        ("dgx-a100", 8, 240.0, 8),
        ("dgx-h100", 8, 370.8, 8),
        ("dgx-h200", 8, 370.8, 8),
        ("hgx-b200", 8, 721.8, 8),
        ("hgx-b300", 8, 721.8, 8),
        ("gb200-nvl72", 72, 721.8, 72),
        ("gb300-nvl72", 72, 721.8, 72),
        ("gh200", 1, 0.0, 1),
        ("8xmi300x", 8, 7 * 48.0, 8),
        ("8xmi250x", 8, None, 4),
        ("4xpcie", 4, 0.0, 1),
    ],
)
def test_what_each_machine_has(name, gpus, fabric_gb_per_s, nics):
    machine = preset(name)
    assert len(machine.gpus) == gpus and len(machine.devices(DeviceKind.NIC)) == nics
    for gpu in machine.gpus:
        own = machine.links_of(gpu.id).values()
        total = sum(link.bandwidth_gb_per_s for link in own if link.kind.is_gpu_fabric)
        assert fabric_gb_per_s is None or total == pytest.approx(fabric_gb_per_s)


def test_every_preset_is_listed_above():
    assert len(preset_names()) == 14


def test_the_boards_of_a_dgx_2_are_joined_switch_by_switch():
    machine = preset("dgx-2")
    assert len(machine.devices(DeviceKind.NVSWITCH)) == 12
    assert set(matrix(machine)["GPU0"][f"GPU{gpu}"] for gpu in range(1, 16)) == {"NV6"}
    assert machine.link("nvswitch2", "nvswitch8").bandwidth_gb_per_s == 8 * 20.0
    assert machine.link("gpu3", "nvswitch6") is None and machine.link("gpu12", "nvswitch6").count == 1
    assert bound(machine).bandwidth_gb_per_s == pytest.approx(64.0)


def test_the_numa_nodes_of_a_dgx_a100():
    """As its owners' nvidia-smi shows them (NVIDIA/nccl issue 1505)."""
    machine = preset("dgx-a100")
    assert len(machine["numa_nodes"]) == 8
    assert [machine["numa_node"][gpu] for gpu in range(8)] == [f"cpu{n}" for n in (3, 3, 1, 1, 7, 7, 5, 5)]


def test_xgmi_links_are_those_of_rccls_models():
    """``topo_8p_90a.xml``, and the numbers of links of ``topo_16p1h_vm.xml`` (ROCm/rccl tools/topo_expl)."""
    neighbours = {0: (1, 2, 6), 1: (0, 3, 5), 2: (0, 3, 4), 3: (1, 2, 7)}
    neighbours |= {4: (2, 5, 6), 5: (1, 4, 7), 6: (0, 4, 7), 7: (3, 5, 6)}
    machine = preset("8xmi250x")
    assert {gpu: tuple(sorted(peers)) for gpu, peers in machine["nvlink_peers"].items()} == neighbours
    assert machine.link("gpu0", "gpu1").count == 4 and machine.link("gpu0", "gpu6").count == 2
    cells = matrix(preset("8xmi300x"))
    assert all(cells[f"GPU{a}"][f"GPU{b}"] == "XGMI1" for a in range(8) for b in range(8) if a != b)


def test_a_rack_is_one_domain_of_18_hosts_and_can_be_repeated():
    rack = preset("gb200-nvl72")
    assert len(rack.hosts) == 18 and rack.link("host17/gpu71", "nvswitch17").count == 1
    assert rack["numa_node"][71] == "host17/cpu1"
    two = cluster(rack, 2)
    assert (len(two.gpus), len(two.hosts), len(two.devices(DeviceKind.NVSWITCH))) == (144, 36, 36)
    assert two.link("host20/gpu80", "domain18/nvswitch0") is not None
    assert len(two.devices(DeviceKind.NETWORK_SWITCH)) == 5
    plan = make_plan(two)
    assert plan.order == tuple(range(144)) and plan.ratio <= 1


def test_a_machine_without_nics_gets_a_network_that_is_named():
    pair = nvidia_smi.parse("GPU0 GPU1\nGPU0 X PHB\nGPU1 PHB X\n")
    with pytest.raises(TopologyError, match=r"has 0 NICs .* or network_gb_per_s \(--network-gb-per-s on"):
        cluster(pair, 2)
    joined = cluster(pair, 2, network_gb_per_s=12.5)
    assert any("names no NIC; each host is taken to have one of 12.5 GB/s" in note for note in joined.notes)
    assert joined.link("host1/network", "leaf0.0").bandwidth_gb_per_s == 12.5
    assert make_plan(joined).bandwidth_gb_per_s > 0
    unknown = nvidia_smi.parse("GPU0 GPU1 NIC0\nGPU0 X PHB PIX\nGPU1 PHB X PHB\nNIC0 PIX PHB X\n")
    assert make_plan(cluster(unknown, 2, network_gb_per_s=25.0)).bandwidth_gb_per_s > 0
    with pytest.raises(TopologyError, match="network_gb_per_s is -1; expected a speed in GB/s above 0"):
        cluster(pair, 2, network_gb_per_s=-1)


def test_boards_of_a_file_are_joined():
    again = nccl_xml.parse(nccl_xml_write.format_xml(preset("dgx-2")))
    assert any("groups of GPUs have NVSwitches of their own" in note for note in again.notes)
    assert bound(again).bandwidth_gb_per_s == pytest.approx(64.0)


def test_the_cube_mesh_has_six_links_a_gpu():
    machine = preset("dgx-1v")
    for gpu in machine.gpus:
        own = machine.links_of(gpu.id).values()
        assert sum(link.count for link in own if link.kind is LinkKind.NVLINK) == 6


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(TopologyError, match="no preset 'dgx'; there are 8xa100-pcie, dgx-1v"):
        preset("dgx")


def test_a_cluster_has_rails_and_a_fat_tree():
    pair = cluster(preset("dgx-h100"), 40, hosts_per_leaf=32)
    assert len(pair.gpus) == 320 and pair.hosts == tuple(range(40))
    assert [gpu.index for gpu in pair.gpus] == list(range(320))
    assert len(pair.devices(DeviceKind.NETWORK_SWITCH)) == 2 * 8 + 1
    assert pair.link("nic3", "leaf0.3").bandwidth_gb_per_s == 50.0
    assert pair.link("host39/nic3", "leaf1.3") is not None
    assert pair.link("leaf0.3", "spine").bandwidth_gb_per_s == 32 * 50.0
    assert pair.link("leaf1.3", "spine").bandwidth_gb_per_s == 8 * 50.0
    half = cluster(preset("dgx-h100"), 40, oversubscription=2.0)
    assert half.link("leaf0.3", "spine").bandwidth_gb_per_s == 16 * 50.0


def test_a_cluster_of_one_is_the_machine_and_nics_can_be_fewer():
    assert cluster(preset("dgx-1v"), 1) == preset("dgx-1v")
    assert len(cluster(preset("dgx-1v"), 2, nics=1).devices(DeviceKind.NETWORK_SWITCH)) == 1
    assert matrix(cluster(preset("dgx-1v"), 2))["GPU0"]["GPU8"] == "NET"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": 0}, "hosts is 0; expected 1 to 65536"),
        ({"hosts": 2, "nics": 5}, "has 4 NICs .* 5 were asked for .* expected 1 to 4"),
        ({"hosts": 2, "nics": 0}, "0 were asked for"),
        ({"hosts": 2, "hosts_per_leaf": 0}, "hosts_per_leaf is 0"),
        ({"hosts": 2, "oversubscription": 0.0}, "oversubscription 0.0; both must be above 0"),
    ],
)
def test_bad_clusters_are_refused(arguments, message):
    with pytest.raises(TopologyError, match=message):
        cluster(preset("dgx-1v"), **arguments)


def test_a_cluster_of_clusters_is_refused():
    with pytest.raises(TopologyError, match=r"built of one machine; got .* which has 2 hosts"):
        cluster(cluster(preset("dgx-1v"), 2), 2)
