"""NCCL's XML: what is read, what is assumed, what is refused, and writing it back."""

import pytest

from flagcx.errors import TopologyError
from flagcx.topology import DeviceKind, LinkKind, matrix, nccl_xml, nccl_xml_write, preset, preset_names
from flagcx.topology.markup import MAX_DEPTH, MAX_ELEMENTS, MAX_NBYTES
from tests.topology.machines import FIXTURES, REFUSED, shared_files

GOOD = sorted(path for path in FIXTURES.glob("*.xml") if path.name not in ("graph_file.xml", "cut_short.xml"))


def document(body: str) -> str:
    return f'<system version="1">\n<cpu numaid="0">\n{body}\n</cpu>\n</system>'


def gpu(bus: str, dev: int, inside: str = "") -> str:
    return f'<pci busid="{bus}" class="0x030200"><gpu dev="{dev}" sm="80">{inside}</gpu></pci>'


# -- reading


def test_nvswitches_and_a_nic_with_two_ports():
    machine = nccl_xml.read(FIXTURES / "switched_4.xml")
    cells = matrix(machine)
    assert [cells["GPU0"][f"GPU{gpu}"] for gpu in range(4)] == ["X", "NV18", "NV18", "NV18"]
    assert cells["GPU0"]["NIC0"] == "PIX" and cells["GPU2"]["NIC0"] == "SYS"
    assert machine.link("gpu0", "nvswitch0").bandwidth_gb_per_s == pytest.approx(9 * 20.6)
    assert machine.link("cpu0", "cpu1").bandwidth_gb_per_s == 22.0
    nic = machine.devices(DeviceKind.NIC)[0]
    assert nic.name == "mlx5_0+mlx5_1"
    assert [port.speed_gb_per_s for port in nic.ports] == [25.0, 25.0]


def test_an_idle_bridge_is_taken_as_fast_as_what_hangs_below_it_and_said_so():
    machine = nccl_xml.read(FIXTURES / "switched_4.xml")
    link = machine.link("cpu1", "pci:0000:80:00.0")
    assert link.bandwidth_gb_per_s == 48.0 and link.assumed
    assert any("slower link (2.5 or 5 GT/s" in note for note in machine.notes)
    real = nccl_xml.parse(
        document(
            '<pci busid="0000:01:00.0" class="0x060400" link_speed="8 GT/s" link_width="16">'
            '<pci busid="0000:02:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"/></pci>'
        )
    )
    assert real.link("cpu0", "pci:0000:01:00.0").bandwidth_gb_per_s == 12.0


def test_a_hidden_nvswitch_and_lanes_that_are_not_known():
    machine = nccl_xml.read(FIXTURES / "hidden_switch_2.xml")
    assert matrix(machine)["GPU0"]["GPU1"] == "NV18"
    assert machine.link("gpu0", "cpu0").bandwidth_gb_per_s == 48.0
    assert machine.link("gpu0", "cpu0").assumed
    assert any("speed or width is not in the file" in note for note in machine.notes)
    assert machine.devices(DeviceKind.NIC)[0].name == "lo"


def test_xgmi_of_version_2():
    machine = nccl_xml.read(FIXTURES / "xgmi_4.xml")
    assert matrix(machine)["GPU0"]["GPU3"] == "XGMI1"
    link = machine.link("gpu0", "gpu3")
    assert (link.kind, link.bandwidth_gb_per_s) == (LinkKind.XGMI, 24.0)
    assert machine["nvlink_peers"][2] == [0, 1, 3]


def test_a_static_file_is_numbered_by_pci_address_and_its_board_assumed():
    machine = nccl_xml.read(FIXTURES / "static_8.xml")
    assert [gpu.pci_bus_id[:4] for gpu in machine.gpus] == [f"000{number}" for number in range(1, 9)]
    assert matrix(machine)["GPU0"]["GPU7"] == "NV12"
    assert any("taken to be on a board with NVSwitches, 12 NVLinks each" in note for note in machine.notes)
    assert any("GPU numbers are not in the file" in note for note in machine.notes)


def test_a_file_without_classes_names_no_gpu_and_says_so():
    machine = nccl_xml.read(FIXTURES / "classless.xml")
    assert machine.gpus == () and len(machine.devices(DeviceKind.PCI_DEVICE)) == 3
    assert any("class is not in the file" in note for note in machine.notes)


