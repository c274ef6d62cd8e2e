"""The matrix of nvidia-smi topo -m: read, checked, printed."""

from itertools import combinations

import pytest

from flagcx.errors import TopologyError
from flagcx.topology import (
    DeviceKind,
    gpu_models,
    matrix,
    nccl_xml_write,
    nvidia_smi,
    preset,
    preset_names,
    read,
    render,
    smi_matrix,
)
from flagcx.topology.cpu_sets import cpu_mask, cpu_ranges
from tests.topology.machines import FIXTURES, SHARED, shared_files
from tests.topology.pastes import CHANGES, P2P, SOURCES

TEXTS = sorted(FIXTURES.glob("*.txt"))
HEAD = "GPU0 GPU1 CPU Affinity NUMA Affinity\n"
PAIR = "GPU0 GPU1\nGPU0 X {}\nGPU1 {} X\n"
#: Machines of which both an XML and a matrix exist.
BOTH = [
    ("perlmutter_4xa100_slingshot", "perlmutter_4xa100_tabs"),
    ("2xh200_nvswitch_vm", "2xh200_nvswitch_vm"),
    ("aws_p4d_8xa100", "aws_p4d_8xa100"),
    ("azure_ncv4_4xa100_pcie", "azure_nc96ads_a100_v4"),
]


def cells_of(path):
    table = smi_matrix.parse_matrix(path.read_text())
    order = [*table.gpus, *(name for name in table.names if name not in table.gpus)]
    return [[table.cells[a, b] for b in order] for a in order]


@pytest.mark.parametrize("path", [*TEXTS, *shared_files("nvidia-smi-topo", "*.txt")])
def test_the_built_machine_has_the_matrix_of_the_text(path):
    built = matrix(read(path))
    assert [list(row.values()) for row in built.values()] == cells_of(path)


@pytest.mark.parametrize("change", CHANGES)
def test_a_paste_says_what_the_text_says(change):
    for text in SOURCES.values():
        expected, found = smi_matrix.parse_matrix(text), smi_matrix.parse_matrix(CHANGES[change](text))
        assert (found.names, found.cells) == (expected.names, expected.cells)
        assert (found.affinity, found.numa) == (expected.affinity, expected.numa)
        if "NIC Legend" in CHANGES[change](text):
            assert found.legend["NIC8"] == "mlx5_bond_8"


def test_files_of_pastes_are_read_as_matrices(tmp_path):
    for change in ("HTML", "fenced", "byte order mark", "carriage returns"):
        (tmp_path / "paste.txt").write_text(CHANGES[change](SOURCES["tabs"]), newline="")
        assert len(read(tmp_path / "paste.txt").gpus) == 8
    xml = (FIXTURES / "switched_4.xml").read_text()
    (tmp_path / "xml.md").write_text(f"The dump:\n```xml\n{xml}\n```\nand GPU0 is slow.\n")
    assert read(tmp_path / "xml.md") == read(FIXTURES / "switched_4.xml")


def test_numa_nodes_are_those_that_the_text_tells():
    uniform = "GPU0 GPU1 GPU2 GPU3\n" + "".join(
        f"GPU{a} " + " ".join("X" if a == b else "NV12" for b in range(4)) + "\n" for a in range(4)
    )
    machine = nvidia_smi.parse(uniform)
    assert len(machine["numa_nodes"]) == 1
    assert any("tells the NUMA node of any device" in note for note in machine.notes)
    nics = (
        "GPU0 GPU1 GPU2 GPU3 NIC0 NIC1\nGPU0 X NV12 NV12 NV12 PIX SYS\nGPU1 NV12 X NV12 NV12 NODE SYS\n"
        "GPU2 NV12 NV12 X NV12 SYS NODE\nGPU3 NV12 NV12 NV12 X SYS PIX\n"
    )
    machine = nvidia_smi.parse(nics)
    assert set(machine["numa_node"].values()) == {"cpu0", "cpu1"}
    assert machine["numa_node"][0] == machine["numa_node"][1] != machine["numa_node"][2]
    assert any("2 NICs have no row" in note for note in machine.notes)
    assert matrix(machine)["GPU3"]["NIC1"] == "PIX" and matrix(machine)["NIC1"]["GPU0"] == "SYS"


