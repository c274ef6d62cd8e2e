"""The variables that the ranks of a new job get."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def job_environment(environ: Mapping[str, str], size: int) -> dict[str, str]:
    """The variables for all ranks of a new job of ``size`` ranks; those set in ``environ`` win."""
    values = {
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
