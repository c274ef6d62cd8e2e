"""Known machines, and clusters of them."""

import pytest

from flagcx.errors import TopologyError
from flagcx.topology import DeviceKind, LinkKind, cluster, matrix, preset, preset_names


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
        ("4xpcie", 4, 0.0, 1),
    ],
)
def test_what_each_machine_has(name, gpus, fabric_gb_per_s, nics):
    machine = preset(name)
    assert len(machine.gpus) == gpus and len(machine.devices(DeviceKind.NIC)) == nics
    for gpu in machine.gpus:
        own = machine.links_of(gpu.id).values()
        total = sum(link.bandwidth_gb_per_s for link in own if link.kind is LinkKind.NVLINK)
        assert total == pytest.approx(fabric_gb_per_s)


def test_every_preset_is_listed_above():
    assert len(preset_names()) == 8


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
