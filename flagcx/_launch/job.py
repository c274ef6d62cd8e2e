"""A new job: the variables that its ranks get, and how many ranks a host bears."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from flagcx.bootstrap.environment import without_launchers
from flagcx.errors import ArgumentError

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_MANY_A_CORE = 16
_MOST_A_CORE = 64


def job_environment(environ: Mapping[str, str], size: int) -> dict[str, str]:
    """The environment for all ranks of a new job of ``size`` ranks.

    It is ``environ`` without what a launcher told this process, whose place in that launcher's job is not
    the ranks'; the number of threads of each rank's BLAS is set unless ``environ`` says it.
    """
    values = without_launchers(environ) | {
        "FLAGCX_SIZE": str(size),
        "FLAGCX_LOCAL_SIZE": str(size),
        "FLAGCX_JOB": f"flagcx-{secrets.token_hex(8)}",
        "PYTHONUNBUFFERED": environ.get("PYTHONUNBUFFERED", "1"),
    }
    if size > 1 and not any(name in environ for name in _THREAD_VARIABLES):
        # Every rank's BLAS would otherwise take all cores for itself.
        threads = str(max(1, len(os.sched_getaffinity(0)) // size))
        values |= dict.fromkeys(_THREAD_VARIABLES, threads)
    return values


def check_size(size: int) -> str:
    """Looks whether this process's cores bear so many ranks.

    Returns:
        What the user should know about so many ranks; "" if there is nothing.

    Raises:
        ArgumentError: They would still be starting when the time for it is over.
    """
    cores = len(os.sched_getaffinity(0))
    if size > _MOST_A_CORE * cores:
        raise ArgumentError(
            f"{size} ranks are too many for {cores} cores, which start some ranks a second each; use at most "
            f"{_MOST_A_CORE * cores} here, or several hosts (mpirun, srun)"
        )
    if size > _MANY_A_CORE * cores:
        return f"{size} ranks share {cores} cores: they start slowly, and wait for each other's turns"
    return ""
