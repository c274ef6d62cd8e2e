"""The private MPS daemon of a job, with a fake program in its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flagcx._launch.share_gpu import shared_gpu, sharing
from flagcx.errors import LaunchError

FAKE = """#!/bin/sh
if [ "$1" = -d ]; then echo started >> "{log}"; echo "$CUDA_MPS_PIPE_DIRECTORY" >> "{log}"
else cat >> "{log}"; fi
"""


@pytest.fixture
def log(tmp_path, monkeypatch) -> Path:
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(FAKE.format(log=tmp_path / "log"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return tmp_path / "log"


def test_the_daemon_lives_as_long_as_the_job(log):
    with shared_gpu(os.environ) as variables:
        assert variables["FLAGCX_SHARE_GPU"] == "1"
        pipe = variables["CUDA_MPS_PIPE_DIRECTORY"]
        assert os.path.isdir(pipe)
        assert log.read_text().split() == ["started", pipe]
    assert log.read_text().split() == ["started", pipe, "quit"]
    assert not os.path.exists(os.path.dirname(pipe))


@pytest.mark.parametrize(
    ("given", "for_ranks"),
    [("1", "0"), ("3, 5,2", "0,1,2"), ("GPU-5fd1", None), ("", None), ("-1", None), (None, None)],
)
def test_ranks_count_the_gpus_of_the_daemon(log, given, for_ranks):
    environ = {**os.environ, **({} if given is None else {"CUDA_VISIBLE_DEVICES": given})}
    with shared_gpu(environ) as variables:
        assert variables.get("CUDA_VISIBLE_DEVICES") == for_ranks


def test_it_ends_if_the_job_fails(log):
    with pytest.raises(RuntimeError), shared_gpu(os.environ):
        raise RuntimeError
    assert log.read_text().split()[-1] == "quit"


def test_it_ends_if_the_launcher_is_killed(log):
    code = (
        "import os, time; from flagcx._launch.share_gpu import shared_gpu\n"
        "with shared_gpu(os.environ):\n    print('on', flush=True); time.sleep(60)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environ)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"on\n"
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()
    deadline = time.monotonic() + 10
    while log.read_text().split()[-1] != "quit":
        assert time.monotonic() < deadline, "the daemon lives on"
        time.sleep(0.02)


def test_a_daemon_that_does_not_start_is_an_error_and_leaves_nothing(log):
    (log.parent / "nvidia-cuda-mps-control").write_text("#!/bin/sh\necho no permission >&2\nexit 3\n")
    with pytest.raises(LaunchError, match="cannot be started: no permission"), shared_gpu(os.environ):
        pass


def test_a_directory_that_cannot_be_made_is_named(log, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    message = r"no directory for its files .*/proc/.*set TMPDIR"
    with pytest.raises(LaunchError, match=message), shared_gpu(os.environ):
        pass
    assert not log.exists()


def test_without_the_program_ranks_take_turns(caplog):
    with shared_gpu({"PATH": "/dev/null"}) as variables:
        assert variables == {"FLAGCX_SHARE_GPU": "1"}
    assert "take turns" in caplog.text


def test_a_daemon_of_the_callers_own_is_used(log):
    with shared_gpu({**os.environ, "CUDA_MPS_PIPE_DIRECTORY": "/somewhere"}) as variables:
        assert variables == {"FLAGCX_SHARE_GPU": "1"}
    assert not log.exists()


def test_only_who_asks_shares():
    with sharing({"A": "b"}, False) as environ:
        assert environ == {"A": "b"}
