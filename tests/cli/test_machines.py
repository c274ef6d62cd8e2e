"""The options about machines, which every command that takes a machine has."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from flagcx.cli.explain import explain
from flagcx.cli.simulate import simulate
from flagcx.errors import TopologyError
from flagcx.topology import machine_for

PASTE = "GPU0 GPU1\nGPU0 X NV18\nGPU1 NV18 X\n"
CALLS = {
    "explain": (explain, ("allreduce", "--nbytes", "1G")),
    "simulate": (simulate, ("--algorithm", "ring", "--nbytes", "1G")),
}


@pytest.fixture(params=CALLS)
def call(request):
    command, arguments = CALLS[request.param]
    made = typer.Typer()
    made.command()(command)
    return lambda *more: CliRunner().invoke(made, [*arguments, "--json", *map(str, more)])


def time_us(result) -> float:
    values = json.loads(result.stdout)
    return values.get("time_us") or next(
        one["predicted_us"] for one in values["candidates"] if one["name"] == "ring"
    )


def test_what_a_file_does_not_say(call, tmp_path):
    file = tmp_path / "post.txt"
    file.write_text(PASTE, encoding="utf-8")
    guessed, named = call("-t", file), call("-t", file, "--gpu-model", "B300")
    assert time_us(named) < 0.7 * time_us(guessed)
    assert named.stdout == call("-t", file, "--sm", 103).stdout
    slow, quick = (call("-t", file, "-n", 4, "--network-gb-per-s", speed) for speed in (10, 50))
    assert time_us(quick) < 0.5 * time_us(slow)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sm", 90, "--gpu-model", "H100"), "--sm and --gpu-model were both given"),
        (("--sm", 90), "are about a file that does not name its GPUs, and dgx-1v does"),
        (("--network-gb-per-s", 25), "this is one host: <Topology dgx-1v"),
        (("--network-gb-per-s", -1, "--ranks", 9), "network_gb_per_s is -1"),
    ],
)
def test_what_makes_no_sense(call, arguments, message):
    result = call("-t", "dgx-1v", *arguments)
    assert result.exit_code == 2 and message in result.output


def test_options_about_a_machine_need_one():
    made = typer.Typer()
    made.command()(explain)
    result = CliRunner().invoke(made, ["allreduce", "-b", "1M", "--gpu-model", "H100"])
    assert result.exit_code == 2 and "are about a machine named by --topology" in result.output


def test_machines():
    assert len(machine_for("dgx-1v", None).gpus) == len(machine_for("dgx-1v", 3).gpus) == 8
    assert len(machine_for("dgx-1v", 9).gpus) == 16
    with pytest.raises(TopologyError, match="presets are 8xa100-pcie"):
        machine_for("nowhere.xml", 2)
