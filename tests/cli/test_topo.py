"""``flagcx topo``, where this machine has no GPU."""

from __future__ import annotations

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
