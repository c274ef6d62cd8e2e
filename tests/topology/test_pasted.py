"""Matrices of nvidia-smi as people type, cut, mark and translate them: read right, or with a note."""

import re

import pytest

from flagcx.errors import TopologyError
from flagcx.topology import matrix, nccl_xml_write, nvidia_smi, render, smi_matrix

HEAD = "GPU0 GPU1 CPU Affinity NUMA Affinity\n"
PAIR = "GPU0 GPU1\nGPU0 X {}\nGPU1 {} X\n"


def test_further_matrices_are_told_of():
    """With what the others say, so that nobody takes one machine for another."""
    pair, alone = PAIR.format("NV4", "NV4"), "GPU0\nGPU0 X\n"
    for others, told in (
        ([pair], "2 matrices; that in line 1 is read, and the one in line 5 is the same"),
        ([PAIR.format("PIX", "PIX")], "the one in line 5 says PIX from GPU0 to GPU1, not NV4"),
        (
            ["GPU0 GPU1 GPU2\n" + "GPU0 X NV4 NV4\nGPU1 NV4 X NV4\nGPU2 NV4 NV4 X\n"],
            "has 3 GPUs and 0 NICs, not 2",
        ),
        ([alone], "the one in line 5 has 1 GPUs and 0 NICs, not 2 GPUs and 0 NICs"),
        ([pair.replace("GPU1", "GPU7")], "the one in line 5 has other names of devices"),
        ([HEAD + "GPU0 X NV4 0-7 1\nGPU1 NV4 X 0-7 1\n"], "the one in line 5 has another CPU affinity"),
        (
            [PAIR.format("NV4", "NV6"), pair],
            "3 matrices; that in line 1 is read, and the table in line 5 is left out (GPU0 to GPU1 is NV4, "
            "and GPU1 to GPU0 is NV6; expected the same); the one in line 9 is the same",
        ),
    ):
        notes = nvidia_smi.parse("\n".join([pair, *others])).notes
        assert any(note.startswith("the text has") and told in note for note in notes), notes


def test_the_legend_is_that_of_the_matrix_that_is_read():
    texts = [f"GPU0 NIC0\nGPU0 X PIX\nNIC0 PIX X\n\nNIC Legend:\n\n  NIC0: mlx5_{n}\n" for n in range(2)]
    assert smi_matrix.parse_matrix("\n".join(texts)).legend == {"NIC0": "mlx5_0"}


def test_rows_after_the_table_are_told_of_where_they_differ():
    text = PAIR.format("NV4", "NV4")
    for sentence in ("Sorry, GPU1 is really:", "GPU1 is really:", "GPU0 and GPU1, measured again:"):
        notes = nvidia_smi.parse(f"{text}\n{sentence}\nGPU1 NV6 X\n").notes
        assert notes[-1] == "1 rows apart from the table are left out; that in line 6 says NV6 X for GPU1"
    assert not any("apart from" in note for note in nvidia_smi.parse(f"{text}\nAgain:\nGPU1 NV4 X\n").notes)
    assert matrix(nvidia_smi.parse(text + "GPU1 NV4 X\n"))["GPU0"]["GPU1"] == "NV4"  # twice the same
    columns = nvidia_smi.parse(f"{text}\nNIC0\nGPU0 PIX\nGPU1 SYS\n").notes[-1]
    assert columns == "2 rows apart from the table are left out; that in line 6 says PIX for GPU0"
    before = nvidia_smi.parse(f"GPU1 NV6 X\nis right, this is wrong:\n{text}").notes[-1]
    assert before == "1 rows apart from the table are left out; that in line 1 says NV6 X for GPU1"
    numa = nvidia_smi.parse(
        HEAD + "GPU0 X NV4 0-7 0\nGPU1 NV4 X 8-15 1\n\nSorry:\nGPU1 NV4 X 8-15 0\n"
    ).notes[-1]
    assert numa == "1 rows apart from the table are left out; that in line 6 says NV4 X 8-15 0 for GPU1"
    page = nvidia_smi.parse(f"{text}\nGPU7 PIX X\n").notes[-1]
    assert page == "1 rows apart from the table are left out; that in line 5 says PIX X for GPU7"


