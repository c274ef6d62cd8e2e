"""Commands that start ranks: without a GPU, and interrupted by Ctrl-C."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from flagcx.cli.start_ranks import count_ranks, reporting_errors
from flagcx.errors import ArgumentError, LaunchError, PeerDiedError, ResourceError
from tests.bootstrap.processes import bare_environment, is_alive, wait_until


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
@pytest.mark.parametrize(
    "words", [("bench", "-n", "2"), ("tune", "-n", "8"), ("explain", "allreduce", "-b", "1K", "-n", "2")]
)
def test_without_cupy_a_line_tells_how_to_get_it(words):
    done = subprocess.run(
        [sys.executable, "-m", "flagcx.cli", *words, "--gpu"],
        env=bare_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"flagcx {words[0]}: GPU arrays need CuPy, which is not installed: pip install cupy"
    )


def test_how_many_ranks(monkeypatch):
    runtime = SimpleNamespace(getDeviceCount=lambda: 2)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr("flagcx.kernels.cuda.load_cupy", lambda: cupy)
    assert count_ranks(0, False, False) == count_ranks(None, False, False) == len(os.sched_getaffinity(0))
    assert count_ranks(5, False, False) == count_ranks(5, True, True) == 5
    assert count_ranks(0, True, False) == count_ranks(2, True, False) == 2
    with pytest.raises(
        ResourceError, match="3 ranks and 2 visible GPUs; start at most 2, or add --share-gpu"
    ):
        count_ranks(3, True, False)
    with pytest.raises(ArgumentError, match="--share-gpu was given without --gpu"):
        count_ranks(3, False, True)


@pytest.mark.parametrize(
    ("cause", "line"),
    [
        (ArgumentError("what is wrong"), "what is wrong"),
        (PeerDiedError("gone"), "rank 1 raised it\n\nTraceback"),
    ],
)
def test_where_an_error_was_raised_is_told_if_that_says_more(cause, line, capsys):
    with pytest.raises(typer.Exit) as ended, reporting_errors("bench"):
        raise LaunchError("rank 1 raised it\n\nTraceback", rank=1) from cause
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == f"flagcx bench: {line}\n"


def children(pid):
    """The processes that a process has started, of any of its threads."""
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "-n", "2", "-b", "64", "-e", "64", "--rounds", "100000"),
        ("tune", "-n", "2", "-o", "table.json"),
    ],
)
@pytest.mark.parametrize("moment", ["as ranks start", "at work"])
def test_ctrl_c_ends_all_without_noise(words, moment, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-m", "flagcx.cli", *words],
        env=bare_environment(XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(tmp_path)),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_until(lambda: len(children(process.pid)) == 2, timeout_s=20)
            ranks = children(process.pid)
            if moment == "at work":
                wait_until(
                    lambda: all("numpy" in Path(f"/proc/{rank}/maps").read_text() for rank in ranks), 20
                )
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130
    assert errors.endswith(f"\nflagcx {words[0]}: interrupted\n")
    assert "Traceback" not in errors and "KeyboardInterrupt" not in errors
    # One that was being started as the signal came ends by its guard, a moment after the launcher.
    wait_until(lambda: not any(map(is_alive, ranks)), timeout_s=5)
    assert list(tmp_path.iterdir()) == []
