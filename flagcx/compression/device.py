"""Codecs' kernels on the current GPU: compiled at the first need, enqueued on CuPy's current stream."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from flagcx.kernels.compile import compile_kernel
from flagcx.kernels.compress import DECODE, ENCODE, THREADS, compress_source
from flagcx.kernels.cuda import load_cupy

_MOST_BLOCKS = 4096


class BlockKernels:
    """Coding in blocks with a factor each; see ``flagcx.compression.quantize``.

    Args:
        name: Name of the codec.
    """

    def __init__(self, name: str) -> None:
        self._encode, self._decode = _functions(name)

    def encode(self, x: Any, codes: Any, scales: Any, block: int) -> None:
        """Writes the codes (uint8) and factors (float32) of ``x`` (float32)."""
        blocks = -(-x.size // block)
        if blocks:
            grid = _grid(32 * blocks)
            self._encode(grid, (THREADS,), (x, codes, scales, np.int64(x.size), np.int64(block)))

    def decode(self, codes: Any, scales: Any, out: Any, block: int, add: bool) -> None:
        """Writes or adds what the codes stand for into ``out`` (float32)."""
        if out.size:
            numbers = np.int64(out.size), np.int64(block), np.int32(add)
            self._decode(_grid(out.size), (THREADS,), (codes, scales, out, *numbers))


class CastKernels:
    """Rounding to 16 bits.

    Args:
        name: Name of the codec.
    """

    def __init__(self, name: str) -> None:
        self._encode, self._decode = _functions(name)

    def encode(self, x: Any, wire: Any) -> None:
        """Writes two bytes for each number of ``x`` (float32)."""
        if x.size:
            self._encode(_grid(x.size), (THREADS,), (x, wire, np.int64(x.size)))

    def decode(self, wire: Any, out: Any, add: bool) -> None:
        """Writes or adds what they stand for into ``out`` (float32)."""
        if out.size:
            self._decode(_grid(out.size), (THREADS,), (wire, out, np.int64(out.size), np.int32(add)))


def block_kernels(name: str) -> BlockKernels:
    """The kernels of a codec with blocks, on the current device."""
    return _made(BlockKernels, name, load_cupy().cuda.runtime.getDevice())


def cast_kernels(name: str) -> CastKernels:
    """The kernels of a cast, on the current device."""
    return _made(CastKernels, name, load_cupy().cuda.runtime.getDevice())


@lru_cache(maxsize=64)
def _made(kind: type, name: str, device: int) -> Any:
    return kind(name)


def _functions(name: str) -> tuple[Any, Any]:
    cupy, source = load_cupy(), compress_source(name)
    encode, decode = (compile_kernel(cupy, source, kernel) for kernel in (ENCODE, DECODE))
    return encode, decode


def _grid(threads: int) -> tuple[int]:
    return (max(1, min(-(-threads // THREADS), _MOST_BLOCKS)),)