HEADINGS = "CPU Affinity NUMA Affinity GPU NUMA ID"


@pytest.mark.parametrize(
    ("before", "headings"),
    [
        (" ", "CPUAffinity NUMAAffinity GPUNUMAID"),
        ("", HEADINGS),
        ("", "CPUAffinityNUMAAffinityGPUNUMAID"),
        (" ", HEADINGS.lower()),
        ("", HEADINGS.upper()),
        (" ", "CPU_Affinity NUMA_Affinity GPU_NUMA_ID"),
        (" ", "CPU-Affinity, NUMA-Affinity, GPU-NUMA-ID"),
        (" ", "CPU    Affinity    NUMA    Affinity    GPU    NUMA    ID"),
        (" ", "cpuAffinity numaAffinity gpuNumaId"),
    ],
)
def test_headings_in_any_spelling(before, headings):
    text = (
        f"GPU0 GPU1 NIC0{before}{headings}\nGPU0 X SYS PIX 16-31,48-63 1 N/A\n"
        "GPU1 SYS X SYS 0-15 0 N/A\nNIC0 PIX SYS X\n"
    )
    found = smi_matrix.parse_matrix(text)
    assert found.names == ["GPU0", "GPU1", "NIC0"] and not found.notes
    assert found.affinity == {"GPU0": "16-31,48-63", "GPU1": "0-15"}
    assert found.numa == {"GPU0": "1", "GPU1": "0"}


@pytest.mark.parametrize(
    "headings",
    [
        "CPU \u4eb2\u548c\u6027 NUMA \u4eb2\u548c\u6027 GPU NUMA ID",
        "Afinidad de CPU Afinidad de NUMA ID de NUMA de GPU",
        "CPU-Affinit\u00e4t NUMA-Affinit\u00e4t GPU-NUMA-ID",
    ],
)
def test_translated_headings_are_read_with_a_note(headings):
    found = smi_matrix.parse_matrix(f"GPU0 GPU1 {headings}\nGPU0 X SYS 16-31 1 N/A\nGPU1 SYS X 0-15 0 N/A\n")
    assert (found.affinity["GPU0"], found.numa) == ("16-31", {"GPU0": "1", "GPU1": "0"})
    assert any("headings that are not known" in note and "taken as cpu, numa" in note for note in found.notes)


@pytest.mark.parametrize(
    ("words", "affinity", "numa", "note"),
    [
        (
            "0-7 16-23 0",
            None,
            None,
            "more words after a device's cells than headings; its affinities are left out",
        ),
        (
            "0 to 7 0",
            None,
            None,
            "words after a device's cells are no numbers; its affinities may be incomplete",
        ),
        (
            "7-Jan 0",
            None,
            "0",
            "words after a device's cells are no numbers; its affinities may be incomplete",
        ),
    ],
)
def test_affinities_that_fit_no_heading_are_noted(words, affinity, numa, note):
    found = smi_matrix.parse_matrix(HEAD + f"GPU0 X SYS {words}\nGPU1 SYS X 8-15 1 <- the slow one\n")
    assert (found.affinity.get("GPU0"), found.numa.get("GPU0")) == (affinity, numa)
    assert (found.affinity["GPU1"], found.numa["GPU1"], found.notes) == ("8-15", "1", [note])


@pytest.mark.parametrize(
    ("cpus", "numa", "note"),
    [
        ("15-8", "0", "a CPU affinity is no list of CPUs (15-8)"),
        ("8-99999", "0", "a CPU affinity is no list of CPUs (8-99999)"),
        ("0-7", "-1", "a NUMA affinity is no node's number (-1)"),
    ],
)
def test_affinities_that_make_no_sense_are_noted(cpus, numa, note):
    assert note in nvidia_smi.parse(HEAD + f"GPU0 X NV4 {cpus} {numa}\nGPU1 NV4 X {cpus} {numa}\n").notes


