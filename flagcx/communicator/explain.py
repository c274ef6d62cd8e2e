"""What a communicator says of a call before it is made: what would run, and why."""

from __future__ import annotations

from typing import Any

from flagcx.arguments import check_integer
from flagcx.dtypes import dtype_of, resolve_op
from flagcx.errors import CommunicatorError
from flagcx.schedule.collectives import COLLECTIVES, check_collective
from flagcx.selection.candidates import Request
from flagcx.selection.explanation import Explanation


def explain(comm: Any, collective: str, nbytes: int, dtype: Any, op: Any, gpu: bool | None) -> Explanation:
    """See ``Communicator.explain``."""
    check_collective(collective)
    nbytes = check_integer(nbytes, "nbytes", 0)
    if gpu and comm._device is None:
        raise CommunicatorError(
            "gpu=True explains calls on arrays on GPUs, and none was made yet; make one first, on all ranks"
        )
    executor = comm._host if comm._device is None or gpu is False else comm._device
    kind = dtype_of(dtype)
    resolved = resolve_op(op, kind) if COLLECTIVES[collective].reduces else None
    return executor.selector.explain(Request(collective, nbytes, comm.size, False, kind, resolved))
