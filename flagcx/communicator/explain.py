"""What a communicator says of a call before it is made: what would run, and why."""

from __future__ import annotations

from typing import Any

import numpy as np

from flagcx.dtypes import dtype_of, resolve_op
from flagcx.errors import ArgumentError, CommunicatorError
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.selection.candidates import Request
from flagcx.selection.explanation import Explanation


def explain(comm: Any, collective: str, nbytes: int, dtype: Any, op: Any, gpu: bool | None) -> Explanation:
    """See ``Communicator.explain``."""
    if collective not in COLLECTIVES:
        raise ArgumentError(
            f"collective={collective!r} is not known; expected one of {', '.join(COLLECTIVES)}"
        )
    if not isinstance(nbytes, (int, np.integer)) or isinstance(nbytes, bool) or nbytes < 0:
        raise ArgumentError(f"nbytes must be an integer from 0 up, got {nbytes!r}")
    if gpu and comm._device is None:
        raise CommunicatorError(
            "gpu=True explains calls on arrays on GPUs, and none was made yet; make one first, on all ranks"
        )
    executor = comm._host if comm._device is None or gpu is False else comm._device
    kind = dtype_of(dtype)
    resolved = resolve_op(op, kind) if COLLECTIVES[collective].reduces else None
    return executor.selector.explain(Request(collective, int(nbytes), comm.size, False, kind, resolved))