def test_a_sentence_right_below_the_table_is_no_row():
    for sentence in ("GPU0 X is slow", "GPU1 is the culprit"):
        assert not any("row" in n for n in nvidia_smi.parse(PAIR.format("NV4", "NV4") + sentence).notes)


@pytest.mark.parametrize(
    "mark",
    [
        "\u00b9",
        "\u2460",
        "\u207d\u00b9\u207e",
        "\u1d43",
        "\u2020",
        "\u20202",
        "*2",
        "*",
        "<sup>1</sup>",
        "[1]",
        " [1]_",
        "[^1]",
        "(a)",
        "^1^",
        "(4 links)",
        " (slow)",
        '<a href="#fn1">1</a>',
    ],
)
def test_footnotes_are_no_digits(mark):
    text = f"GPU0{mark} GPU1 CPU Affinity{mark}\nGPU0 X NV2{mark} 0-7\nGPU1{mark} NV2 X{mark} 0-7{mark}\n"
    for pasted in (text, text.replace("NV2", "PIX")):
        assert matrix(nvidia_smi.parse(pasted))["GPU0"]["GPU1"] == ("NV2" if "NV2" in pasted else "PIX")
        assert smi_matrix.parse_matrix(pasted).affinity == {"GPU0": "0-7", "GPU1": "0-7"}


def test_numbers_in_circles_and_what_is_struck_out():
    assert matrix(nvidia_smi.parse(PAIR.format("NV\u2461", "NV\u2082")))["GPU0"]["GPU1"] == "NV2"
    assert matrix(nvidia_smi.parse(PAIR.format("NV\uff12\u00b9", "NV2")))["GPU0"]["GPU1"] == "NV2"
    for old in ("<del>NV1</del> ", "~~NV1~~ "):
        assert matrix(nvidia_smi.parse(PAIR.format(f"{old}NV2", "NV2")))["GPU0"]["GPU1"] == "NV2"
    for unclear, word in (
        ("NV2#1", "NV2#1"),
        ("NV2<i>1</i>", "NV2?1"),
        ("NV2 (NV1)", "NV2 (NV1)"),
        ("NV2?", "NV2?"),
        ("NV2/NV4", "NV2/NV4"),
        ("NV4 -> NV2", "NV4 ->"),
        ("NV2 [-NV4-]", "[-NV4-]"),
    ):
        column = "GPU2" if word.startswith("[") else "GPU1"
        with pytest.raises(TopologyError, match=f"line 2: '{re.escape(word)}' from GPU0 to {column}"):
            smi_matrix.parse_matrix(f"GPU0 GPU1 GPU2\nGPU0 X {unclear} NV2\n")


UPPER = "GPU0 X NV4 SYS 0-7 0\nGPU1 {0} X PIX 0-7 0\nNIC0 {0} {0} X\n"
LOWER = "GPU0 X {0} {0} 0-7 0\nGPU1 NV4 X {0} 0-7 0\nNIC0 SYS PIX X\n"


@pytest.mark.parametrize("rows", [UPPER, LOWER])
@pytest.mark.parametrize("blank", ["", "-", "N/A", "\u2014"])
def test_half_a_matrix_is_completed_with_a_note(rows, blank):
    text = "GPU0 GPU1 NIC0 CPU Affinity NUMA Affinity\n" + rows.format(blank)
    for pasted in (text, text.replace(" X", " -")) if blank == "-" else (text, text.replace(" ", "\t")):
        found = smi_matrix.parse_matrix(pasted)
        assert found.cells["GPU1", "GPU0"] == "NV4" and found.cells["GPU0", "NIC0"] == "SYS"
        assert found.numa == {"GPU0": "0", "GPU1": "0"}
        assert any("cells are blank, the first from" in note for note in found.notes)