def test_links_that_lead_back_are_taken_as_bridged_pairs_and_said_so():
    machine = nccl_xml.read(FIXTURES / "bridged_loops_4.xml")
    cells = matrix(machine)
    assert (cells["GPU0"]["GPU1"], cells["GPU2"]["GPU3"], cells["GPU0"]["GPU2"]) == ("NV12", "NV12", "SYS")
    assert any("leads back to its own GPU, as a hypervisor" in note for note in machine.notes)


def test_gpu_numbers_are_those_of_the_file_even_with_gaps():
    machine = nccl_xml.parse(document(gpu("0000:01:00.0", 4) + gpu("0000:02:00.0", 1)))
    assert [(gpu.index, gpu.pci_bus_id) for gpu in machine.gpus] == [(1, "0000:02:00.0"), (4, "0000:01:00.0")]


def test_one_interface_under_every_numa_node_is_one_device():
    net = '<nic><net name="br0" dev="0" speed="10000"/></nic>'
    text = f'<system version="1"><cpu numaid="0">{net}</cpu><cpu numaid="1">{net}</cpu></system>'
    machine = nccl_xml.parse(text)
    nics = machine.devices(DeviceKind.NIC)
    assert len(nics) == 1 and set(machine.links_of(nics[0].id)) == {"cpu0", "cpu1"}


def test_one_sided_and_unequal_links_are_taken_once():
    left = gpu("0000:01:00.0", 0, '<nvlink target="0000:02:00.0" count="2" tclass="0x030200"/>')
    right = gpu("0000:02:00.0", 1, '<nvlink target="0000:01:00.0" count="4" tclass="0x030200"/>')
    assert nccl_xml.parse(document(left + gpu("0000:02:00.0", 1))).link("gpu0", "gpu1").count == 2
    machine = nccl_xml.parse(document(left + right))
    assert machine.link("gpu0", "gpu1").count == 4
    assert any("disagree on its count" in note for note in machine.notes)


def test_hosts_are_told_apart_by_their_hash():
    text = (
        f'<system version="1"><cpu numaid="0" host_hash="0x1">{gpu("0000:01:00.0", 0)}</cpu>'
        f'<cpu numaid="0" host_hash="0x2">{gpu("0000:01:00.0", 0)}</cpu></system>'
    )
    machine = nccl_xml.parse(text)
    assert machine.hosts == (0, 1)
    assert [(gpu.index, gpu.id) for gpu in machine.gpus] == [(0, "gpu0"), (1, "host1/gpu1")]


# -- refusing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "m.xml, line 1, column 1: not well-formed XML: no element found; is the file cut short"),
        ("plain text", "m.xml, line 1, column 1: not well-formed XML"),
        ('<system version="1">\n <cpu>\n', "m.xml, line 3, .*not well-formed XML: no element found"),
        ('<graphs version="1"/>', "line 1: this is an NCCL graph file .*NCCL_GRAPH_FILE"),
        ("<topology/>", "the root element is 'topology'; expected 'system'"),
        ('<system version="3"/>', "topology version '3'; versions 1 \\(NCCL\\) and 2 \\(RCCL\\) are known"),
        ('<system version="1"/>', "no <cpu> element, so no machine"),
        (
            '<system version="1">\n<cpu numaid="x"/></system>',
            "line 2: attribute numaid of <cpu> is 'x'; expected",
        ),
        (
            document('<pci busid="01:00"/>'),
            "line 3: attribute busid of <pci> is '01:00'; expected a PCI address",
        ),
        (document("<pci/>"), "attribute busid of <pci> is ''"),
        (
            document('<pci busid="0000:01:00.0" link_width="-4"/>'),
            "link_width of <pci> is '-4'; expected a whole number from 0 to 32",
        ),
        (document(gpu("0000:01:00.0", -1)), "attribute dev of <gpu> is '-1'"),
        (
            document('<pci busid="0000:01:00.0"><gpu sm="80"/></pci>'),
            "attribute dev of <gpu> is nothing; expected a whole number",
        ),
        (
            document(gpu("0000:01:00.0", 0, '<nvlink target="0000:02:00.0" count="0"/>')),
            "attribute count of <nvlink> is '0'; expected a whole number from 1 to 1024",
        ),
        (
            document(gpu("0000:01:00.0", 0, '<nvlink target="gpu1" count="1"/>')),
            "attribute target of <nvlink> is 'gpu1'; expected a PCI address",
        ),
        (
            document('<nic><net name="a" speed="1e9"/></nic>'),
            "attribute speed of <net> is '1e9'; expected a whole number",
        ),
        (document(gpu("0000:01:00.0", 0) * 2), "PCI device 0000:01:00.0 is listed twice"),
        (
            '<!DOCTYPE system [<!ENTITY a "aaaa">]>\n<system version="1"/>',
            "line 1: has a DOCTYPE or an entity declaration",
        ),
    ],
)
def test_what_is_no_topology_is_refused_with_file_place_and_reason(text, message):
    with pytest.raises(TopologyError, match=message) as caught:
        nccl_xml.parse(text, "m.xml")
    assert str(caught.value).startswith("m.xml")


