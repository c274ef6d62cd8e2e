"""``flagcx explain``, by its function in a small application of our own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from flagcx.cli import COMMANDS, application
from flagcx.cli.explain import explain
from tests.bootstrap.processes import bare_environment


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


def test_hosts_that_are_not_there(call):
    values = json.loads(
        call("allreduce", "-b", "64MiB", "--hosts", "2,2", "--link", "0.125,50", "--json").stdout
    )
    assert values["size"] == 4 and values["chosen"] == "hierarchical" and values["topology"] == "2 hosts"
    assert 530_000 < values["candidates"][0]["predicted_us"] < 600_000


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--hosts", "4"), "--hosts '4'; expected the ranks of two hosts or more, such as 4,4"),
        (("--hosts", "4,x"), "--hosts '4,x'; expected"),
        (("--hosts", "1,1", "--link", "fast"), "is no link; expected GB/s"),
        (("--hosts", "1,1", "-n", "2"), "--hosts says how many ranks there are"),
    ],
)
def test_hosts_that_cannot_be(call, options, told):
    result = call("allreduce", "-b", "1K", *options)
    assert result.exit_code != 0 and told in " ".join(result.output.split())


def test_the_choice_as_a_table(call):
    result = call("broadcast", "-b", "1M", "-t", "8xa100-pcie")
    assert result.exit_code == 0
    assert "broadcast of 1 MiB, 8 ranks on 8xa100-pcie" in result.stdout
    assert "chosen" in result.stdout and "next comes" in " ".join(result.stdout.split())


def test_into_a_pipe_no_row_is_cut(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = call("allreduce", "-b", "64MiB", "-t", "dgx-1v", "-n", 9).stdout.splitlines()
    (chosen,) = [line for line in lines if line.endswith("<- chosen")]
    assert chosen.startswith("chain in 64 pieces along 0,3,2,1,5,6,7,4,...  ") and " 9453.9 " in chosen
    (second,) = [line for line in lines if line.endswith("  1.15 x")]
    assert (
        second.startswith("ring along 0,3,2,1,5,6,7,4,...  ")
        and "  113.8 MiB  " in second
        and " 92% " in second
    )


def test_a_narrow_terminal_gets_every_column():
    ours, theirs = os.openpty()
    words = "-m flagcx.cli explain allreduce -b 64M -t dgx-1v -n 9"
    with subprocess.Popen(
        [sys.executable, *words.split()],
        env=bare_environment(COLUMNS="60", TERM="xterm"),
        stdout=theirs,
        stderr=subprocess.DEVNULL,  # where a terminal has the progress
    ) as process:
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):
            while data := os.read(ours, 4096):
                text += data
    os.close(ours)
    assert process.returncode == 0
    lines = re.sub(r"\x1b\[\d*m", "", text.decode()).splitlines()
    assert max(map(len, lines)) <= 60
    assert any(line.endswith(" 9453.9 <- chosen") for line in lines)
    assert any(line.endswith("10838.1 1.15 x") and "113.8 MiB" in line for line in lines)
    assert lines[1].split() == ["candidate", "steps", "sent/rank", "busiest", "predicted"]


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
