"""Runs a module's ranks under a real mpirun, on hosts that differ by their names."""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from flagcx.config import environment

ROOT = Path(__file__).parents[1]
MPIRUN = Path(sys.executable).with_name("mpirun")
HOST = """
host=$((OMPI_COMM_WORLD_RANK / 2))
last=$(((OMPI_COMM_WORLD_SIZE - 1) / 2))
export OMPI_COMM_WORLD_LOCAL_RANK=$((OMPI_COMM_WORLD_RANK % 2)) OMPI_COMM_WORLD_LOCAL_SIZE=2
if [ $host = $last ]; then export OMPI_COMM_WORLD_LOCAL_SIZE=$((OMPI_COMM_WORLD_SIZE - 2 * last)); fi
exec unshare $UNSHARE sh -c 'hostname "$0"; exec "$@"' "test-host-$host" "$@"
"""
"""Starts a rank's program on a host of its own name, two ranks a host."""


@lru_cache(maxsize=1)
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


def run_mpi(
    size: int,
    module: str,
    *args: str,
    settings: dict[str, str] | None = None,
    timeout_s: float = 180,
    options: tuple[str, ...] = (),
) -> tuple[int, str]:
    """Runs ``python -m MODULE ARGS`` on every rank; the exit code of mpirun, and what the ranks printed.

    Args:
        size: Number of ranks; two are on each host.
        module: The module.
        args: Its arguments.
        settings: Variables for the environment.
        timeout_s: Fail after so many seconds.
        options: Of mpirun.
    """
    if not MPIRUN.exists():
        pytest.skip("no mpirun beside this Python; the extra 'test' brings Open MPI's")
    flags = _unshare()
    if not flags:
        pytest.skip("unshare may not give a process a host name of its own here")
    mpirun = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", *options, "-n", str(size)]
    environ = environment() | {"UNSHARE": flags, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*mpirun, "sh", "-c", HOST, "rank", sys.executable, "-m", module, *args],
        cwd=ROOT,
        env=environ | (settings or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    return done.returncode, done.stdout
