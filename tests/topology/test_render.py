"""Text, JSON values, rich and HTML tables, and pictures."""

import io
import itertools
import json
import sys
from dataclasses import replace
from functools import cache

import pytest

from flagcx.errors import ArgumentError, MissingDependencyError, TopologyError
from flagcx.topology import (
    Device,
    DeviceKind,
    Topology,
    cluster,
    make_plan,
    nvidia_smi,
    plot_topology,
    preset,
    read,
    render,
)
from tests.topology.machines import FIXTURES


def test_json_has_the_promised_keys_and_survives_json():
    machine = preset("dgx-1v")
    values = json.loads(json.dumps(render.as_dict(machine, make_plan(machine)), allow_nan=False))
    assert {"gpus", "links", "matrix", "rings", "plan_gb_per_s", "bound_gb_per_s"} <= values.keys()
    assert [gpu["index"] for gpu in values["gpus"]] == list(range(8))
    assert values["matrix"]["GPU0"]["GPU3"] == "NV2"
    assert len(values["rings"]) == 2 and sorted(values["rings"][0]["order"]) == list(range(8))
    assert sum(ring["bandwidth_gb_per_s"] for ring in values["rings"]) == pytest.approx(
        values["plan_gb_per_s"]
    )
    assert values["plan_gb_per_s"] <= values["bound_gb_per_s"]
    assert {"a", "b", "kind", "bandwidth_gb_per_s"} <= values["links"][0].keys()


def test_json_of_one_gpu_and_of_none_has_no_infinity():
    machine = preset("dgx-1v")
    one = render.as_dict(machine, make_plan(machine, [0]))
    assert one["plan_gb_per_s"] is None and one["rings"][0]["order"] == [0]
    assert render.as_dict(read(FIXTURES / "classless.xml"), None)["rings"] == []


def test_a_large_matrix_is_left_out():
    machine = cluster(preset("dgx-2"), 8)
    plan = make_plan(machine)
    assert render.as_dict(machine, plan)["matrix"] == {}
    assert "The matrix of over 96 devices is left out." in render.text_report(machine, plan)
    assert "network_switch" in machine._repr_html_()


def test_the_report_has_matrix_plan_and_notes():
    machine = preset("8xa100-pcie")
    text = render.text_report(machine, make_plan(machine))
    assert "GPU0    X   NV12" in text
    assert "all-reduce 9.14 GB/s by algorithm='ring', 57.1% of the bound of 16.00 GB/s" in text
    assert "ring 1: 0 1 2 3 4 5 6 7  9.14 GB/s, 100% of the message, bottleneck" in text
    assert "below the bound: each hop of a ring carries 1.75" in text
    both = render.plan_text(make_plan(preset("dgx-1v")))
    assert (
        "45.71 GB/s by algorithm='ring|ring', 60.6% of the bound" in both
        and "ring 2: 0 4 7 6 5 1 2 3  22.86" in both
    )
    assert render.plan_text(make_plan(machine, [1])) == "Plan: one GPU, nothing to send."
    noted = read(FIXTURES / "static_8.xml")
    assert "Notes:\n  - " in render.text_report(noted, make_plan(noted))


def test_the_report_says_what_the_bound_and_the_speeds_mean():
    report = render.text_report(preset("dgx-h200"), make_plan(preset("dgx-h200")))
    assert (
        "each of 8 GPUs has 18 NVLinks: 370.8 GB/s each way, as NCCL plans with (20.6 a link), 450 by"
        in report
    )
    assert "(the bound of schedules without multicast and without reduction in switches)" in report
    assert "with both in the NVSwitches (NVLS) the bound is 370.80 GB/s" in report
    amd = render.text_report(preset("8xmi300x"), make_plan(preset("8xmi300x")))
    assert "has 7 xGMI links: 336 GB/s each way, as NCCL plans with (48 a link), 448 by the data sheet" in amd
    assert "NVLS" not in amd
    assert "192.00 GB/s by algorithm='two_shot', 100.0% of the bound" in amd and "ring 1" not in amd
    assert "every GPU with every other at once, bottleneck gpu0 -> gpu1 (xgmi, 48 GB/s, loaded 0.25 x)" in amd
    assert render.as_dict(preset("8xmi300x"), make_plan(preset("8xmi300x")))["rings"] == []
    pair = nvidia_smi.parse("GPU0 GPU1\nGPU0 X PIX\nGPU1 PIX X\n")
    text = render.plan_text(make_plan(pair))
    assert "the generation of PCIe is not known: 12.00 GB/s (bound 12.00) with generation 3 to 48.00" in text
    values = render.as_dict(preset("hgx-b200"), make_plan(preset("hgx-b200")))
    assert values["nvls_bound_gb_per_s"] == pytest.approx(721.8)
    assert (values["gpus"][0]["link_count"], values["gpus"][0]["links_spec_gb_per_s"]) == (18, 900.0)