def test_lists_of_numa_nodes_begin_with_the_nearest():
    machine = nvidia_smi.parse(SOURCES["tray"])
    assert machine["numa_node"] == {0: "cpu0", 1: "cpu0", 2: "cpu1", 3: "cpu1"}
    assert nvidia_smi.parse(SOURCES["workstation"])["numa_node"] == {
        0: "cpu0",
        1: "cpu0",
        2: "cpu0",
        3: "cpu1",
    }


def test_the_generation_is_given_or_named_or_guessed_and_said():
    text = SOURCES["tray"]
    guessed = nvidia_smi.parse(text)
    assert guessed.link("gpu0", "nvswitch0").bandwidth_gb_per_s == pytest.approx(18 * 20.6)
    assert any("B200, B300, GB200 and GB300 have 40.1: name the model" in note for note in guessed.notes)
    named = nvidia_smi.parse("GPU 0: NVIDIA GB200 (UUID: GPU-1)\n" + text)
    assert named.link("gpu0", "nvswitch0").bandwidth_gb_per_s == pytest.approx(18 * 40.1)
    assert nvidia_smi.parse(text, sm=gpu_models.compute_capability("b300")) == nvidia_smi.parse(text, sm=103)
    with pytest.raises(TopologyError, match="GPU model 'H900' is not known; known are P100"):
        gpu_models.compute_capability("H900")


def test_only_a_table_of_p2p_is_no_topology():
    with pytest.raises(TopologyError, match="the only table is that of 'nvidia-smi topo -p2p'"):
        nvidia_smi.parse(P2P)


def test_the_table_of_rocm_smi_is_refused_by_name():
    text = "== Link Type between two GPUs ==\n     GPU0  GPU1\nGPU0 0     XGMI\nGPU1 XGMI  0\n"
    with pytest.raises(TopologyError, match=r"rocm-smi or amd-smi, .* expected RCCL's topology XML"):
        nvidia_smi.parse(text)


def test_a_process_without_a_nodes_cpus_sees_no_affinity():
    """As in a job of few cores: the next column is not taken for the empty one."""
    text = (
        "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
        "GPU0\t X \tNV4\tNODE\t0-3,8\t0\t\tN/A\nGPU1\tNV4\t X \tNODE\t\t1\t\tN/A\n"
        "NIC0\tNODE\tNODE\t X \t\t\t\t\n"
    )
    for pasted in (text, text.expandtabs(8)):
        found = smi_matrix.parse_matrix(pasted)
        assert (found.affinity, found.numa) == ({"GPU0": "0-3,8"}, {"GPU0": "0", "GPU1": "1"})


def test_gpus_with_some_links_down_are_behind_switches_too():
    """As pairs say: each as many as the one of the two that has fewer."""
    cells = [["NV18" if {a, b} <= {0, 1, 3} else "NV16" for b in range(4)] for a in range(4)]
    rows = [f"GPU{a} " + " ".join("X" if a == b else cells[a][b] for b in range(4)) for a in range(4)]
    machine = nvidia_smi.parse("\n".join(["GPU0 GPU1 GPU2 GPU3", *rows]))
    assert [machine.link(f"gpu{n}", "nvswitch0").count for n in range(4)] == [18, 18, 16, 18]


def test_a_matrix_without_nvlinks_by_its_command_is_noted():
    text = "$ nvidia-smi topo -mp\n" + PAIR.format("NODE", "NODE")
    assert any("topo -mp', which leaves NVLinks out" in note for note in nvidia_smi.parse(text).notes)


