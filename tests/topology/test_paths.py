"""Classes, widest and shortest paths, and what is nearest."""

import pytest

from flagcx.errors import TopologyError
from flagcx.topology import (
    Device,
    DeviceKind,
    Link,
    LinkKind,
    Topology,
    cluster,
    nearest_nic,
    path_class,
    preset,
    shortest,
    widest,
)


@pytest.fixture(scope="module")
def tree():
    """One NUMA node with two roots; below the first a switch, and below that two further switches."""
    kinds = {
        "cpu0": DeviceKind.CPU,
        "cpu1": DeviceKind.CPU,
        "root0": DeviceKind.HOST_BRIDGE,
        "root1": DeviceKind.HOST_BRIDGE,
        "upper": DeviceKind.PCIE_SWITCH,
        "left": DeviceKind.PCIE_SWITCH,
        "right": DeviceKind.PCIE_SWITCH,
    }
    devices = [Device(id, kind, number) for number, (id, kind) in enumerate(kinds.items())]
    devices += [Device(f"gpu{number}", DeviceKind.GPU, number) for number in range(6)]
    edges = [
        ("root0", "cpu0"), ("root1", "cpu0"), ("upper", "root0"), ("left", "upper"), ("right", "upper"),
        ("gpu0", "left"), ("gpu1", "left"), ("gpu2", "right"), ("gpu3", "root0"), ("gpu4", "root1"),
        ("gpu5", "cpu1"),
    ]  # fmt: skip
    links = [Link(a, b, LinkKind.PCIE, 20.0 if "left" in (a, b) else 24.0, 0.5) for a, b in edges]
    return Topology(devices, [*links, Link("cpu0", "cpu1", LinkKind.SOCKET, 9.0, 0.7)])


@pytest.mark.parametrize(
    ("other", "expected"),
    [("gpu0", "X"), ("gpu1", "PIX"), ("gpu2", "PXB"), ("gpu3", "PHB"), ("gpu4", "NODE"), ("gpu5", "SYS")],
)
def test_every_pcie_class(tree, other, expected):
    assert path_class(tree, "gpu0", other) == expected
    assert path_class(tree, other, "gpu0") == expected


def test_nvlink_classes_and_through_one_gpu():
    cube = preset("dgx-1v")
    assert path_class(cube, "gpu0", "gpu3") == "NV2"
    assert path_class(cube, "gpu0", "gpu5") == "SYS"
    assert path_class(cube, "gpu0", "gpu5", through_gpus=True) == "NVB"
    assert path_class(preset("dgx-a100"), "gpu0", "gpu7") == "NV12"
    assert path_class(preset("hgx-b200"), "gpu2", "gpu5") == "NV18"


def test_between_hosts_is_net_and_without_a_network_is_none():
    pair = cluster(preset("dgx-a100"), 2)
    assert path_class(pair, "gpu0", "host1/gpu8") == "NET"
    lonely = Topology([Device("gpu0", DeviceKind.GPU, 0), Device("gpu1", DeviceKind.GPU, 1, 1)], [])
    assert path_class(lonely, "gpu0", "gpu1") == "DIS"
    with pytest.raises(TopologyError, match="no path from gpu0 to gpu1"):
        shortest(lonely, "gpu0", "gpu1")


def test_a_path_tells_its_narrowest_link_and_latency(tree):
    path = shortest(tree, "gpu0", "gpu5")
    assert path.devices == ("gpu0", "left", "upper", "root0", "cpu0", "cpu1", "gpu5")
    assert path.bandwidth_gb_per_s == 9.0 and path.narrowest.kind is LinkKind.SOCKET
    assert path.latency_us == pytest.approx(5 * 0.5 + 0.7)
    assert path.path_class == "SYS"


def test_widest_goes_round_and_shortest_goes_straight():
    cube = preset("dgx-1v")
    assert shortest(cube, "gpu0", "gpu5").bandwidth_gb_per_s == 6.0
    round_about = widest(cube, "gpu0", "gpu5", through_gpus=True)
    assert round_about.bandwidth_gb_per_s == 40.0
    assert all(device.startswith("gpu") for device in round_about.devices)
    assert widest(cube, "gpu0", "gpu5").bandwidth_gb_per_s == 6.0
    assert widest(cube, "gpu0", "gpu0").devices == ("gpu0",)


def test_gpus_share_out_equally_near_nics():
    machine = preset("dgx-a100")
    assert [nearest_nic(machine, gpu).index for gpu in range(8)] == list(range(8))


def test_a_nic_with_a_pci_place_comes_before_an_interface_without(tree):
    devices = [*tree.devices()]
    devices += [
        Device("bridge", DeviceKind.NIC, 0, name="br0"),
        Device("card", DeviceKind.NIC, 1, name="eth0", pci_bus_id="0000:99:00.0"),
    ]
    links = [
        *tree.links,
        Link("bridge", "cpu0", LinkKind.PCIE, 1.0, 0.5),
        Link("card", "cpu1", LinkKind.PCIE, 1.0, 0.5),
    ]
    assert nearest_nic(Topology(devices, links), 0).name == "eth0"
    assert nearest_nic(tree, 0) is None


def test_an_unknown_device_is_named(tree):
    with pytest.raises(TopologyError, match="no device 'gpu9'"):
        path_class(tree, "gpu0", "gpu9")