def test_the_fixtures_that_are_none():
    with pytest.raises(TopologyError, match=r"cut_short\.xml, line \d+, column \d+: not well-formed"):
        nccl_xml.read(FIXTURES / "cut_short.xml")
    with pytest.raises(TopologyError, match=r"graph_file\.xml, line 1: this is an NCCL graph file"):
        nccl_xml.read(FIXTURES / "graph_file.xml")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(
        TopologyError, match=r"none\.xml: cannot be opened as NCCL's topology XML: No such file"
    ):
        nccl_xml.read(tmp_path / "none.xml")
    with pytest.raises(TopologyError, match=r"cannot be opened.*Is a directory"):
        nccl_xml.read(tmp_path)
    (tmp_path / "binary.xml").write_bytes(b"<system\xff\xfe>")
    with pytest.raises(TopologyError, match="byte 7 is not UTF-8"):
        nccl_xml.read(tmp_path / "binary.xml")


def test_bounds_of_size_depth_and_count(tmp_path):
    (tmp_path / "huge.xml").write_bytes(b" " * (MAX_NBYTES + 1))
    with pytest.raises(TopologyError, match="over 8 MiB, which is too large"):
        nccl_xml.read(tmp_path / "huge.xml")
    deep = "<a>" * (MAX_DEPTH + 1) + "</a>" * (MAX_DEPTH + 1)
    with pytest.raises(TopologyError, match=f"nested over {MAX_DEPTH} levels deep"):
        nccl_xml.parse(deep)
    with pytest.raises(TopologyError, match=f"over {MAX_ELEMENTS} elements"):
        nccl_xml.parse("<system>" + "<a/>" * (MAX_ELEMENTS + 1) + "</system>")
    with pytest.raises(TopologyError, match="over 512 NUMA nodes"):
        nccl_xml.parse("<system>" + "".join(f'<cpu numaid="{n}"/>' for n in range(600)) + "</system>")


# -- writing


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name)
def test_a_read_of_what_was_written_equals_what_was_read(path):
    first = nccl_xml.read(path)
    again = nccl_xml.parse(nccl_xml_write.format_xml(first), path.name)
    assert again == first


@pytest.mark.parametrize("name", preset_names())
def test_presets_written_and_read_have_the_same_matrix_and_bandwidths(name):
    first = preset(name)
    again = nccl_xml.parse(nccl_xml_write.format_xml(first))
    assert matrix(again) == matrix(first)

    def widths(machine):
        return sorted((link.kind.value, link.bandwidth_gb_per_s, link.count) for link in machine.links)

    assert widths(again) == widths(first)


def test_writing_to_a_file(tmp_path):
    nccl_xml_write.write(preset("dgx-1v"), tmp_path / "out.xml")
    assert matrix(nccl_xml.read(tmp_path / "out.xml")) == matrix(preset("dgx-1v"))
    with pytest.raises(TopologyError, match="cannot be written: No such file"):
        nccl_xml_write.write(preset("dgx-1v"), tmp_path / "none" / "out.xml")


def test_names_are_escaped():
    text = document('<nic><net name="a&quot;&lt;b" dev="0" speed="1000"/></nic>')
    machine = nccl_xml.parse(text)
    assert nccl_xml.parse(nccl_xml_write.format_xml(machine)) == machine
    assert machine.devices(DeviceKind.NIC)[0].name == 'a"<b'


# -- real machines


@pytest.mark.parametrize("path", shared_files("nccl-topology-xml", "*.xml"))
def test_real_files_read_and_write_back_or_are_refused(path):
    if path.name in REFUSED:
        with pytest.raises(TopologyError, match=rf"{path.name}, line \d+"):
            nccl_xml.read(path)
        return
    machine = nccl_xml.read(path)
    assert machine.devices(DeviceKind.CPU)
    assert nccl_xml.parse(nccl_xml_write.format_xml(machine), str(path)) == machine
