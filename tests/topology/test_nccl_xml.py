"""NCCL's XML: what is read, what is assumed, what is refused, and writing it back."""

import html
import json
import re
from collections import Counter

import pytest

from flagcx.errors import TopologyError
from flagcx.topology import (
    DeviceKind,
    LinkKind,
    make_plan,
    matrix,
    nccl_xml,
    nccl_xml_write,
    preset,
    preset_names,
    read,
    render,
)
from flagcx.topology.markup import MAX_DEPTH, MAX_ELEMENTS, MAX_NBYTES
from tests.topology.machines import FIXTURES, REFUSED, shared_files

GOOD = sorted(path for path in FIXTURES.glob("*.xml") if path.name not in ("graph_file.xml", "cut_short.xml"))


def document(body: str) -> str:
    return f'<system version="1">\n<cpu numaid="0">\n{body}\n</cpu>\n</system>'


def gpu(bus: str, dev: int, inside: str = "") -> str:
    return f'<pci busid="{bus}" class="0x030200"><gpu dev="{dev}" sm="80">{inside}</gpu></pci>'


# -- reading


def test_nvswitches_and_a_nic_with_two_ports():
    machine = read(FIXTURES / "switched_4.xml")
    cells = matrix(machine)
    assert [cells["GPU0"][f"GPU{gpu}"] for gpu in range(4)] == ["X", "NV18", "NV18", "NV18"]
    assert cells["GPU0"]["NIC0"] == "PIX" and cells["GPU2"]["NIC0"] == "SYS"
    assert machine.link("gpu0", "nvswitch0").bandwidth_gb_per_s == pytest.approx(9 * 20.6)
    assert machine.link("cpu0", "cpu1").bandwidth_gb_per_s == 22.0
    nic = machine.devices(DeviceKind.NIC)[0]
    assert nic.name == "mlx5_0+mlx5_1"
    assert [port.speed_gb_per_s for port in nic.ports] == [25.0, 25.0]


def test_an_idle_bridge_is_taken_as_fast_as_what_hangs_below_it_and_said_so():
    machine = read(FIXTURES / "switched_4.xml")
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
    machine = read(FIXTURES / "hidden_switch_2.xml")
    assert matrix(machine)["GPU0"]["GPU1"] == "NV18"
    assert machine.link("gpu0", "cpu0").bandwidth_gb_per_s == 48.0
    assert machine.link("gpu0", "cpu0").assumed
    assert any("speed or width is missing or makes no sense" in note for note in machine.notes)
    assert machine.devices(DeviceKind.NIC)[0].name == "lo"


def test_xgmi_of_version_2():
    machine = read(FIXTURES / "xgmi_4.xml")
    assert matrix(machine)["GPU0"]["GPU3"] == "XGMI1"
    link = machine.link("gpu0", "gpu3")
    assert (link.kind, link.bandwidth_gb_per_s) == (LinkKind.XGMI, 24.0)
    assert machine["nvlink_peers"][2] == [0, 1, 3]


def test_a_static_file_is_numbered_by_pci_address_and_its_board_assumed():
    machine = read(FIXTURES / "static_8.xml")
    assert [gpu.pci_bus_id[:4] for gpu in machine.gpus] == [f"000{number}" for number in range(1, 9)]
    assert matrix(machine)["GPU0"]["GPU7"] == "NV12"
    assert any("taken to be on a board with NVSwitches, 12 NVLinks each" in note for note in machine.notes)
    assert any("GPU numbers are not in the file" in note for note in machine.notes)


def test_a_file_without_classes_names_no_gpu_and_says_so():
    machine = read(FIXTURES / "classless.xml")
    assert machine.gpus == () and len(machine.devices(DeviceKind.PCI_DEVICE)) == 3
    assert any("class is not in the file" in note for note in machine.notes)


def test_links_that_lead_back_are_taken_as_bridged_pairs_and_said_so():
    machine = read(FIXTURES / "bridged_loops_4.xml")
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


XML_PASTES = {
    "prompts": lambda text: f"root@n1:~# cat topo.xml\n{text}\nroot@n1:~# ",
    "quoted": lambda text: "".join(f"> {line}\n" for line in text.splitlines()),
    "numbered": lambda text: "".join(f"{n:4} {line}\n" for n, line in enumerate(text.splitlines())),
    "colours": lambda text: text.replace("<pci", "\x1b[31m<pci\x1b[m"),
    "HTML": lambda text: f"<pre>{html.escape(text)}</pre>",
    "JSON": lambda text: json.dumps({"topology": text}),
    "list of lines": lambda text: repr(text.splitlines()),
    "quotes of Word": lambda text: re.sub('"([^"]*)"', "\u201c\\1\u201d", text),
    "no-break spaces": lambda text: text.replace(" ", "\u00a0"),
    "long domains": lambda text: text.replace('"0000:', '"00000000:'),
    "no domains": lambda text: text.replace('"0000:', '"'),
}


