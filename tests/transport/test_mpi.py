"""NumPy arrays between hosts by MPI: real ranks of a real mpirun, on hosts that differ by their names."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flagcx.config import environment
from flagcx.errors import PeerTimeoutError
from flagcx.executor.open import groups_of
from flagcx.selection.candidates import Request
from flagcx.selection.rules import MultiHostRules
from flagcx.transport.mpi import Watch
from tests.ranges import exhaustive

ROOT = Path(__file__).parents[2]
MPIRUN = Path(sys.executable).with_name("mpirun")
HOST = """
host=$((OMPI_COMM_WORLD_RANK / 2))
last=$(((OMPI_COMM_WORLD_SIZE - 1) / 2))
export OMPI_COMM_WORLD_LOCAL_RANK=$((OMPI_COMM_WORLD_RANK % 2)) OMPI_COMM_WORLD_LOCAL_SIZE=2
if [ $host = $last ]; then export OMPI_COMM_WORLD_LOCAL_SIZE=$((OMPI_COMM_WORLD_SIZE - 2 * last)); fi
exec unshare $UNSHARE sh -c 'hostname "$0"; exec "$@"' "test-host-$host" "$@"
"""
"""Starts a rank's program on a host of its own name, two ranks a host."""


def _unshare() -> str:
    """The options with which this user may give a process a host name of its own, or ""."""
    for flags in ("--uts", "--map-root-user --uts"):
        try:
            done = subprocess.run(
                ["unshare", *flags.split(), "hostname", "test-host"], capture_output=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        if done.returncode == 0:
            return flags
    return ""


def run(size: int, name: str, timeout_s: float = 90) -> tuple[int, str]:
    """Runs a job of ``mpi_jobs`` on two hosts; its exit code and what it printed."""
    if not MPIRUN.exists():
        pytest.skip("no mpirun beside this Python; the extra 'test' brings Open MPI's")
    flags = _unshare()
    if not flags:
        pytest.skip("unshare may not give a process a host name of its own here")
    command = [
        str(MPIRUN),
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        str(size),
        "sh",
        "-c",
        HOST,
        "rank",
    ]
    environ = environment() | {"UNSHARE": flags, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [*command, sys.executable, "-m", "tests.transport.mpi_jobs", name, directory],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, *exhaustive([4])])
def test_every_collective_between_hosts(size):
    code, printed = run(size, "everything")
    assert code == 0, printed
    assert "done" in printed, printed


@pytest.mark.slow
def test_the_other_calls_between_hosts():
    code, printed = run(4, "facade")
    assert code == 0, printed
    assert "done mpi" in printed, printed


@pytest.mark.slow
def test_ranks_that_call_something_else_are_told_so():
    _, printed = run(4, "mismatch")
    said = [line for line in printed.splitlines() if line.startswith("rank ")]
    assert len(said) == 4, printed
    assert all("MismatchError" in line or "AbortedError" in line for line in said), printed
    assert any("rank 1 called allreduce of 5 float64 by sum" in line for line in said), printed
    assert max(float(line.split()[3]) for line in said) < 5, printed


@pytest.mark.slow
def test_a_rank_that_stays_away_is_named():
    _, printed = run(4, "absent")
    said = [line for line in printed.splitlines() if line.startswith("rank ")]
    assert len(said) == 3, printed
    assert any("PeerTimeoutError" in line and "rank 2 did not come" in line for line in said), printed


class SlowStore:
    """A store behind a link that is full: no answer comes in time."""

    rank, size = 0, 2

    def check(self) -> None:
        pass

    def add(self, key: str, amount: int) -> int:
        raise PeerTimeoutError("the store does not answer")


def test_a_store_that_is_slow_ends_no_call_before_its_time():
    watch = Watch(SlowStore(), timeout_s=60)
    for waited_s in (0.25, 0.5, 1.0, 30.0):
        watch.look("allreduce", waited_s, True)
    with pytest.raises(PeerTimeoutError, match=r"waited in allreduce \(call 0\) for 60 s"):
        watch.look("allreduce", 60.5, True)


def test_the_ranks_of_each_host():
    assert groups_of(["b", "a", "b", "c"]) == ((0, 2), (1,), (3,))


@pytest.mark.parametrize(
    ("collective", "nbytes", "groups", "chosen"),
    [
        ("allreduce", 1 << 10, ((0, 1), (2, 3)), "recursive_doubling"),
        ("allreduce", 1 << 20, ((0, 1), (2, 3)), "hierarchical"),
        ("allreduce", 1 << 20, ((0,), (1,)), "ring"),
        ("broadcast", 1 << 20, ((0, 1), (2, 3)), "chain"),
        ("allgather", 1 << 20, ((0, 1), (2, 3)), "ring"),
        ("alltoall", 1 << 20, ((0, 1), (2, 3)), "direct"),
    ],
)
def test_the_rule(collective, nbytes, groups, chosen):
    choice = MultiHostRules(groups).choose(Request(collective, nbytes, sum(map(len, groups))))
    assert str(choice.algorithm) == chosen
    assert choice.reason
