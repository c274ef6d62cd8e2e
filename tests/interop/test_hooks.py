"""The memory that DDP's hook keeps for each bucket, with buckets of our own."""

from __future__ import annotations

import numpy as np
import pytest

from flagcx.compression import Feedback
from flagcx.errors import ArgumentError

pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch==2.13.0)")


class Bucket:
    """A bucket of parameters of these shapes."""

    def __init__(self, index: int, *shapes: tuple[int, ...]) -> None:
        self._index, self._parameters = index, [np.empty(shape) for shape in shapes]

    def index(self) -> int:
        return self._index

    def parameters(self) -> list[np.ndarray]:
        return self._parameters


def test_one_hook_for_two_models_is_refused_and_buckets_that_are_formed_anew_are_not():
    from flagcx.interop.hooks import _BucketSlots

    first, second = Bucket(0, (3, 4), (4,)), Bucket(0, (5,))
    slots = _BucketSlots(Feedback("int8"))
    for bucket in (first, second, second, second, first, second, second):  # DDP is made anew for a model
        slots.slot(bucket)
    slots = _BucketSlots(Feedback("int8"))
    slots.slot(first)
    slots.slot(second)
    with pytest.raises(
        ArgumentError, match="bucket 0 of this hook has the parameters of two models in turns"
    ):
        slots.slot(first)