def test_a_blank_cell_is_taken_from_the_other_half():
    for text in (
        "\tGPU0\tGPU1\tGPU2\nGPU0\tX\t\tSYS\nGPU1\tPIX\tX\tSYS\nGPU2\tSYS\tSYS\tX\n",
        "| | GPU0 | GPU1 | GPU2 |\n|-|-|-|-|\n| GPU0 | X | | SYS |\n| GPU1 | PIX | X | SYS |\n"
        "| GPU2 | SYS | SYS | X |\n",
    ):
        found = smi_matrix.parse_matrix(text)
        assert found.cells["GPU0", "GPU1"] == "PIX"
        assert found.notes == [
            "1 cells are blank, the first from GPU0 to GPU1; those of the other half of the matrix are taken"
        ]


def test_nics_may_stand_before_gpus():
    text = (
        "NIC0 roceo1 GPU0 GPU1\nNIC0 X SYS PIX SYS\nroceo1 SYS X SYS PIX\n"
        "GPU0 PIX SYS X SYS\nGPU1 SYS PIX SYS X\n"
    )
    found = matrix(nvidia_smi.parse(text))
    assert found["NIC0"]["GPU0"] == "PIX" and found["NIC1"]["GPU1"] == "PIX"


@pytest.mark.parametrize("rows", ["0123", "2031", "3210"])
@pytest.mark.parametrize("columns", ["2031", "3210", "20a31b", "ab3210"])
def test_columns_and_rows_in_any_order_are_those_of_one_machine(columns, rows):
    """Cells and NUMA nodes belong to the names at their row and column, wherever these stand."""
    names = {**{n: f"GPU{n}" for n in "0123"}, "a": "NIC1", "b": "NIC0"}
    near = {"01": "NV1", "02": "NV2", "12": "NV3", "13": "NV4", "23": "NV5"}
    near |= {"0b": "PIX", "1b": "NODE", "2a": "PIX", "3a": "NODE"}
    cells = {(a, b): near.get(a + b) or near.get(b + a, "SYS") for a in names for b in names}
    lines = [" ".join([*(names[column] for column in columns), "NUMA Affinity"])]
    for row in [*rows, *sorted(set(columns) - set(rows))]:
        numa = {"0": "0", "1": "0", "2": "1", "3": "1"}.get(row, "")
        lines.append(" ".join([names[row], *("X" if row == c else cells[row, c] for c in columns), numa]))
    machine = nvidia_smi.parse("\n".join(lines) + "\n")
    found = matrix(machine)
    assert all(found[names[a]][names[b]] == cells[a, b] for a in columns for b in columns if a != b)
    assert machine["numa_node"] == {0: "cpu0", 1: "cpu0", 2: "cpu1", 3: "cpu1"}


FEWER = (
    "fewer values after a device's cells than headings, and nothing tells which are left out; only a list of "
    "CPUs is taken"
)
OWN = "the text gives no number to some NUMA nodes; flagcx numbers them itself: 0, 1"
UNKNOWN = "nothing that was read tells the NUMA node of {}; those that no SYS sets apart are put below one"
THREE = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]


def sockets(headings, *values, separate="\t".join, cell="SYS"):
    """A matrix of two GPUs, of two NUMA nodes by their cell, with values below headings."""
    lines = [["", "GPU0", "GPU1", *headings]]
    for number, row in enumerate(values):
        lines.append([f"GPU{number}", *(("X", cell) if number == 0 else (cell, "X")), *row])
    return "\n".join(map(separate, lines)) + "\n"


def aligned(words):
    return "".join(word.ljust(15) for word in words)


def spaced(words):
    return "  ".join(filter(None, words))


def piped(words):
    return f"| {' | '.join(words)} |"


