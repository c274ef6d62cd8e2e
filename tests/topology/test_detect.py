"""The live machine, from a /sys and an NVML of our own, and whatever this one is."""

import pytest

from flagcx.topology import DeviceKind, LinkKind, detect, matrix, nccl_xml, nccl_xml_write
from tests.topology.fakes import FakeNvml, FakeSys, gpu

SWITCH, GPU = 2, 0


@pytest.fixture
def host(tmp_path):
    """Two sockets; on the first a PCIe switch with a GPU and a NIC below it, on the second a GPU."""
    fake = FakeSys(tmp_path)
    fake.numa(0, "0-15", 0)
    fake.numa(1, "16-31", 1)
    fake.bridge("pci0000:0a/0000:0a:01.0", 0)
    fake.bridge("pci0000:0a/0000:0a:01.0/0000:0b:00.0", 0)
    for port in ("0000:0c:00.0", "0000:0c:01.0"):
        fake.bridge(f"pci0000:0a/0000:0a:01.0/0000:0b:00.0/{port}", 0)
    fake.gpu("pci0000:0a/0000:0a:01.0/0000:0b:00.0/0000:0c:00.0/0000:0d:00.0", 0)
    fake.infiniband(
        "pci0000:0a/0000:0a:01.0/0000:0b:00.0/0000:0c:01.0/0000:0e:00.0", 0, "mlx5_0", "400 Gb/sec (4X NDR)"
    )
    fake.bridge("pci0000:80/0000:80:01.0", 1)
    fake.gpu("pci0000:80/0000:80:01.0/0000:81:00.0", 1)
    fake.virtual("lo")
    return fake


def look(host, nvml):
    return detect(sys=host.sys, proc=host.proc, nvml=nvml)


def test_gpus_links_switches_and_nics(host):
    links = [("00000000:A0:00.0", SWITCH)] * 9 + [("00000000:A1:00.0", SWITCH)] * 9
    nvml = FakeNvml([gpu("00000000:0D:00.0", links), gpu(b"00000000:81:00.0", links, name=b"NVIDIA H100")])
    machine = look(host, nvml)
    assert nvml.open == 0, "NVML is shut down again"
    cells = matrix(machine)
    assert cells["GPU0"]["GPU1"] == "NV18"
    assert (cells["GPU0"]["NIC0"], cells["GPU1"]["NIC0"]) == ("PIX", "SYS")
    assert [switch.pci_bus_id for switch in machine.devices(DeviceKind.NVSWITCH)] == [
        "0000:a0:00.0",
        "0000:a1:00.0",
    ]
    assert machine.link("gpu0", "nvswitch0").bandwidth_gb_per_s == pytest.approx(9 * 20.6)
    nic = machine.devices(DeviceKind.NIC)[0]
    assert (nic.name, nic.ports[0].speed_gb_per_s) == ("mlx5_0", 50.0)
    assert machine.gpu(1).name == "NVIDIA H100" and machine.gpu(1).pci_bus_id == "0000:81:00.0"
    assert machine["numa_node"] == {0: "cpu0", 1: "cpu1"}
    assert machine.link("cpu0", "cpu1").bandwidth_gb_per_s == 22.0
    assert machine.device("cpu1").attribute("package") == "1"
    pcie = [link for link in machine.links_of("gpu0").values() if link.kind is LinkKind.PCIE]
    assert [link.bandwidth_gb_per_s for link in pcie] == [48.0], "an idle link's 2.5 GT/s is not taken"


def test_what_is_detected_can_be_written_for_nccl(host):
    links = [("00000000:81:00.0", GPU)] * 4
    back = [("00000000:0D:00.0", GPU)] * 4
    machine = look(host, FakeNvml([gpu("00000000:0D:00.0", links), gpu("00000000:81:00.0", back)]))
    assert machine.link("gpu0", "gpu1").count == 4
    assert matrix(nccl_xml.parse(nccl_xml_write.format_xml(machine))) == matrix(machine)


def test_roots_tell_phb_from_node(host):
    host.gpu("pci0000:0a/0000:0a:02.0", 0)
    host.gpu("pci0000:0f/0000:0f:02.0", 0)
    found = [gpu(f"00000000:{bus}", sm=(8, 9)) for bus in ("0D:00.0", "0A:02.0", "0F:02.0")]
    cells = matrix(look(host, FakeNvml(found)))
    assert (cells["GPU0"]["GPU1"], cells["GPU0"]["GPU2"]) == ("PHB", "NODE")


def test_no_driver_still_gives_the_gpus_of_pcie_and_says_so(host):
    machine = look(host, FakeNvml(driver=False))
    assert [gpu.pci_bus_id for gpu in machine.gpus] == ["0000:0d:00.0", "0000:81:00.0"]
    assert any("cannot be asked (NVML Shared Library Not Found)" in note for note in machine.notes)
    assert any("found on PCIe alone" in note for note in machine.notes)


