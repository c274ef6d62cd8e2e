"""Brings the arguments of a process group's methods to one form each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def as_list(tensors: Any) -> list:
    """A list of tensors, of a list or of one tensor."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def as_lists(tensors: Any) -> list:
    """A list of lists, of such a list or of its only list."""
    return [list(tensors)] if len(tensors) and isinstance(tensors[0], torch.Tensor) else list(tensors)


def as_options(kind: type, opts: Any, op: Any = None, root: int | None = None) -> Any:
    """A call's options, made from an operation or root if the caller gives those."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    if isinstance(opts, int):
        root = opts
    elif opts is not None:
        op = opts
    if op is not None:
        made.reduceOp = op
    if root is not None:
        made.rootRank = root
    return made


def one_per_rank(tensors: Sequence[Any], one: Any, size: int, even: bool = False) -> bool:
    """Whether a list has a tensor for each rank, all of one dtype; and with ``even`` all of one size."""
    return len(tensors) == size and all(
        t.dtype == one.dtype and not (even and t.numel() != one.numel()) for t in tensors
    )


def split_nbytes(tensor: Any, splits: Sequence[int], size: int) -> list[int] | None:
    """Bytes of each rank's part of a tensor; None if the parts do not add up to the tensor."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not len(splits):
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        return None
    row = tensor.element_size() * (tensor.numel() // rows if rows else 0)
    return [int(count) * row for count in splits]