def test_what_the_text_cannot_tell_is_said():
    notes = read(FIXTURES / "switched_nics_4.txt").notes
    assert any("does not name the GPU; by its 12 NVLinks" in note for note in notes)
    assert any("more than a GPU has; taken for NVSwitches" in note for note in notes)
    assert any("has no bandwidths" in note for note in notes)
    hidden = read(FIXTURES / "pairs_tabs_8.txt").notes
    assert any("NVLink hides the PCIe tree between GPUs (4 pairs)" in note for note in hidden)


def test_direct_links_and_switches_are_told_apart():
    cube = read(FIXTURES / "cube_mesh_8.txt")
    assert not cube.devices(DeviceKind.NVSWITCH)
    assert cube.link("gpu0", "gpu3").bandwidth_gb_per_s == 40.0
    switched = read(FIXTURES / "switched_nics_4.txt")
    assert len(switched.devices(DeviceKind.NVSWITCH)) == 1
    assert switched.link("gpu0", "nvswitch0").bandwidth_gb_per_s == 240.0
    assert switched.devices(DeviceKind.NIC)[1].name == "mlx5_3"


def test_the_capability_can_be_given():
    machine = nvidia_smi.parse(PAIR.format("NV18", "NV18"), sm=100)
    assert machine.link("gpu0", "gpu1").bandwidth_gb_per_s == pytest.approx(18 * 40.1)


def test_the_old_word_for_sys_and_colour_codes():
    machine = nvidia_smi.parse("\x1b[4m" + PAIR.format("SOC", "SOC").replace("\n", "\x1b[0m\n"))
    assert matrix(machine)["GPU0"]["GPU1"] == "SYS"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.txt: no line names GPU0, GPU1, ... as columns; expected the output of 'nvidia-smi topo -m'"),
        ("GPU0 GPU1\nGPU0 X NV1\n", "t.txt: no row for GPU1; is the text cut short"),
        ("GPU0 GPU1\nGPU0 X NV1\nGPU1 NV1\n", "t.txt, line 3: 1 cells for GPU1; expected 2"),
        (HEAD + "GPU0 X NV1 0-7 0\nGPU1 NV1 0-7 0\n", "t.txt, line 3: 1 cells for GPU1; expected 2"),
        ("GPU0 GPU1\nGPU0 X NV1\nGPU1 NVl X\n", "line 3: 'NVl' from GPU1 to GPU0; expected X, NV#"),
        ("GPU0 GPU1\nGPU0 X NVl\nGPU1 NV1 X\n", "line 2: 'NVl' from GPU0 to GPU1; expected X, NV#"),
        (PAIR.format("NV1000", "NV1000"), "line 2: 'NV1000' from GPU0 to GPU1; expected at most 99 links"),
        ("GPU0 GPU1 ...\nGPU0 X NV1 ...\nGPU1 NV1 X ...\n", "line 1: '...' among the columns; expected the"),
        (
            "GPU0 GPU1 CPU Affinity GPU0 GPU1\n" + PAIR[10:].format("PIX", "PIX"),
            "line 1: 'CPU' among the columns",
        ),
        (PAIR.format("NVX", "NVX"), "line 2: 'NVX' from GPU0 to GPU1; expected X, NV#"),
        (PAIR.format("NV2", "NV4"), "GPU0 to GPU1 is NV2, and GPU1 to GPU0 is NV4; expected the same"),
        (PAIR.format("X", "X"), "GPU0 to GPU1 is X, which a device only is to itself"),
        ("GPU0 GPU1\nGPU0 SYS SYS\nGPU1 SYS X\n", "GPU0 to itself is SYS; expected X"),
        ("GPU0 GPU0\nGPU0 X X\n", "2 columns of which some repeat"),
        (
            PAIR.format("SYS", "SYS") + "GPU1 PHB X\n",
            "line 4: a second row for GPU1, with PHB to GPU0; the first has SYS",
        ),
        (
            PAIR.format("SYS", "SYS") + "GPU7 SYS X\n",
            "line 4: a row called 'GPU7', and there is no such column",
        ),
        (
            "GPU0 GPU1 GPU2\nGPU0 X PIX PIX\nGPU1 PIX X SYS\nGPU2 PIX SYS X\n",
            "the matrix is not that of a machine: GPU1 to GPU2 says SYS, and the other cells say PIX",
        ),
    ],
)
def test_what_is_no_matrix_is_refused_with_file_place_and_reason(text, message):
    with pytest.raises(TopologyError, match=message) as caught:
        nvidia_smi.parse(text, "t.txt")
    assert str(caught.value).startswith("t.txt")


