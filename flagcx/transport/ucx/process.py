"""UCX in this process: the one module that imports ``ucxx``, and the context of all communicators."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from flagcx.config import set_default

REMEDY = "pip install 'flagcx[ucx]' (or ucxx-cu13 where CUDA is 13)"
_LONG_NBYTES = 8192
"""From here on a piece is sent only when its receiver has asked for it, so that none lies in UCX's memory."""


@lru_cache(maxsize=1)
def load_ucxx() -> Any:
    """The module ``ucxx._lib.libucxx``, UCX's own calls without an event loop.

    Raises:
        ImportError: It is not installed, or cannot be loaded.
    """
    set_default("UCX_WARN_UNUSED_ENV_VARS", "n")  # ucxx itself sets variables that not every UCX knows
    from ucxx._lib import arr, libucxx

    libucxx.Array = arr.Array
    return libucxx


@lru_cache(maxsize=1)
def context_of_process() -> Any:
    """UCX's context: the devices and protocols of this process, as the variables ``UCX_*`` allow."""
    ucxx = load_ucxx()
    # A connect() that blocks holds this rank up, whatever its time-out is; and where a peer goes away between
    # connect() and the first send(), UCX ends the process by a failed assertion.
    settings = {"RNDV_THRESH": str(_LONG_NBYTES), "TCP_CONN_NB": "y"}
    return ucxx.UCXContext(settings, (ucxx.Feature.TAG,))
