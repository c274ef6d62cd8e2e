"""``flagcx topo``, where this machine has no GPU."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from flagcx.cli.topo import topo
from flagcx.topology import Topology


def test_no_cluster_of_machines_without_gpus(monkeypatch):
    monkeypatch.setattr("flagcx.topology.detect", lambda: Topology([], [], name="bare"))
    made = typer.Typer()
    made.command()(topo)
    result = CliRunner().invoke(made, ["--hosts", "2"])
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith("flagcx topo: --hosts 2 is about machines with GPUs, and <Topology bare")
    assert line.endswith("has none; name one by --preset or --file")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.bmp", "cannot draw to '.bmp'; use .png, .svg or .pdf"),
        ("nowhere/x.png", "cannot be written: there is no such directory"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_told_before_anything_is_printed(tmp_path, name, message):
    made = typer.Typer()
    made.command()(topo)
    result = CliRunner().invoke(made, ["--preset", "dgx-1v", "--plot", str(tmp_path / name)])
    assert (result.exit_code, result.output) == (2, f"flagcx topo: {tmp_path / name}: {message}\n")