@pytest.mark.parametrize("change", XML_PASTES)
def test_a_pasted_file_says_what_the_file_says(change):
    text = (FIXTURES / "switched_4.xml").read_text()
    assert nccl_xml.parse(XML_PASTES[change](text), "switched_4.xml") == read(FIXTURES / "switched_4.xml")


def test_the_first_of_two_files_is_read_and_an_unknown_version_is_noted():
    text = (FIXTURES / "switched_4.xml").read_text()
    twice = nccl_xml.parse(text + document(gpu("0000:01:00.0", 0)).replace('"1"', '"3"', 1))
    assert len(twice.gpus) == 4
    assert noted(twice, "the text has 2 topologies; the first is read, and the next has 1 GPUs, not 4")
    assert noted(nccl_xml.parse(f"{text}\nand:\n{text}"), "the next is the same")
    assert noted(nccl_xml.parse(text + text.replace('"1"', '"2"')), "the next is another, with as many GPUs")
    later = nccl_xml.parse(document(gpu("0000:01:00.0", 0)).replace('version="1"', 'version="3"'))
    assert len(later.gpus) == 1 and noted(later, "version is neither 1", "version is '3'")


# -- refusing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "m.xml, line 1, column 1: not well-formed XML: no element found; is the file cut short"),
        ("plain text", "m.xml, line 1, column 1: not well-formed XML"),
        ('<system version="1">\n <cpu>\n', "m.xml, line 3, .*not well-formed XML: no element found"),
        ('<graphs version="1"/>', "line 1: this is an NCCL graph file .*NCCL_GRAPH_FILE"),
        ("<topology/>", "the root element is 'topology'; expected 'system'"),
        (
            '<!DOCTYPE topology SYSTEM "hwloc2.dtd"><topology/>',
            "line 1: this is hwloc's .lstopo's. XML",
        ),
        (
            "<!DOCTYPE nvidia_smi_log><nvidia_smi_log/>",
            "this is the output of 'nvidia-smi -q -x'",
        ),
        ('<system version="1"/>', "no <cpu> element, so no machine"),
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


def noted(machine, *words):
    """Whether one of the machine's notes has all the words."""
    return any(all(word in note for word in words) for note in machine.notes)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('<pci busid="01:00" class="0x030200"/>', ("no valid address", "busid is '01:00' in line 3")),
        ("<pci/>", ("no valid address", "busid is missing")),
        (
            '<pci busid="0000:01:00.0" link_speed="8 GT/s" link_width="-4"/>',
            ("or width is missing or makes", "'-4' in line 3"),
        ),
        (
            '<pci busid="0000:01:00.0" link_speed="8 GT/s" link_width="3"/>',
            ("makes no sense", "'3' in line 3"),
        ),
        ('<pci busid="0000:01:00.0"><gpu dev="0" sm="8.0"/></pci>', ("no compute capability", "sm is '8.0'")),
        (
            gpu("0000:01:00.0", 0, '<nvlink target="0000:41:00.0" count="1000"/>'),
            ("links two GPUs", "'1000'"),
        ),
        (gpu("0000:01:00.0", -1), ("number makes no sense", "dev is '-1'")),
        ('<pci busid="0000:01:00.0"><gpu sm="80"/></pci>', ("number makes no sense", "dev is missing")),
        (gpu("0000:01:00.0", 0, '<nvlink target="gpu1" count="1"/>'), ("target is no PCI address", "'gpu1'")),
        ('<nic><net name="a" speed="1e9"/></nic>', ("speed is missing or makes no sense (speed is '1e9'",)),
        ('<pci busid="0000:01:00.0"><gpu dev="0" mlopart="1"/></pci>', ("attribute mlopart of <gpu>", "'1'")),
        (gpu("0000:01:00.0", 0, "<partition/>"), ("element <partition> is not understood",)),
        ("<accelerator/>", ("element <accelerator> is not understood", "in line 3")),
        (gpu("0000:01:00.0", 0, '<c2c bw="-1" count="8"/>'), ("C2C link's count or bandwidth", "left out")),
    ],
)
def test_nonsense_about_one_device_is_noted_and_the_machine_is_read(body, words):
    first = gpu("0000:41:00.0", 7)
    machine = nccl_xml.parse(f'<system version="1">\n<cpu numaid="0">\n{body}{first}\n</cpu>\n</system>')
    assert noted(machine, *words), machine.notes
    assert any(device.pci_bus_id == "0000:41:00.0" for device in machine.gpus)
    assert matrix(nccl_xml.parse(nccl_xml_write.format_xml(machine))) == matrix(machine)


