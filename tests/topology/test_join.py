"""Hosts put together, and a topology sent from one process to another."""

import pickle

import pytest

from flagcx.errors import TopologyError
from flagcx.topology import (
    Device,
    DeviceKind,
    Topology,
    cluster,
    join,
    make_plan,
    matrix,
    nccl_xml,
    preset,
    read,
)
from tests.topology.machines import FIXTURES


def test_equal_hosts_are_a_cluster_below_one_switch():
    pair = join([preset("dgx-a100"), preset("dgx-a100")])
    assert [gpu.index for gpu in pair.gpus] == list(range(16)) and pair.hosts == (0, 1)
    assert matrix(pair)["GPU3"]["GPU12"] == "NET"
    assert any("one switch that never blocks is assumed" in note for note in pair.notes)
    plan = make_plan(pair)
    assert plan.bandwidth_gb_per_s == pytest.approx(
        make_plan(cluster(preset("dgx-a100"), 2)).bandwidth_gb_per_s
    )


def test_unequal_hosts_gaps_in_numbers_and_nics_of_unknown_speed():
    gaps = nccl_xml.parse(
        '<system version="1"><cpu numaid="0">'
        '<pci busid="0000:01:00.0" class="0x030000"><gpu dev="4" sm="80"/></pci>'
        '<pci busid="0000:02:00.0" class="0x030000"><gpu dev="1" sm="80"/></pci>'
        '<pci busid="0000:03:00.0" class="0x020000"/></cpu></system>'
    )
    joined = join([gaps, read(FIXTURES / "hidden_switch_2.xml")])
    assert [gpu.index for gpu in joined.gpus] == [0, 1, 2, 3]
    assert [gpu.attribute("gpu.dev") for gpu in joined.gpus] == ["1", "4", "0", "1"]
    link = joined.link("nic0", "network")
    assert link.bandwidth_gb_per_s == 1.25 and link.assumed
    assert sorted(make_plan(joined).order) == [0, 1, 2, 3]


def test_one_machine_is_itself_and_none_is_refused():
    machine = preset("dgx-1v")
    assert join([machine]) is machine
    with pytest.raises(TopologyError, match="no machine to join"):
        join([])
    with pytest.raises(TopologyError, match="has 2 hosts; join takes machines of one host each"):
        join([machine, cluster(machine, 2)])


def test_hosts_without_gpus_can_be_joined():
    box = Topology([Device("cpu0", DeviceKind.CPU, 0)], [])
    assert join([box, box])["numa_nodes"] == ["cpu0", "host1/cpu0"]


def test_a_topology_goes_through_pickle_also_after_use():
    machine = preset("dgx-1v")
    machine["nvlink_peers"], machine.graph, machine.links
    again = pickle.loads(pickle.dumps(machine))
    assert again == machine and again.name == machine.name and again.notes == machine.notes
    assert again["nvlink_peers"] == machine["nvlink_peers"]
