"""``flagcx explain``, by its function in a small application of our own."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from flagcx.cli import COMMANDS, application
from flagcx.cli.explain import explain


@pytest.fixture
def call():
    made = typer.Typer()
    made.command()(explain)
    return lambda *arguments: CliRunner().invoke(made, [str(argument) for argument in arguments])


def test_the_choice_as_json(call):
    result = call("allreduce", "--nbytes", "64MiB", "--topology", "dgx-a100", "--ranks", 8, "--json")
    values = json.loads(result.stdout)
    assert values["nbytes"] == 64 << 20 and values["size"] == 8
    assert values["chosen"] == values["candidates"][0]["name"] and values["reason"]
    times = [one["predicted_us"] for one in values["candidates"] if not one["obstacle"]]
    assert times == sorted(times)
    obstacles = {one["name"]: one["obstacle"] for one in values["candidates"] if one["protocol"]}
    assert obstacles["two_shot (peer_memory)"] == "" and "too long" in obstacles["one_shot (peer_packets)"]


def test_the_choice_as_a_table(call):
    result = call("broadcast", "-b", "1M", "-t", "8xa100-pcie")
    assert result.exit_code == 0
    assert "broadcast of 1 MiB, 8 ranks on 8xa100-pcie" in result.stdout
    assert "chosen" in result.stdout and "next comes" in " ".join(result.stdout.split())


def test_this_machine_is_asked(call):
    result = call("alltoall", "-b", "1K", "-n", 3, "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert (values["collective"], values["nbytes"], values["size"]) == ("alltoall", 1024, 3)
    assert values["topology"].startswith("shared memory of ") and values["chosen"] == "direct"
    assert {one["name"] for one in values["candidates"]} >= {"direct", "bruck", "pairwise"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--share-gpu",), "--share-gpu was given without --gpu"),
        (("--gpu", "-t", "dgx-a100"), "leave out --topology"),
    ],
)
def test_options_that_do_not_go_together(call, options, message):
    result = call("allreduce", "-b", "1M", *options)
    assert result.exit_code == 2 and message in result.output


def test_what_is_wrong_is_told_in_a_line(call):
    result = call("sum", "-b", "1M")
    assert result.exit_code == 2 and "collective='sum' is not known" in result.output
    result = call("sum", "-b", "1M", "-t", "dgx-a100")
    assert result.exit_code == 2 and "collective='sum' is not known" in result.output


def test_both_commands_are_on_the_command_line():
    assert {"simulate", "explain"} <= set(COMMANDS)
    for name in ("simulate", "explain"):
        help_text = CliRunner().invoke(application(name), [name, "--help"]).output
        assert "--topology" in help_text
