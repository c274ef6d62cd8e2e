"""Tensors as arrays over the same memory, and torch's dtypes and operations as flagcx's.

Making an array over a tensor costs more than an all-reduce of a few kilobytes, and plans keep what they
prepared for an array that returns. So arrays over callers' tensors are kept by address, count and dtype.
They own no memory: the queue keeps the caller's tensor alive until the call has ended. An array over any
other tensor is made anew, and keeps that tensor alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from flagcx.dtypes import DTYPES, dtype_of, resolve_op, scaled_sum
from flagcx.dtypes import ReduceOp as Operation
from flagcx.errors import OperationError

LARGE_NBYTES = 4 << 20
"""From here on the size of pages matters."""
ADVISED_AT = 5
"""Calls with a large tensor before it gets huge pages."""
_MOST_VIEWS = 1024
_HUGE_PAGE_NBYTES = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_BYTES = np.dtype(np.uint8)

NUMPY_DTYPES: dict[Any, np.dtype] = {
    getattr(torch, dtype.name): dtype.numpy for dtype in DTYPES.values() if hasattr(torch, dtype.name)
}
"""NumPy's dtype for each of torch's that flagcx can reduce."""

_KINDS = ReduceOp.RedOpType
_NAMES = {  # by number: torch takes a microsecond and a half to find one of its kinds in a dictionary
    int(_KINDS.SUM): "sum",
    int(_KINDS.AVG): "avg",
    int(_KINDS.PRODUCT): "prod",
    int(_KINDS.MIN): "min",
    int(_KINDS.MAX): "max",
    int(_KINDS.BAND): "band",
    int(_KINDS.BOR): "bor",
    int(_KINDS.BXOR): "bxor",
}


def operation_of(op: Any, dtype: Any) -> str | Operation | None:
    """flagcx's operation for one of torch's, or None where it has none for that dtype.

    Args:
        op: A ``ReduceOp``, or one of its kinds such as ``ReduceOp.SUM``.
        dtype: The tensors' dtype.
    """
    kind = getattr(op, "op", op)
    found: str | Operation | None = _NAMES.get(int(kind))
    if found is None and kind == _KINDS.PREMUL_SUM:
        factor = op.__getstate__()[1]
        found = scaled_sum(factor) if isinstance(factor, float) else None
    return found if found is not None and _is_defined(found, dtype) else None


@lru_cache(maxsize=1024)
def _is_defined(op: str | Operation, dtype: Any) -> bool:
    try:
        resolve_op(op, dtype_of(NUMPY_DTYPES[dtype]))
    except (KeyError, OperationError):
        return False
    return True


def is_ours(tensor: Any) -> bool:
    """Whether flagcx can carry a tensor: of torch's own class, dense, on the CPU or on an NVIDIA GPU.

    The answer must be the same on every rank, so it looks at nothing that may differ between them.
    """
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
    )


def is_plain(tensor: Any) -> bool:
    """Whether a tensor's memory holds its elements in order: no strides, no lazy conjugate."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg() or _is_misaligned(tensor))


def plain(tensor: Any) -> Any:
    """The tensor itself if it is plain, else a copy that is."""
    if is_plain(tensor):
        return tensor
    copied = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return copied if is_plain(copied) else copied.clone(memory_format=torch.contiguous_format)


def _is_misaligned(tensor: Any) -> bool:
    return bool(tensor.data_ptr() % tensor.element_size())


def are_adjacent(tensors: Sequence[Any]) -> bool:
    """Whether plain tensors lie end to end in memory."""
    at = tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != at or not is_plain(tensor):
            return False
        at += tensor.numel() * tensor.element_size()
    return True