def test_rich_and_html_show_the_matrix():
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=200, record=True, file=io.StringIO())
    console.print(preset("dgx-1v"))
    text = console.export_text()
    assert "NV2" in text and "GPU7" in text and "NUMA" in text
    page = preset("dgx-1v")._repr_html_()
    assert page.count("<tr>") == 1 + 8 + 4 and "NV2</td>" in page


def test_html_escapes_what_a_file_says():
    nasty = Topology([Device("gpu0", DeviceKind.GPU, 0)], [], name="<script>", notes=["<b>"])
    assert "<script>" not in nasty._repr_html_() and "&lt;script&gt;" in nasty._repr_html_()


# -- pictures


@cache
def picture(name):
    """The picture of a preset, which no test changes."""
    return plot_topology(preset(name))


@pytest.mark.parametrize(
    ("name", "ending"), [("4xpcie", "png"), ("dgx-1v", "svg"), ("dgx-2", "png"), ("8xa100-pcie", "svg")]
)
def test_pictures_are_drawn(tmp_path, name, ending):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"out.{ending}"
    plot_topology(preset(name), path)
    start = path.read_bytes()[:5]
    assert start == (b"\x89PNG\r" if ending == "png" else b"<?xml")


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_an_exchange_is_drawn_without_a_ring():
    pytest.importorskip("matplotlib")
    machine = preset("8xmi300x")
    plan = make_plan(machine)
    figure, ring = (
        plot_topology(machine, plan=plan),
        plot_topology(machine, plan=replace(plan, exchange=None)),
    )
    assert "by an exchange of all with all (two_shot): 192.0 GB/s, 100% of the bound" in figure_text(figure)
    assert "two_shot: every GPU with every other at once, 192.0 GB/s" in figure_text(figure)
    assert len(ring.axes[0].patches) - len(figure.axes[0].patches) == 8, "the hops of the ring"


def figure_text(figure):
    """All words of a picture: its title, what stands in it, and the legend."""
    legends = [legend for axes in figure.axes if (legend := axes.get_legend()) is not None]
    parts = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    parts += [text for legend in legends for text in legend.get_texts()]
    return "\n".join(
        [text.get_text() for text in parts] + [axes.get_title(loc="left") for axes in figure.axes]
    )


def test_every_gpu_stands_in_ring_order_and_apart():
    pytest.importorskip("matplotlib")
    machine = preset("dgx-1v")
    plan = make_plan(machine)
    axes = plot_topology(machine, plan=plan).axes[0]
    place = {text.get_text(): text.get_position() for text in axes.texts}
    row = sorted((name for name in place if name.startswith("GPU")), key=lambda name: place[name][0])
    assert row == [f"GPU{gpu}" for gpu in plan.rings[0].order]
    gaps = [place[b][0] - place[a][0] for a, b in itertools.pairwise(row)]
    assert min(gaps) >= 0.9
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert any(text.startswith("ring 1: ") for text in legend) and any("NVLink" in text for text in legend)


def place_of(figure):
    """(x, y) by label of what stands in the drawing."""
    return {text.get_text().partition("\n")[0]: text.get_position() for text in figure.axes[0].texts}


def arrows(figure):
    import matplotlib.patches as patches

    found = [patch for patch in figure.axes[0].patches if isinstance(patch, patches.FancyArrowPatch)]
    return [patch for patch in found if patch.get_zorder() == 3]


@pytest.mark.parametrize("name", ["8xmi250x", "dgx-a100", "dgx-2", "8xmi300x"])
def test_numa_nodes_stand_in_order_and_above_their_gpus(name):
    pytest.importorskip("matplotlib")
    machine = preset(name)
    place = place_of(picture(name))
    nodes = [label for label in place if label.startswith("NUMA")]
    assert sorted(nodes, key=lambda label: place[label][0]) == sorted(nodes, key=lambda label: int(label[5:]))
    row = sorted(machine["gpus"], key=lambda gpu: place[f"GPU{gpu}"][0])
    numbers = [machine["numa_node"][gpu] for gpu in row]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("name", ["dgx-1v", "dgx-2", "8xmi250x", "gb200-nvl72", "dgx-a100"])
def test_no_two_labels_of_a_picture_overlap(name):
    pytest.importorskip("matplotlib")
    figure = picture(name)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert not [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]