@pytest.mark.parametrize("name", [name for name in preset_names() if len(preset(name).hosts) == 1])
def test_what_is_printed_reads_back_to_the_same_matrix(name):
    machine = preset(name)
    again = nvidia_smi.parse(render.format_matrix(machine))
    assert matrix(again) == matrix(machine)


def test_the_print_has_affinities_and_the_legend():
    machine = read(FIXTURES / "switched_4.xml")
    text = render.format_matrix(machine)
    rows = text.splitlines()
    assert rows[0].split()[:5] == ["GPU0", "GPU1", "GPU2", "GPU3", "NIC0"]
    assert rows[3].split() == ["GPU2", "NV18", "NV18", "X", "NV18", "SYS", "PHB", "16-31", "1", "N/A"]
    assert "NV#  =" in text and "NIC0: mlx5_0+mlx5_1" in text
    assert "Legend" not in render.format_matrix(machine, legend=False)


def test_masks_and_ranges():
    assert cpu_ranges("00000000,ff0000ff") == "0-7,24-31"
    assert cpu_ranges("not a mask") == ""

    for ranges in ("0", "0-31,64-95", "5,7-9,130"):
        assert cpu_ranges(cpu_mask(ranges)) == ranges


@pytest.mark.parametrize(("xml", "text"), BOTH)
def test_the_matrix_from_a_machines_xml_is_that_of_its_nvidia_smi(xml, text):
    first = SHARED / "nccl-topology-xml" / f"{xml}.xml"
    second = SHARED / "nvidia-smi-topo" / f"{text}.txt"
    if not (first.exists() and second.exists()):
        pytest.skip("no files of real machines beside the checkout")
    derived, shown = matrix(read(first)), matrix(read(second))
    gpus = [name for name in shown if name.startswith("GPU")]
    assert len(gpus) >= 2
    for a, b in combinations(gpus, 2):
        assert derived[a][b] == shown[a][b], (a, b)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8", "utf-8-sig"])
def test_files_as_systems_redirect_output_to_them(tmp_path, encoding):
    """PowerShell writes UTF-16 with a mark; some editors leave the mark out."""
    text = "\tGPU0\tGPU1\tCPU Affinity\r\nGPU0\t X \tNV12\t0-15\r\nGPU1\tNV12\t X \t0-15\r\n"
    path = tmp_path / "topo.txt"
    path.write_bytes(text.encode(encoding))
    assert read(path).notes == nvidia_smi.parse(text, "topo").notes
    assert matrix(read(path)) == matrix(nvidia_smi.parse(text))
    xml = tmp_path / "topo.xml"
    xml.write_bytes(nccl_xml_write.format_xml(preset("dgx-1v")).encode(encoding))
    assert matrix(read(xml)) == matrix(preset("dgx-1v"))


