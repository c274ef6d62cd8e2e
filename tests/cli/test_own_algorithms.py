"""``--load`` for every command that takes algorithms, with the example that is written from scratch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flagcx as fc
from flagcx.algorithms import catalogue, unregister
from flagcx.cli import application
from flagcx.cli.own_algorithms import load_algorithms
from tests.bootstrap.processes import bare_environment

TORUS = Path(__file__).parents[2] / "examples" / "torus.py"


@pytest.fixture
def call():
    """Runs a command; what it loads is removed after the test."""
    yield lambda *words: CliRunner().invoke(application(words[0]), list(map(str, words)))
    for known in catalogue():
        if not known.trusted:
            unregister(str(known.algorithm), known.collective)


def test_explain_predicts_an_own_algorithm_after_those_that_it_may_choose(call):
    result = call("explain", "allreduce", "-b", "1M", "-t", "dgx-a100", "-n", 4, "--load", TORUS, "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    (torus,) = [one for one in values["candidates"] if one["named_only"]]
    assert torus["name"] == "torus" and torus["steps"] == 4 and torus["predicted_us"] > 0
    assert values["chosen"] != "torus" and not torus["obstacle"]
    text = call("explain", "allreduce", "-b", "1M", "-t", "dgx-a100", "-n", 4, "--load", TORUS).stdout
    assert "x; registered by the user: taken where a call names it" in text


def test_explain_says_why_an_own_algorithm_cannot_serve(call):
    fc.register("fours", "allreduce", _of_four)
    found = _explained(5)
    assert (found.obstacle, found.predicted_us) == ("four ranks alone, not 5", None)
    assert _explained(4).predicted_us > 0


def _of_four(size):
    if size != 4:
        raise fc.ArgumentError(f"four ranks alone, not {size}")
    from flagcx.algorithms.ring import ring_allreduce

    return ring_allreduce(size)


def _explained(size):
    """The row of "fours" in what a communicator of ``size`` processes would say."""
    from types import SimpleNamespace

    from flagcx.selection.candidates import Request
    from flagcx.selection.explain import explain_call
    from flagcx.selection.rules import HostRules, choose_on_host

    transport = SimpleNamespace(
        name="shared_memory", cross_memory=True, modelled=True, protocols=lambda *call: ("slots",)
    )
    request = Request("allreduce", 1 << 20, size)
    rows = explain_call(request, choose_on_host(request), HostRules(transport), {}).rows
    return next(row for row in rows if row.name == "fours")


def test_simulate_and_draw(call, tmp_path):
    options = ("-t", "dgx-a100", "-b", "64M", "-n", 16, "--load", TORUS)
    assert "16 ranks on dgx-a100 x 2" in call("simulate", "-a", "torus", *options).stdout
    table = call("draw", "allreduce", "torus", "-n", 4, "--load", TORUS).stdout
    assert table.startswith("allreduce, torus: 4 ranks, 4 chunks\nrank | step 0")
    picture = tmp_path / "torus.svg"
    result = call("draw", "allreduce", "torus", "-n", 9, "--load", TORUS, "-o", picture)
    assert result.exit_code == 0 and picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("allreduce", "rign"), "'rign' does not serve allreduce; expected one of ring, "),
        (
            ("allreduce", "torus", "-n", "5", "--load", str(TORUS)),
            "a square torus has 1, 4, 9, 16, ... ranks",
        ),
        (("allreduce", "ring", "--load", "nowhere.py"), "--load nowhere.py: there is no such file"),
    ],
)
def test_what_cannot_be_drawn(call, words, message):
    result = call("draw", *words)
    assert result.exit_code == 2 and message in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "it registers no algorithm; expected calls of fc.register"),
        ("1 / 0", "it raised ZeroDivisionError: division by zero"),
        ("import flagcx as fc\nfc.register('ring', 'allreduce', lambda size: None)", "'ring' already"),
    ],
)
def test_files_that_register_nothing(tmp_path, text, message):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(fc.ArgumentError, match=message):
        load_algorithms([tmp_path / "mine.py"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("bench", "-n", "4", "-a", "torus", "-b", "64", "-e", "64", "--rounds", "1"),
            "# Out of bounds values : 0",
        ),
        (("explain", "allreduce", "-n", "4", "-b", "1M"), "taken where a call names it"),
    ],
)
def test_ranks_load_the_file_too(words, expected):
    command = [sys.executable, "-m", "flagcx.cli", *words, "--load", str(TORUS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=bare_environment())
    assert ended.returncode == 0 and expected in ended.stdout, ended.stderr


@pytest.mark.slow
def test_the_example_runs():
    command = [sys.executable, "-m", "flagcx.cli", "run", "-n", "4", str(TORUS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=bare_environment())
    assert ended.returncode == 0, ended.stderr
    assert "allreduce of 64 MiB by torus, 16 ranks on dgx-a100 x 2" in ended.stdout
    assert "rank 3: every element is 10, expected 10" in ended.stdout
