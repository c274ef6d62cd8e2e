"""Runs a module's ranks on test hosts, which are network namespaces: see ``bench/hosts.py``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from bench.hosts import mpirun_line, start_ranks
from flagcx.config import environment

ROOT = Path(__file__).parents[1]
KEY = "00112233445566778899aabbccddeeff"


def _settings(settings: dict[str, str] | None) -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FLAGCX_STORE_KEY": KEY}
    return {**environment(), **own, **(settings or {})}


def run_by_mpi(
    names: Sequence[str], counts: Sequence[int], module: str, *args: str, timeout_s: float = 60
) -> tuple[int, str]:
    """Runs ``python -m MODULE ARGS`` on every rank by Open MPI; mpirun's exit code, and what was printed.

    Args:
        names: The hosts.
        counts: Ranks on each.
        module: The module.
        args: Its arguments.
        timeout_s: Fail after so many seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = mpirun_line(names, counts, [sys.executable, "-m", module, *args], Path(folder))
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=_settings(None),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
    return done.returncode, done.stdout


def run_by_torchrun(
    names: Sequence[str],
    counts: Sequence[int],
    module: str,
    *args: str,
    settings: dict[str, str] | None = None,
    timeout_s: float = 60,
) -> tuple[list[int], list[str]]:
    """Runs ``python -m MODULE ARGS`` on every rank with torchrun's variables.

    Args:
        names: The hosts.
        counts: Ranks on each.
        module: The module.
        args: Its arguments.
        settings: Variables for the environment.
        timeout_s: Kill the ranks after so many seconds.

    Returns:
        The exit code of each rank, and what it printed.
    """
    ranks = start_ranks(names, counts, [sys.executable, "-m", module, *args], _settings(settings))
    late = threading.Timer(timeout_s, lambda: [rank.kill() for rank in ranks])
    late.start()
    try:
        printed = [rank.communicate()[0] for rank in ranks]
    finally:
        late.cancel()
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], printed
