"""A limit of the process that is met gives an error of flagcx's own that says how to raise it."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flagcx as fc
from flagcx.limits import described, remedy
from flagcx.transport.shared_memory.segment import Segment
from tests.bootstrap.processes import bare_environment
from tests.cli.launching import command
from tests.ranks import run_ranks


def _set(limit: int, value: int) -> None:
    resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))


def _errors(comm: fc.Communicator) -> list[str]:
    """What calls that need descriptors and shared memory raise: each error's kind and text."""
    calls: list[Callable[[], object]] = [
        lambda: comm.empty(1 << 18).fill(1),
        lambda: comm.split(0).allreduce(np.ones(300_000)),
    ]
    found = []
    for call in calls:
        try:
            call()
        except fc.FlagcxError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _without_descriptors(most: int) -> list[str]:
    comm = fc.init(timeout_s=20)
    found = []
    for more in range(most):
        free = [number for number in range(3, 100) if not os.path.lexists(f"/proc/self/fd/{number}")]
        _set(resource.RLIMIT_NOFILE, free[more])
        found += _errors(comm)
    assert comm.allreduce(np.ones(1)) == 2
    _set(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    return found


def test_descriptors():
    for found in run_ranks(_without_descriptors, 2, 4, fresh=True, timeout_s=60):
        assert any(error.startswith("ResourceError") for error in found), found
        assert all("ulimit -n" in error for error in found), found


def _split_that_fails(failing: int) -> tuple[str, list[Any]]:
    comm = fc.init(timeout_s=20)
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == failing:
            patch.setattr(Segment, "create", lambda nbytes: os.open("/", os.O_RDWR))
        with pytest.raises((fc.ResourceError, IsADirectoryError)) as raised:
            comm.split(0 if comm.rank in (0, failing) else 1)
            raise fc.ResourceError("none")  # the other color goes on
    return str(raised.value), comm.allgather_object(("next", comm.rank))


@pytest.mark.parametrize("failing", [1, 2])
def test_a_split_that_fails_on_one_rank_fails_on_all_of_its_color(failing):
    """And the next exchange of objects is not taken for that of the split."""
    told, following = zip(*run_ranks(_split_that_fails, 3, failing), strict=True)
    assert told[0].startswith(f"split cannot be made, since rank {failing} failed: [Errno 21] Is a directory")
    assert told[failing].startswith("[Errno 21]") and told[3 - failing] == "none"
    assert [*following] == [[("next", rank) for rank in range(3)]] * 3


def _without_room_in_files() -> list[str]:
    comm = fc.init(timeout_s=20)
    _set(resource.RLIMIT_FSIZE, 100_000)
    found = _errors(comm) + _errors(comm)
    assert comm.allreduce(np.ones(1)) == 2
    _set(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
    return found


def test_sizes_of_files():
    for found in run_ranks(_without_room_in_files, 2, fresh=True, timeout_s=60):
        assert len(found) == 4 and all("ulimit -f" in error for error in found), found


@pytest.mark.parametrize("descriptors", [7, 12, 19])
def test_flagcx_run_without_descriptors(tmp_path, descriptors):
    script = tmp_path / "script.py"
    script.touch()
    done = subprocess.run(
        command("-n", "2", script),
        env=bare_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: _set(resource.RLIMIT_NOFILE, descriptors),
    )
    assert done.returncode == 2
    assert done.stderr.startswith("flagcx: ") and done.stderr.count("\n") == 1, done.stderr
    assert f"may have {descriptors} descriptors open" in done.stderr and "ulimit -n" in done.stderr


@pytest.mark.parametrize(("threads", "most"), [(False, 20), (True, 8)])
def test_launch_without_descriptors(threads, most):
    body = """
import resource
import flagcx as fc
fc.launch
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for limit in range(3, MOST):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    try:
        fc.launch(int, 2, threads=THREADS)
    except (fc.ResourceError, fc.LaunchError) as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", body.replace("THREADS", str(threads)).replace("MOST", str(most))],
        env=bare_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = done.stdout.splitlines()
    assert len(told) == most - 3, done.stdout + done.stderr
    assert all("cannot be started" in line and "ulimit -n" in line for line in told), told


def test_other_errors_have_no_remedy():
    assert not remedy(OSError(errno.ENOENT, "no such file"))
    assert described(OSError(errno.ENOENT, "no such file")) == "[Errno 2] no such file"
    assert "fs.file-max" in remedy(OSError(errno.ENFILE, "too many"))