def test_a_mask_that_is_none_is_noted():
    text = f'<system version="1"><cpu numaid="0" affinity="N">{gpu("0000:01:00.0", 0)}</cpu></system>'
    assert noted(
        nccl_xml.parse(text.replace("N", "0-15")), "affinity is no mask (affinity is '0-15' in line 1)"
    )
    assert not noted(nccl_xml.parse(text.replace("N", "00000000,000000ff")), "no mask")


def test_a_cpu_whose_numa_node_is_not_known_is_none():
    text = f'<system version="1"><cpu numaid="N" affinity="0000000f">{gpu("0000:01:00.0", 0)}</cpu></system>'
    for numaid in ("-1", "x", "70000"):
        machine = nccl_xml.parse(text.replace('"N"', f'"{numaid}"'))
        assert noted(machine, "node is not known")
        assert machine["numa_nodes"] == [] and machine["numa_node"] == {0: None}
        assert "NUMA" not in repr(machine)
        row = render.format_matrix(machine, legend=False).splitlines()[1].split()
        assert row == ["GPU0", "X", "0-3", "N/A", "N/A"]
    hexadecimal = nccl_xml.parse(text.replace('"N"', '"0x1F"'))  # as NCCL reads numbers in any base
    assert hexadecimal["numa_node"] == {0: "cpu31"}


@pytest.mark.parametrize(
    ("speed", "gb_per_s"), [("200000", 25.0), ("200000000", 25.0), ("400000000000", 50.0), ("0", 0.0)]
)
def test_the_speed_of_a_nic_in_any_unit(speed, gb_per_s):
    nic = f'<pci busid="0000:03:00.0"><nic><net name="eth0" dev="0" speed="{speed}"/></nic></pci>'
    machine = nccl_xml.parse(document(nic))
    assert machine.devices(DeviceKind.NIC)[0].ports[0].speed_gb_per_s == gb_per_s
    assert noted(machine, "too large for Mbit/s") == (float(speed) > 1e7)


def test_gpus_at_one_address_are_kept_apart():
    link = '<xgmi target="0000:{}:00.0" count="1" tclass="0x038000"/>'
    one, other = link.format("0a"), link.format("0b")
    inside = "".join(
        f'<pci busid="0000:{bus}:00.0" class="0x038000"><gpu dev="{dev}" gcn="gfx942">{to}</gpu></pci>'
        for dev, (bus, to) in enumerate([("0a", other), ("0a", other), ("0b", one), ("0b", one)])
    )
    machine = nccl_xml.parse(document(inside))
    assert len(machine.gpus) == 4 and noted(machine, "same address; they are kept apart", "2 times")
    assert noted(machine, "links are shared out")
    assert sorted(len(peers) for peers in machine["nvlink_peers"].values()) == [1, 1, 1, 1]
    assert make_plan(machine).bandwidth_gb_per_s > 0
    two = nccl_xml.parse(
        document('<pci busid="0000:0a:00.0"><gpu dev="0" sm="100"/><gpu dev="1" sm="100"/></pci>')
    )
    assert [gpu.index for gpu in two.gpus] == [0, 1] and noted(two, "shares its PCI device with another")


def test_a_bridge_that_is_listed_for_each_of_its_devices_is_one():
    part = '<pci busid="0000:c5:00.0" class="0x060400">{}</pci>'
    machine = nccl_xml.parse(
        document(part.format(gpu("0000:cf:00.0", 0)) + part.format(gpu("0000:d0:00.0", 1)))
    )
    assert len(machine.devices(DeviceKind.PCIE_SWITCH)) == 1 and matrix(machine)["GPU0"]["GPU1"] == "PIX"
    assert noted(machine, "a PCI bridge is listed more than once")


def test_devices_outside_the_usual_place_are_read():
    nic = '<nic><net name="eth0" dev="0" speed="100000"/></nic>'
    inside = nic + '<gpu dev="1" sm="80"/>' + gpu("0000:02:00.0", 0)
    bridge = f'<pci busid="0000:01:00.0" class="0x060400">{inside}</pci>'
    machine = nccl_xml.parse(document(bridge + '<gpu dev="2" sm="80"/>'))
    assert machine["gpus"] == [0, 1, 2] and len(machine["nics"]) == 1
    cells = matrix(machine)
    assert (cells["GPU0"]["GPU1"], cells["GPU0"]["NIC0"], cells["GPU0"]["GPU2"]) == ("PIX", "PIX", "PHB")
    assert make_plan(machine).order == (0, 1, 2)


def test_a_target_may_be_the_number_of_a_gpu():
    pair = gpu("0000:01:00.0", 0, '<nvlink target="1" count="4"/>') + gpu("0000:02:00.0", 1)
    assert matrix(nccl_xml.parse(document(pair)))["GPU0"]["GPU1"] == "NV4"


