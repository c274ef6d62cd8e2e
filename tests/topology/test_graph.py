"""The graph itself: its mapping, its refusals, its views."""

import copy
import pickle

import networkx
import pytest

from flagcx.errors import TopologyError
from flagcx.topology import Device, DeviceKind, Link, LinkKind, Topology, preset

GPU0 = Device("gpu0", DeviceKind.GPU, 0)
GPU1 = Device("gpu1", DeviceKind.GPU, 1)
CPU0 = Device("cpu0", DeviceKind.CPU, 0)


def wire(a="gpu0", b="gpu1", bandwidth=10.0, kind=LinkKind.NVLINK):
    return Link(a, b, kind, bandwidth, 0.5)


def test_the_articles_keys():
    machine = preset("8xa100-pcie")
    assert machine["nvlink_peers"][0] == [1]
    assert machine["pcie_peers"][0] == [2, 3, 4, 5, 6, 7]
    assert machine["nvlink_peers"][5] == [4]
    assert machine["pcie_peers"][5] == [6, 7, 0, 1, 2, 3]
    assert machine["gpus"] == list(range(8))
    assert machine["nearest_nic"][0] == "mlx5_0" and machine["nearest_nic"][7] == "mlx5_1"
    assert machine["numa_node"][3] == "cpu0" and machine["numa_node"][4] == "cpu1"
    assert dict(machine).keys() == set(machine) and len(machine) == len(list(machine))


def test_peers_come_by_count_of_links_first():
    machine = preset("dgx-1v")
    assert machine["nvlink_peers"][0] == [3, 4, 1, 2]
    assert machine["pcie_peers"][0] == [5, 6, 7]


def test_an_unknown_key_names_the_known_ones():
    with pytest.raises(KeyError, match=r"'nvlink' is not known; the keys are gpus, .*nvlink_peers"):
        preset("dgx-2")["nvlink"]


@pytest.mark.parametrize(
    ("devices", "links", "message"),
    [
        ([GPU0, GPU0], [], "two devices are called 'gpu0'"),
        ([GPU0, GPU1], [wire(b="gpu7")], "ends at 'gpu7', which is not a device"),
        ([GPU0, GPU1], [wire(), wire("gpu1", "gpu0")], "a second link .* between gpu1 and gpu0"),
        ([GPU0, GPU1], [wire(b="gpu0")], "a second link \\(or a loop\\) between gpu0 and gpu0"),
        ([GPU0, GPU1], [wire(bandwidth=0.0)], "bandwidth of 0.0 GB/s; expected a finite number above 0"),
        ([GPU0, GPU1], [wire(bandwidth=float("nan"))], "bandwidth of nan"),
        ([GPU0, GPU1], [wire(bandwidth=float("inf"))], "bandwidth of inf"),
        ([GPU0, Device("other", DeviceKind.GPU, 0)], [], "two GPUs have the same index; got .*\\[0, 0\\]"),
    ],
)
def test_what_is_no_graph_is_refused(devices, links, message):
    with pytest.raises(TopologyError, match=message):
        Topology(devices, links)


def test_unknown_devices_are_named_with_the_known_ones():
    machine = Topology([GPU0, GPU1], [wire()], name="pair")
    with pytest.raises(TopologyError, match=r"no GPU 5 in .*pair.*; its GPUs are \[0, 1\]"):
        machine.gpu(5)
    with pytest.raises(TopologyError, match=r"no device 'nic0' in .*; there are gpu0, gpu1"):
        machine.device("nic0")


def test_the_networkx_graph_is_frozen_and_whole():
    machine = preset("dgx-1v")
    graph = machine.graph
    assert graph.number_of_nodes() == len(machine.devices())
    assert graph.number_of_edges() == len(machine.links)
    assert graph.edges["gpu0", "gpu3"]["bandwidth_gb_per_s"] == 40.0
    assert graph.edges["gpu0", "gpu3"]["kind"] == "nvlink"
    assert networkx.is_connected(graph)
    with pytest.raises(networkx.NetworkXError, match="Frozen"):
        graph.remove_node("gpu0")


def test_equality_is_of_devices_and_links_and_not_of_names_or_notes():
    one = Topology([GPU0, GPU1], [wire()], name="one", notes=["a"])
    same = Topology([GPU1, GPU0], [wire("gpu1", "gpu0")], name="two")
    assert one == same and hash(one) == hash(same)
    assert one != Topology([GPU0, GPU1], [wire(bandwidth=11.0)])
    assert one != Topology([GPU0, GPU1, CPU0], [wire()])
    assert one != "one"


def test_repr_is_short_and_counts():
    assert repr(preset("dgx-h100")) == "<Topology dgx-h100: 8 GPUs, 4 NVSwitches, 2 NUMA nodes, 8 NICs>"
    assert repr(Topology([], [])) == "<Topology empty>"
    assert repr(Topology([GPU0, CPU0], [])) == "<Topology 1 GPU, 1 NUMA node>"


def test_it_is_read_only():
    machine = preset("dgx-1v")
    with pytest.raises(TypeError):
        machine["gpus"] = []
    for name in ("name", "notes"):
        with pytest.raises(AttributeError):
            setattr(machine, name, "other")
    machine["gpus"].append(9)
    assert machine["gpus"] == list(range(8))


def test_a_gpu_that_is_not_there():
    """A machine without GPUs says so; the error is a KeyError too, since a mapping was asked."""
    without = Topology([CPU0], [], name="laptop")
    for key in ("nvlink_peers", "pcie_peers", "nearest_nic", "numa_node"):
        for kind in (TopologyError, KeyError):
            with pytest.raises(kind) as caught:
                without[key][0]
            assert str(caught.value).startswith(
                "no GPU 0 in <Topology laptop: 1 NUMA node>, which has no GPU at all"
            )
        assert without[key] == {} and without[key].get(0, []) == []
    with pytest.raises(KeyError, match=r"no GPU 99 in <Topology dgx-1v: .*>; its GPUs are \[0, 1, .* 7\]$"):
        preset("dgx-1v")["nvlink_peers"][99]
    with pytest.raises(TopologyError, match=r"no GPU 0 in .*, which has no GPU at all"):
        without.gpu(0)
    peers = preset("dgx-1v")["nvlink_peers"]
    assert copy.deepcopy(peers) == pickle.loads(pickle.dumps(peers)) == dict(peers)
