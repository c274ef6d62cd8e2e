"""The state of a synchronizer as a flat dictionary of NumPy arrays, numbers and text, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flagcx.errors import ArgumentError
from flagcx.gradients.buckets import Gradient

WHAT = "GradientSynchronizer"


def feedback_of(compression: Any) -> Any:
    """The error feedback for ``compression=``; None for none."""
    if compression is None:
        return None
    from flagcx.compression import as_feedback

    return as_feedback(compression)


def check_between(ready: Sequence[bool], what: str) -> None:
    """Raises ArgumentError where some gradients are ready: a step is under way."""
    if any(ready):
        raise ArgumentError(f"sync.{what}() in the middle of a step; call sync.wait() before")


def save(
    gradients: Sequence[Gradient], order: Sequence[int], bucket_nbytes: int | None, feedback: Any
) -> dict[str, Any]:
    """What a synchronizer needs to form the same buckets, and the memory of its error feedback.

    Args:
        gradients: The gradients.
        order: Their numbers in the order of the buckets; empty before the first step.
        bucket_nbytes: Size of a bucket in bytes; None before the first step, if it is to be chosen.
        feedback: The error feedback, or None.
    """
    from flagcx.compression.checkpoint import VERSION, listed, under

    state: dict[str, Any] = {"version": VERSION, "gradients": _text(gradients)}
    state["order"] = np.array(order, np.int64)
    if bucket_nbytes is not None:
        state["bucket_nbytes"] = bucket_nbytes
    if feedback is not None:
        state |= under("feedback", feedback.state_dict())
    return listed(state)


def load(state: Mapping[str, Any], gradients: Sequence[Gradient], feedback: Any) -> tuple[list[int], int]:
    """Checks what ``save`` gave, and gives the error feedback its memory.

    Returns:
        The order and the size of the buckets; an empty order where the first step had not been made.

    Raises:
        ArgumentError: It is the state of other gradients, or of another compression.
    """
    from flagcx.compression.checkpoint import check_complete, check_entry, nested

    check_complete(state, WHAT)
    check_entry(state, "gradients", _text(gradients), WHAT)
    inner = nested(state, "feedback")
    if bool(inner) != (feedback is not None):
        has, this = ("error feedback", "none") if inner else ("no error feedback", "some")
        raise ArgumentError(
            f"the state is one of a {WHAT} with {has}, and this one has {this}; make it with the same "
            f"compression"
        )
    order = np.asarray(state["order"]).reshape(-1).tolist()
    bucket_nbytes = int(state.get("bucket_nbytes", 0))
    whole = all(isinstance(number, int) for number in order)
    if order and not (whole and sorted(order) == [*range(len(gradients))] and bucket_nbytes >= 1):
        raise ArgumentError(
            f"the state of a {WHAT} has the order {order} of {len(gradients)} gradients, and buckets of "
            f"{bucket_nbytes} bytes; give what state_dict() gave"
        )
    if feedback is not None:
        feedback.load_state_dict(inner)
    return order, bucket_nbytes


def _text(gradients: Sequence[Gradient]) -> str:
    return "; ".join(map(str, gradients))