def test_bytes_that_are_no_text_are_refused(tmp_path):
    for name, data, word in (("a", b"GPU0\xff\x00", "UTF-8"), ("b", b"\xff\xfeG", "UTF-16")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(TopologyError, match=f"byte \\d is not {word}; expected a topology"):
            read(tmp_path / name)


def test_prompts_in_the_encodings_of_other_systems(tmp_path):
    path, text = tmp_path / "topo.txt", "\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV12\t X \n"
    for prompt, encoding in (("größe>", "cp1252"), ("[用户@服务器 ~]$", "gbk"), ("サーバ:~$", "shift-jis")):
        path.write_bytes(f"{prompt} nvidia-smi topo -m\n{text}".encode(encoding))
        assert matrix(read(path)) == matrix(nvidia_smi.parse(text))


def test_more_cells_than_columns_and_old_words():
    with pytest.raises(TopologyError, match="line 2: more cells for GPU0 than the 2 columns"):
        nvidia_smi.parse("GPU0 GPU1\nGPU0 X NV1 PIX\nGPU1 NV1 X PIX\n")
    board = smi_matrix.parse_matrix(PAIR.format("PSB", "PSB"))
    assert board.cells["GPU0", "GPU1"] == "PIX"


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (
            HEAD + "GPU0 X SYS 0-15 0\nGPU1 SYS X 0-15 0\n",
            "devices of one affinity are SYS apart by their cells; the cells are taken (GPU0 and GPU1)",
        ),
        (
            HEAD + "GPU0 X NODE 0-15 0\nGPU1 NODE X 16-31 1\n",
            "devices of one NUMA node by their cells have different affinities; the cells are taken "
            "(GPU0 and GPU1)",
        ),
    ],
)
def test_texts_that_contradict_themselves_are_noted(text, note):
    machine = nvidia_smi.parse(text)
    assert note in machine.notes
    assert not any(
        "affinit" in one
        for one in nvidia_smi.parse(
            text.replace("16-31 1", "0-15 0").replace("SYS X 0-15 0", "SYS X 16-31 1")
        ).notes
    )


@pytest.mark.parametrize("cell", ["NV4", "PIX", "NODE"])
def test_the_numa_column_is_taken_before_the_cpus(cell):
    """As a process sees them that may run on a few cores only."""
    text = HEAD + f"GPU0 X {cell} 0-7 1\nGPU1 {cell} X 8-15 1\n"
    machine = nvidia_smi.parse(text)
    assert machine["numa_node"] == {0: "cpu1", 1: "cpu1"}
    assert machine.device("cpu1").attribute("affinity") == "0000ffff"
    note = "NUMA affinity and CPU affinity contradict each other; NUMA's is taken (GPU0 and GPU1)"
    assert note in machine.notes
    assert not any("affinit" in one for one in nvidia_smi.parse(text.replace("8-15", "0-7")).notes)
    apart = nvidia_smi.parse(HEAD + "GPU0 X NV4 0-7 1\nGPU1 NV4 X 0-7 0\n")
    assert apart["numa_node"] == {0: "cpu1", 1: "cpu0"} and note in apart.notes


def test_a_node_keeps_the_number_that_the_text_gives_it():
    machine = nvidia_smi.parse(HEAD + "GPU0 X SYS N/A N/A\nGPU1 SYS X 0-7 0\n")
    assert machine["numa_node"] == {0: "cpu1", 1: "cpu0"}


def test_a_model_other_than_the_text_names_is_noted():
    text = "GPU 0: NVIDIA H100 80GB HBM3\nGPU0 GPU1\nGPU0 X NV18\nGPU1 NV18 X\n"
    other, same = (nvidia_smi.parse(text, sm=sm).notes for sm in (103, 90))
    assert any("the one that was given, 103, is taken" in note for note in other)
    assert not any("is taken" in note for note in same)


def test_a_header_in_a_line_that_begins_as_a_legend_does():
    matrix = smi_matrix.parse_matrix("Legend: GPU0 GPU1\nGPU0 X NV4\nGPU1 NV4 X\n")
    assert matrix.cells["GPU0", "GPU1"] == "NV4"
    with pytest.raises(TopologyError, match="no row for GPU0"):
        smi_matrix.parse_matrix("Legend: GPU0")
