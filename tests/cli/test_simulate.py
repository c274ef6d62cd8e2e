"""``flagcx simulate``, by its function in a small application of our own, and sizes as they are typed."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from flagcx.cli.simulate import simulate
from flagcx.cli.sizes import machine_for, parse_nbytes
from flagcx.errors import ArgumentError, TopologyError
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


def test_a_cluster_a_file_and_pieces(call, tmp_path):
    values = json.loads(call("-t", "dgx-h100", "-n", 20, "-a", "hierarchical", "-b", "1M", "--json").stdout)
    assert values["topology"] == "dgx-h100 x 3" and values["candidate"] == "hierarchical in 3 groups"
    file = tmp_path / "machine.xml"
    file.write_text(nccl_xml_write.format_xml(preset("dgx-1v")))
    arguments = ("-t", file, "-c", "broadcast", "-a", "chain", "-b", "16M", "--json")
    assert json.loads(call(*arguments).stdout)["pieces"] > 1
    assert json.loads(call(*arguments, "-k", 3).stdout)["pieces"] == 3


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
            ("-t", "dgx-1v", "-a", "ring", "-b", "1M", "--plot", "/nonexistent/x.png"),
            "/nonexistent/x.png: cannot be written: No such file",
        ),
        (("-t", "dgx-1v", "-a", "ring|rung", "-b", "1M"), "algorithm='rung' does not serve allreduce"),
        (("-t", "dgx-1v", "-a", "bruck|bruck", "-b", "1M"), "which does the same as once"),
        (("-t", "dgx-1v", "-a", "ring|ring", "-b", "1M", "-k", 2), "is not pipelined, got --pieces 2"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(call, arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2 and message in result.output
    assert result.output.count("\n") == 1


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


def test_machines():
    assert len(machine_for("dgx-1v", None).gpus) == len(machine_for("dgx-1v", 3).gpus) == 8
    assert len(machine_for("dgx-1v", 9).gpus) == 16
    with pytest.raises(TopologyError, match="presets are 8xa100-pcie"):
        machine_for("nowhere.xml", 2)