class Views:
    """Arrays over plain tensors of callers, or flat ones over a temporary tensor, the ``owner``."""

    def __init__(self) -> None:
        self._known: dict[tuple, Any] = {}

    def elements(self, tensor: Any, count: int | None = None, owner: Any = None) -> Any:
        """A tensor's elements; ``count`` of them, from its first on, where that is given."""
        key = tensor.data_ptr(), tensor.numel() if count is None else count, tensor.dtype
        if owner is not None:
            return self._make(key[0], key[1], NUMPY_DTYPES[tensor.dtype], owner)
        found = self._known.get(key)
        if found is None:
            return self._made(key, NUMPY_DTYPES[tensor.dtype])
        if found.nbytes >= LARGE_NBYTES:
            self._returns(key, found)
        return found

    def shaped(self, tensor: Any) -> Any:
        """A plain tensor as an array of its shape."""
        key = tensor.data_ptr(), tensor.shape, tensor.dtype
        found = self._known.get(key)
        if found is None:
            flat = self._make(key[0], tensor.numel(), NUMPY_DTYPES[tensor.dtype])
            found = self._keep(key, flat.reshape(tuple(tensor.shape)))
        return found

    def bytes(self, tensor: Any, count: int | None = None, owner: Any = None) -> Any:
        """The bytes of a tensor; those of ``count`` elements where that is given."""
        count = tensor.numel() if count is None else count
        key = tensor.data_ptr(), count * tensor.element_size(), _BYTES
        if owner is not None:
            return self._make(*key, owner)
        found = self._known.get(key)
        return self._made(key, _BYTES) if found is None else found

    def _made(self, key: tuple, dtype: np.dtype) -> Any:
        return self._keep(key, self._make(key[0], key[1], dtype))

    def _keep(self, key: tuple, made: Any) -> Any:
        if len(self._known) >= _MOST_VIEWS:
            self._known.clear()
        self._known[key] = made
        return made

    def _make(self, address: int, count: int, dtype: np.dtype, owner: Any = None) -> Any:
        raise NotImplementedError

    def _returns(self, key: tuple, array: Any) -> None:
        """Counts another use of a large array."""


class HostViews(Views):
    """NumPy arrays over tensors of the CPU.

    A large tensor that returns several times, such as a bucket of gradients, gets huge pages, as NumPy's own
    large arrays have from the start: the system then copies it between processes a fifth faster. This takes
    about 2 ms a MiB, once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._returned: dict[tuple, int] = {}

    def _make(self, address: int, count: int, dtype: np.dtype, owner: Any = None) -> np.ndarray:
        if count == 0:
            return np.empty(0, dtype)
        memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        memory.owner = owner
        return np.frombuffer(memoryview(memory), dtype)

    def _returns(self, key: tuple, array: np.ndarray) -> None:
        times = self._returned.get(key, 0)
        if times < ADVISED_AT:
            if len(self._returned) >= _MOST_VIEWS:
                self._returned.clear()
            self._returned[key] = times + 1
            if times + 1 == ADVISED_AT:
                _use_huge_pages(key[0], array.nbytes)


def _use_huge_pages(address: int, nbytes: int) -> None:
    """Asks the system to move memory to huge pages now. The content stays; a refusal does no harm."""
    start = -(-address // _HUGE_PAGE_NBYTES) * _HUGE_PAGE_NBYTES
    stop = (address + nbytes) // _HUGE_PAGE_NBYTES * _HUGE_PAGE_NBYTES
    if start < stop:
        advise = ctypes.CDLL(None).madvise
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), ctypes.c_int(advice))


class DeviceViews(Views):
    """CuPy arrays over tensors of one GPU."""

    def __init__(self, cupy: Any, device: int) -> None:
        super().__init__()
        self._cupy, self._device = cupy, device

    def _make(self, address: int, count: int, dtype: np.dtype, owner: Any = None) -> Any:
        if count == 0:
            return self._cupy.empty(0, _BYTES).view(dtype)
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(address, count * dtype.itemsize, owner, self._device)
        return self._cupy.ndarray((count,), dtype, cuda.MemoryPointer(memory, 0))