def test_the_picture_draws_the_plan_that_it_names():
    pytest.importorskip("matplotlib")
    machine = preset("dgx-1v")
    both = picture("dgx-1v")
    assert "all-reduce over 8 GPUs by a ring both ways round (ring|ring): 45.7 GB/s" in title(both)
    assert len(arrows(both)) == 8 and {str(arrow.get_arrowstyle())[:30] for arrow in arrows(both)}
    assert all(type(arrow.get_arrowstyle()).__name__ == "CurveFilledAB" for arrow in arrows(both))
    some = plot_topology(machine, plan=make_plan(machine, [0, 3, 2]))
    assert "all-reduce over 3 GPUs" in title(some) and len(arrows(some)) == 3
    one = picture("dgx-a100")
    assert "by one ring (ring)" in title(one)
    assert all(type(arrow.get_arrowstyle()).__name__ == "CurveFilledB" for arrow in arrows(one))
    part = picture("gb200-nvl72")
    assert "72 GPUs" in title(part) and "14 more hosts" in title(part) and len(arrows(part)) == 17


def title(figure):
    return figure.axes[0].get_title(loc="left")


def test_numbers_of_links_are_told_apart():
    pytest.importorskip("matplotlib")
    legend = picture("dgx-1v").axes[0].get_legend()
    shown = dict(zip([text.get_text() for text in legend.get_texts()], legend.get_lines(), strict=True))
    thin = shown["NV1: NVLink, 20 GB/s each way"]
    thick = shown["NV2: NVLink, 40 GB/s each way"]
    assert thick.get_linewidth() >= 2 * thin.get_linewidth() and thick.get_alpha() > thin.get_alpha()


def test_the_matrix_stands_beside_the_picture():
    pytest.importorskip("matplotlib")
    figure = picture("dgx-1v")
    assert len(figure.axes) == 2
    cells = [text.get_text() for text in figure.axes[1].texts]
    assert cells.count("NV2") == 16 and cells.count("X") == 12 and "NIC3" in cells
    assert len(picture("gb200-nvl72").axes) == 1


def test_boards_and_sockets_are_bars():
    pytest.importorskip("matplotlib")
    labels = texts(picture("dgx-2"))
    assert labels.count("6 NVSwitches: 6 NVLinks, 120 GB/s each way for each GPU") == 2
    assert "48 NVLinks, 960 GB/s" in labels
    assert "between any two NUMA nodes: 16 GB/s each way" in texts(picture("8xmi250x"))


def test_what_is_not_drawn_is_said():
    pytest.importorskip("matplotlib")
    large = plot_topology(cluster(preset("dgx-a100"), 8))
    assert "not drawn: 16 NUMA nodes without devices, 4 more hosts" in large.axes[0].get_title(loc="left")
    container = plot_topology(read(FIXTURES / "hidden_switch_2.xml"))
    assert "1 interfaces without a PCI place" in container.axes[0].get_title(loc="left")
    assert "GPU0" in texts(container)


def test_a_machine_without_gpus_can_be_drawn_and_nothing_cannot():
    pytest.importorskip("matplotlib")
    assert texts(plot_topology(Topology([Device("cpu0", DeviceKind.CPU, 0)], []))) == ["NUMA 0"]
    with pytest.raises(TopologyError, match="has no device that can be drawn"):
        plot_topology(Topology([], []))


def test_a_picture_can_go_onto_given_axes():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    assert plot_topology(preset("4xpcie"), ax=axes) is axes.figure


def test_bad_files_are_refused_before_anything_is_drawn(tmp_path):
    with pytest.raises(ArgumentError, match=r"cannot draw to '.gif'; use .png, .svg or .pdf"):
        plot_topology(preset("4xpcie"), tmp_path / "out.gif")
    pytest.importorskip("matplotlib")
    with pytest.raises(ArgumentError, match="cannot be written: there is no such directory"):
        plot_topology(preset("4xpcie"), tmp_path / "none" / "out.png")


def test_without_matplotlib_the_pip_command_is_told(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"needs matplotlib.*pip install 'flagcx\[plot\]'"):
        plot_topology(preset("4xpcie"))


def test_a_notebook_shows_the_picture():
    figure = picture("dgx-1v")
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_machine_is_drawn_by_name():
    pytest.importorskip("matplotlib", reason="drawing needs matplotlib")
    assert texts(plot_topology("dgx-1v")) == texts(picture("dgx-1v"))
    with pytest.raises(TopologyError, match="no preset 'dgx-1x'; there are"):
        plot_topology("dgx-1x")
    with pytest.raises(ArgumentError, match=r"topology=5 is no topology; expected a Topology, such as"):
        plot_topology(5)