@pytest.mark.parametrize(
    ("sm", "said"), [("70", True), ("80", True), ("90", True), ("103", True), ("89", False), ("120", False)]
)
def test_gpus_that_should_have_nvlinks_and_name_none(sm, said):
    inside = gpu("0000:01:00.0", 0) + gpu("0000:02:00.0", 1)
    machine = nccl_xml.parse(document(inside.replace('sm="80"', f'sm="{sm}"')))
    assert noted(machine, "links may be missing") == said
    single = nccl_xml.parse(document(gpu("0000:01:00.0", 0)))
    assert not noted(single, "links may be missing")


def test_the_links_of_a_superchip():
    chip = gpu("000f:01:00.0", 0, '<c2c bw="43125" count="8"/>')
    machine = nccl_xml.parse(document(chip))
    link = machine.link("gpu0", "cpu0")
    assert (link.kind, link.bandwidth_gb_per_s, link.count) == (LinkKind.C2C, 345.0, 8)
    assert nccl_xml.parse(nccl_xml_write.format_xml(machine)) == machine


def test_trays_of_one_nvlink_domain():
    hidden = '<nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/>'
    trays = "".join(
        f'<cpu host_hash="0x{tray}" numaid="{node}">'
        + gpu(f"000{node}:01:00.0", 2 * tray + node, hidden).replace('sm="80"', 'sm="100"')
        + "</cpu>"
        for tray in (1, 2, 3)
        for node in (0, 1)
    )
    machine = nccl_xml.parse(f'<system version="1">{trays}</system>')
    assert len(machine.hosts) == 3 and len(machine.devices(DeviceKind.NVSWITCH)) == 1
    assert set(matrix(machine)["GPU2"].values()) == {"X", "NV18"}
    assert noted(machine, "GPUs of 3 hosts", "one NVLink domain")
    assert make_plan(machine).ratio == pytest.approx(1.0)
    assert nccl_xml.parse(nccl_xml_write.format_xml(machine)) == machine


def test_notes_are_few_whatever_is_in_the_file():
    names = " ".join(f'a{number}="1"' for number in range(500))
    machine = nccl_xml.parse(document(f'<pci busid="0000:01:00.0"><gpu dev="0" {names}/></pci>'))
    assert len(machine.notes) < 50 and noted(machine, "more kinds of notes are left out")


def test_the_fixtures_that_are_none():
    with pytest.raises(TopologyError, match=r"cut_short\.xml, line \d+, column \d+: not well-formed"):
        read(FIXTURES / "cut_short.xml")
    with pytest.raises(TopologyError, match=r"graph_file\.xml, line 1: this is an NCCL graph file"):
        read(FIXTURES / "graph_file.xml")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(
        TopologyError, match=r"none\.xml: cannot be opened as a topology .NCCL's XML.*: No such file"
    ):
        read(tmp_path / "none.xml")
    with pytest.raises(TopologyError, match=r"cannot be opened.*Is a directory"):
        read(tmp_path)
    (tmp_path / "binary.xml").write_bytes(b"<system\xff\x00>")
    with pytest.raises(TopologyError, match="byte 7 is not UTF-8"):
        read(tmp_path / "binary.xml")


def test_bounds_of_size_depth_and_count(tmp_path):
    (tmp_path / "huge.xml").write_bytes(b" " * (MAX_NBYTES + 1))
    with pytest.raises(TopologyError, match="over 8 MiB, which is too large"):
        read(tmp_path / "huge.xml")
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
    first = read(path)
    again = nccl_xml.parse(nccl_xml_write.format_xml(first), path.name)
    assert again == first


@pytest.mark.parametrize("name", preset_names())
def test_presets_written_and_read_have_the_same_matrix_and_bandwidths(name):
    first = preset(name)
    again = nccl_xml.parse(nccl_xml_write.format_xml(first))
    assert matrix(again) == matrix(first)

    def widths(machine):
        """By GPU and kind of link, since the NVSwitches of a domain of several hosts have no addresses."""
        gpus = {gpu.id for gpu in machine.gpus}
        found = Counter()
        for link in machine.links:
            for end in {link.a, link.b} & gpus or {link.kind.value} - {"nvlink"}:
                found[end, link.kind, "speed"] += link.bandwidth_gb_per_s
                found[end, link.kind, "links"] += link.count
        return found

    assert widths(again) == pytest.approx(widths(first))


def test_writing_to_a_file(tmp_path):
    nccl_xml_write.write(preset("dgx-1v"), tmp_path / "out.xml")
    assert matrix(read(tmp_path / "out.xml")) == matrix(preset("dgx-1v"))
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
            read(path)
        return
    machine = read(path)
    assert machine.devices(DeviceKind.CPU)
    assert nccl_xml.parse(nccl_xml_write.format_xml(machine), str(path)) == machine