def test_a_driver_that_fails_after_its_start(host):
    nvml = FakeNvml([gpu("00000000:0D:00.0")], ("nvmlDeviceGetCount",))
    machine = look(host, nvml)
    assert nvml.open == 0 and len(machine.gpus) == 2
    assert any("does not list its GPUs (Not Supported)" in note for note in machine.notes)


def test_a_screen_chip_is_no_gpu_but_an_accelerator_of_amd_is(host):
    host.gpu("pci0000:00/0000:00:02.0", 0, vendor="0x1a03", pci_class="0x030000")
    host.gpu("pci0000:90/0000:90:00.0", 1, vendor="0x1002", pci_class="0x120000")
    machine = look(host, FakeNvml(driver=False))
    assert [gpu.pci_bus_id for gpu in machine.gpus] == ["0000:0d:00.0", "0000:81:00.0", "0000:90:00.0"]


def test_hidden_switches_down_links_and_refusals(host):
    links = [("FFFFFFFF:FF:FF.0", SWITCH), None, ("FFFFFFFF:FF:FF.0", SWITCH)]
    machine = look(host, FakeNvml([gpu("00000000:0D:00.0", links), gpu("00000000:81:00.0", links)]))
    assert matrix(machine)["GPU0"]["GPU1"] == "NV2"
    assert any("an NVLink of a GPU is down (2 times)" in note for note in machine.notes)


def test_a_gpu_without_nvlink_or_capability(host):
    fails = ("nvmlDeviceGetNvLinkState", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetName")
    machine = look(host, FakeNvml([gpu("00000000:0D:00.0"), gpu("00000000:81:00.0")], fails))
    assert matrix(machine)["GPU0"]["GPU1"] == "SYS"


def test_links_of_an_unnamed_gpu_are_assumed_and_marked(host):
    far = [("00000000:81:00.0", GPU)]
    near = [("00000000:0D:00.0", GPU)]
    nvml = FakeNvml(
        [gpu("00000000:0D:00.0", far), gpu("00000000:81:00.0", near)], ("nvmlDeviceGetCudaComputeCapability",)
    )
    link = look(host, nvml).link("gpu0", "gpu1")
    assert link.bandwidth_gb_per_s == 20.0 and link.assumed


def test_a_link_to_a_hidden_gpu_and_a_lost_gpu(host):
    far = [("00000000:99:00.0", GPU)]
    machine = look(host, FakeNvml([gpu("00000000:0D:00.0", far), None]))
    assert [gpu.index for gpu in machine.gpus] == [0]
    assert any("hidden from this process" in note for note in machine.notes)
    assert any("GPU 1 is left out: the driver says GPU is lost" in note for note in machine.notes)


def test_a_remote_end_that_cannot_be_read_is_left_out(host):
    far = [("00000000:81:00.0", GPU)]
    nvml = FakeNvml([gpu("00000000:0D:00.0", far)], ("nvmlDeviceGetNvLinkRemotePciInfo",))
    machine = look(host, nvml)
    assert any("remote end cannot be read" in note for note in machine.notes)


def test_a_gpu_that_sysfs_does_not_show(host):
    machine = look(host, FakeNvml([gpu("00000000:77:00.0")]))
    assert machine["numa_node"][0] == "cpu0"
    assert any("place in the PCIe tree cannot be read" in note for note in machine.notes)


def test_ethernet_on_a_virtual_bus_a_port_that_is_down_and_no_speed(host):
    host.ethernet("pci0000:00/0000:00:03.0", -1, "eth0", "-1", bus="virtio2")
    host.infiniband("pci0000:80/0000:80:03.0", 1, "mlx5_1", "10 Gb/sec (1X SDR)", "1: DOWN")
    host.ethernet("pci0000:80/0000:80:04.0", 1, "ens4", "25000")
    machine = look(host, FakeNvml())
    speeds = {nic.name: nic.ports[0].speed_gb_per_s for nic in machine.devices(DeviceKind.NIC)}
    assert speeds == {"eth0": 0.0, "mlx5_0": 50.0, "mlx5_1": 0.0, "ens4": 3.125}
    assert any("speed is not known" in note for note in machine.notes)
    assert any("NUMA node is not known; the first is assumed" in note for note in machine.notes)


def test_a_machine_of_which_nothing_is_told(tmp_path):
    machine = detect(sys=tmp_path / "none", proc=tmp_path / "none", nvml=FakeNvml(driver=False))
    assert machine["numa_nodes"] == ["cpu0"] and machine.gpus == ()


def test_this_machine():
    machine = detect()
    assert len(machine["numa_nodes"]) >= 1
    assert nccl_xml.parse(nccl_xml_write.format_xml(machine)).devices(DeviceKind.CPU)
    assert repr(machine).startswith("<Topology ")
