"""``flagcx simulate``, by its function in a small application of our own, and sizes as they are typed."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from flagcx.cli.simulate import simulate
from flagcx.cli.sizes import parse_nbytes
from flagcx.errors import ArgumentError
from flagcx.topology import nccl_xml_write, preset


@pytest.fixture
def call():
    application = typer.Typer()
    application.command()(simulate)
    return lambda *arguments: CliRunner().invoke(application, [str(argument) for argument in arguments])


def test_a_ring_as_json_and_text(call):
    arguments = ("-t", "dgx-a100", "-n", 8, "-a", "ring", "-b", "64MiB", "--network-only")
    values = json.loads(call(*arguments, "--json").stdout)
    expected = 14 * 0.6 + 14 * (64 << 20) / 8 / 240e3
    assert values["time_us"] == pytest.approx(expected)
    assert values["busbw_gb_per_s"] == pytest.approx((64 << 20) / expected / 1000 * 14 / 8)
    assert values["steps"] == 14 and values["links"][0]["kind"] == "nvlink"
    assert sum(link["nbytes"] for link in values["links"]) == pytest.approx(2 * 14 * (64 << 20))
    text = call(*arguments).stdout
    assert "steps 14" in text and "less busy links" in text


def test_hosts_that_are_not_there(call):
    """A ring along four hosts of one rank, as a call that names it cuts it; and a hierarchy."""
    asked = ("--hosts", "1,1,1,1", "--link", "0.125,50", "-b", "64MiB")
    ring = json.loads(call("-a", "ring", *asked, "--json").stdout)
    assert ring["steps"] == 6 * ring["pieces"] and ring["topology"] == "4 hosts" and ring["ranks"] == 4
    assert ring["time_us"] == pytest.approx(6 * (50 * ring["pieces"] + (16 << 20) / 125), rel=0.05)
    assert ring["links"][0]["kind"] == "network" and ring["sent_nbytes"] == 6 * (16 << 20)
    text = call("-a", "hierarchical", "--hosts", "2,2", "--link", "0.125,50", "-b", "64MiB").stdout
    assert "allreduce, hierarchical" in text and "4 ranks on 2 hosts" in text and "host0 -> switch" in text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "which machine? Name one by --topology, or hosts by --hosts"),
        (("--hosts", "2,2", "-t", "dgx-a100"), "--topology and --hosts exclude each other"),
        (("--hosts", "2,2", "-n", 4), "with --hosts go --collective,"),
        (("--hosts", "2,2", "--plot", "a.png"), "with --hosts go --collective,"),
        (("--hosts", "2"), "expected the ranks of two hosts or more"),
        (("--hosts", "40,40"), "the model is of 2 to 64 ranks"),
    ],
)
def test_hosts_that_cannot_be(call, options, told):
    result = call("-a", "ring", "-b", "1M", *options)
    assert result.exit_code == 2 and told in result.stderr


def test_several_machines_are_taken_in_words(call):
    asked = call("-t", "dgx-1v", "-n", 99, "-a", "ring", "-b", "1M")
    assert asked.stderr == (
        "99 ranks need more than the 8 GPUs of dgx-1v: 13 of it are taken, joined by their network\n"
    )
    assert "99 ranks on dgx-1v x 13" in asked.stdout
    assert call("-t", "dgx-1v", "-n", 8, "-a", "ring", "-b", "1M").stderr == ""


def test_a_cluster_a_file_and_pieces(call, tmp_path):
    values = json.loads(call("-t", "dgx-h100", "-n", 20, "-a", "hierarchical", "-b", "1M", "--json").stdout)
    assert values["topology"] == "dgx-h100 x 3"
    assert values["candidate"] == "hierarchical in 2 pieces in 3 groups"
    file = tmp_path / "machine.xml"
    file.write_text(nccl_xml_write.format_xml(preset("dgx-1v")))
    arguments = ("-t", file, "-c", "broadcast", "-a", "chain", "-b", "16M", "--json")
    assert json.loads(call(*arguments).stdout)["pieces"] > 1
    assert json.loads(call(*arguments, "-k", 3).stdout)["pieces"] == 3


def test_a_ring_goes_along_the_plan_or_any_order(call):
    """In the planned order, NVLink joins all neighbours of a DGX-1; by index, two of them meet over PCIe."""
    arguments = ("-t", "dgx-1v", "-a", "ring", "-b", "64MiB", "--json")
    plan = json.loads(call(*arguments).stdout)
    index = json.loads(call(*arguments, "--order", "index").stdout)
    assert "along 0,3,2,1,5,6,7,4" in plan["candidate"] and index["candidate"] == "ring"
    assert {link["kind"] for link in plan["links"]} == {"nvlink"}
    assert "pcie" in {link["kind"] for link in index["links"]} and index["time_us"] > 3 * plan["time_us"]
    listed = json.loads(call(*arguments, "--order", "0,4,7,6,5,1,2,3").stdout)
    assert listed["time_us"] == pytest.approx(plan["time_us"])
    tree = call("-t", "dgx-1v", "-a", "tree", "-b", "1M", "--order", "7,6,5,4,3,2,1,0", "--json")
    assert json.loads(tree.stdout)["steps"] > 0
    far = json.loads(call("-t", "dgx-1v", "-n", 128, "-a", "ring", "-b", "64MiB", "--json").stdout)
    assert far["candidate"] == "ring along 0,3,2,1,5,6,7,4,..."


def test_what_explain_prices_without_a_schedule(call):
    from flagcx.selection.explain import explain

    rows = {row.name: row for row in explain("allreduce", 64 << 20, 8, preset("dgx-h200")).rows}
    arguments = ("-t", "dgx-h200", "-n", 8, "-b", "64MiB")
    for name in ("native", "two_shot (peer_memory)"):
        values = json.loads(call(*arguments, "-a", name, "--json").stdout)
        assert values["time_us"] == rows[name].predicted_us and values["steps"] == rows[name].steps
        assert values["low_us"] == rows[name].low_us < values["time_us"] < values["high_us"]
    text = call(*arguments, "-a", "native").stdout
    assert "p10-p90" in text and "a plain call, with launch by the host" in text
    assert json.loads(call("-t", "dgx-h200", "-n", 96, "-b", "1G", "-a", "native", "--json").stdout)["steps"]


def test_a_trace_for_perfetto(call, tmp_path):
    path = tmp_path / "trace.json"
    result = call("-t", "dgx-a100", "-n", 4, "-a", "one_shot", "-b", "1M", "--trace", path, "--json")
    assert result.exit_code == 0 and f"traced to {path}" in result.output
    time_us = json.loads(result.stdout.splitlines()[0])["time_us"]
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1, 2, 3}
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(time_us)
    sent = [event for event in slices if event["name"].startswith("to rank")]
    assert sum(event["args"]["bytes"] for event in sent) == 12 << 20
    assert sum(event["ph"] == "s" for event in events) == sum(event["ph"] == "f" for event in events) == 12
    lines = {}
    for event in sorted(slices, key=lambda event: event["ts"]):
        line = event["pid"], event["tid"]
        assert event["ts"] >= lines.get(line, 0.0) - 1e-9, "what is on one line does not overlap"
        lines[line] = event["ts"] + event["dur"]
    names = [e["args"]["name"] for e in events if e["pid"] == 2 and "name" in e.get("args", {})]
    assert names == [
        "rank 2",
        "local work",
        "sends",
        "receives",
        "sends 2",
        "receives 2",
        "sends 3",
        "receives 3",
    ]


def test_a_picture_is_drawn(call, tmp_path):
    path = tmp_path / "ring.svg"
    result = call("-t", "dgx-1v", "-a", "ring", "-b", "1M", "--plot", path)
    assert result.exit_code == 0
    picture = path.read_text()
    assert picture.startswith("<?xml") and picture.count("<path") > 100


def test_mixes(call):
    """Both ways round a ring at once take half as long, where bandwidth decides."""
    one = ("-t", "dgx-1v", "-n", 4, "-b", "1GiB", "--network-only", "--json", "-a")
    ring, both = (json.loads(call(*one, algorithm).stdout) for algorithm in ("ring", "ring|ring"))
    assert both["algorithm"] == "ring|ring" and both["steps"] == ring["steps"] == 6
    assert both["candidate"] == "ring|ring"
    assert both["time_us"] == pytest.approx(ring["time_us"] / 2, rel=0.01)
    assert both["links_used"] == 2 * ring["links_used"] and both["sent_nbytes"] == ring["sent_nbytes"]
    uneven = json.loads(call(*one, "ring 3/4|two_shot").stdout)
    assert uneven["candidate"] == "ring 3/4|two_shot"
    rooted = json.loads(call(*one, "chain|chain", "-c", "broadcast").stdout)
    assert rooted["candidate"] == "chain|chain"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("-t", "dgx-9", "-a", "ring", "-b", "1M"), "neither a file nor a preset; presets are"),
        (("-t", "dgx-1v", "-a", "round", "-b", "1M"), "algorithm='round' does not serve allreduce"),
        (("-t", "dgx-1v", "-a", "ring", "-b", "many"), "'many' is not a size"),
        (("-t", "dgx-1v", "-a", "two_shot", "-b", "1M", "-k", 2), "is not pipelined, got --pieces 2"),
        (("-t", "dgx-1v", "-a", "ring", "-b", "1M", "-n", 64, "--plot", "x.png"), "expected at most 4000"),
        (("-t", "dgx-1v", "-a", "ring", "-b", "1M", "--plot", "x.bmp"), "cannot draw to '.bmp'; use .png, "),
        (("-t", "dgx-1v", "-a", "ring", "-b", "1M", "--plot", "x"), "cannot draw to 'no ending'; use .png, "),
        (
            ("-t", "dgx-1v", "-a", "ring", "-b", "1M", "--plot", "/dev/null/x.png"),
            "/dev/null/x.png: cannot be written: there is no such directory",
        ),
        (
            ("-t", "dgx-1v", "-a", "ring", "-b", "1M", "--order", "0,1,1,2"),
            "is no order of 8 ranks; expected",
        ),
        (("-t", "dgx-1v", "-a", "ring", "-b", "1M", "--order", "best"), "is no order of 8 ranks; expected"),
        (("-t", "dgx-1v", "-a", "natives (NCCL)", "-b", "1M"), "no model of 'natives (NCCL)' for allreduce"),
        (("-t", "dgx-1v", "-a", "native", "-b", "1M", "--trace", "x.json"), "of a schedule; native has none"),
        (
            ("-t", "4xpcie", "-a", "one_shot (peer_memory)", "-b", "1M"),
            "whether these GPUs reach each other's memory is known on the machine alone",
        ),
        (
            ("-t", "dgx-1v", "-a", "ring", "-b", "1M", "--trace", "/dev/null/x.json"),
            "the trace cannot be written to /dev/null/x.json: Not a directory",
        ),
        (("-t", "dgx-1v", "-a", "ring|rung", "-b", "1M"), "algorithm='rung' does not serve allreduce"),
        (("-t", "dgx-1v", "-a", "bruck|bruck", "-b", "1M"), "which does the same as once"),
        (("-t", "dgx-1v", "-a", "ring|ring", "-b", "1M", "-k", 2), "is not pipelined, got --pieces 2"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(call, arguments, message):
    result = call(*arguments)
    said = [line for line in result.output.splitlines() if "are taken, joined by" not in line]
    assert result.exit_code == 2 and len(said) == 1 and message in said[0]


@pytest.mark.parametrize(
    "text, nbytes",
    [
        ("4096", 4096),
        ("1e6", 10**6),
        ("64MiB", 64 << 20),
        ("64M", 64 << 20),
        ("10MB", 10**7),
        ("1.5KiB", 1536),
        ("2g", 2 << 30),
        (" 0 ", 0),
        ("7B", 7),
    ],
)
def test_sizes(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "M", "1.3", "1e99", "0x10", "64 MiBs", "nan", "9" * 40])
def test_what_is_no_size(text):
    with pytest.raises(ArgumentError, match=r"is not a size|expected a whole number"):
        parse_nbytes(text)