@pytest.mark.parametrize(
    ("separate", "clear"),
    [("\t".join, True), (aligned, True), (piped, True), (spaced, False)],
)
@pytest.mark.parametrize(
    ("headings", "values"),
    [
        (THREE, [("0-15", "", "2"), ("16-31", "", "3")]),
        (THREE, [("", "4", "6"), ("", "5", "7")]),
        (THREE, [("", "4", ""), ("", "5", "")]),
        (THREE, [("", "", "6"), ("", "", "7")]),
        (THREE, [("0-15", "4", ""), ("16-31", "5", "")]),
        (["GPU NUMA ID", "NUMA Affinity"], [("6", ""), ("7", "")]),
        (["CPU Affinity", "NUMA Affinity"], [("", "4"), ("", "5")]),
    ],
)
def test_a_blank_value_is_not_filled_by_the_next(headings, values, separate, clear):
    """Where tabs, marks or headings tell which value is blank; else only what is certain is read."""
    found = smi_matrix.parse_matrix(sockets(headings, *values, separate=separate))
    columns = dict(zip(headings, zip(*values, strict=True), strict=True))
    read = {"CPU Affinity": found.affinity, "NUMA Affinity": found.numa, "GPU NUMA ID": found.memory}
    for heading, texts in columns.items():
        if clear or heading == "CPU Affinity":
            assert read[heading] == {f"GPU{n}": text for n, text in enumerate(texts) if text}, heading
        else:
            assert not read[heading]
    assert found.notes == ([] if clear else [FEWER, FEWER])


@pytest.mark.parametrize(
    ("headings", "values", "cell", "notes"),
    [
        (
            ["NUMA Affinity"],
            [("0-1",), ("2-3",)],
            "SYS",
            ["several nodes; the first is taken (2 times, first"],
        ),
        (["NUMA node"], [("node4",), ("Node 5",)], "SYS", []),
        (THREE[:2], [("0-7", "-1"), ("8-15", "-1")], "SYS", ["no node's number (-1)", OWN]),
        (THREE[:2], [("0-7", "N/A"), ("8-15", "N/A")], "SYS", [OWN]),
        (THREE[:1], [("0-7",), ("8-15",)], "SYS", [OWN]),
        (THREE[:2], [("0-7", "0"), ("8-15", "0")], "SYS", ["the cells are taken", "itself: 1"]),
        (THREE[:2], [("0-7", "0"), ("8-15", "0")], "NV4", ["NUMA's is taken"]),
        (THREE[:2], [("0-7", "0"), ("0-7", "1")], "NV4", ["NUMA's is taken"]),
        (THREE[:2], [("0-7", "0"), ("", "")], "NV4", [UNKNOWN.format("GPU1")]),
        ([], [(), ()], "NV4", [UNKNOWN.format("any device"), "itself: 0"]),
    ],
)
def test_notes_on_numa_nodes_are_true(headings, values, cell, notes):
    usual = ("text does not name the GPU", "NVLink hides the PCIe", "text has no bandwidths")
    given = nvidia_smi.parse(sockets(headings, *values, cell=cell)).notes
    found = [note for note in given if not any(words in note for words in usual)]
    assert len(found) == len(notes) and all(a in b for a, b in zip(notes, found, strict=True)), found


def test_the_numa_nodes_of_gpus_memory_are_shown():
    machine = nvidia_smi.parse(sockets(THREE, ("0-7", "0", "4"), ("8-15", "1", "5")))
    rows = [line.split() for line in render.format_matrix(machine, legend=False).splitlines()]
    assert [row[-3:] for row in rows[1:]] == [["0-7", "0", "4"], ["8-15", "1", "5"]]
    assert "numa_id" not in nccl_xml_write.format_xml(machine)


def test_names_of_nics_in_a_table_and_named_twice():
    text = "GPU0 NIC0\nGPU0 X PIX\nNIC0 PIX X\n\n| NIC | name |\n|---|---|\n| NIC0 | mlx5_7 |\n"
    assert smi_matrix.parse_matrix(text).legend == {"NIC0": "mlx5_7"}
    twice = smi_matrix.parse_matrix(f"{text}\nNIC Legend:\n\n  NIC0: mlx5_3\n")
    assert twice.legend == {"NIC0": "mlx5_7"}
    assert twice.notes == ["the text names NIC0 twice, mlx5_7 and mlx5_3; the first is taken"]
