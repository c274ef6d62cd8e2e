"""Codecs' kernels on the current GPU: compiled at the first call, enqueued on CuPy's current stream."""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from typing import Any

import numpy as np

from flagcx.kernels.compile import compile_kernel
from flagcx.kernels.compress import DECODE, ENCODE, REDUCE, THREADS, WARP, compress_source
from flagcx.kernels.cuda import load_cupy
from flagcx.kernels.settle import SETTLE, settle_source
from flagcx.kernels.settle import THREADS as SETTLE_THREADS

_MOST_BLOCKS = 4096
_SETTLE_BLOCKS = 1024
_BLOCKS_BESIDE = 4
"""Blocks for each multiprocessor beside a computation: on two H200 a step of both then took 25.8 ms, with
4,096 blocks in all 32.6, with two for each multiprocessor 30.6 (int8, 6 GiB of gradients). Of two ranks that
share one (1.5 GiB) it took 14.6 ms, with one, two and eight blocks 16.4, 14.2 and 14.5."""


class StripeKernels:
    """Codes, adds up and decodes stripes of float32 arrays by the kernels of ``flagcx.kernels.compress``.

    Every stripe of an array has ``width`` numbers, but for the last ones, which have fewer or none. Coded
    stripes lie ``stride`` bytes apart.

    Args:
        name: Name of the codec.
        block: Numbers of a warp, which share a factor.
    """

    def __init__(self, name: str, block: int) -> None:
        cupy, source = load_cupy(), compress_source(name, block)
        self._encode, self._reduce, self._decode = (
            compile_kernel(cupy, source, kernel) for kernel in (ENCODE, REDUCE, DECODE)
        )
        self._block, self._most_blocks = block, _MOST_BLOCKS

    def beside(self) -> StripeKernels:
        """The same kernels with so few blocks that a computation beside them goes on."""
        roomy, device = copy(self), load_cupy().cuda.Device()
        roomy._most_blocks = _BLOCKS_BESIDE * device.attributes["MultiProcessorCount"]
        return roomy

    def encode(
        self, x: Any, residual: Any, wire: Any, width: int, stride: int, stripes: int = 1, own: int = -1
    ) -> None:
        """Codes the numbers ``x`` into ``wire`` (uint8), all stripes but ``own``.

        A residual (``Carried``) as it was before is added to the numbers; now it is the coding error of the
        sum.
        """
        if x.size:
            numbers = map(np.int64, (x.size, width, stride, stripes, own))
            self._encode(self._grid(width, stripes), (THREADS,), (x, *_both(residual), wire, *numbers))

    def reduce(
        self, arrived: Any, x: Any, residual: Any, wire: Any, stride: int, ranks: tuple[int, int], factor: Any
    ) -> None:
        """Adds up one stripe in the order of ranks, scales the sum, and codes it into ``wire`` (uint8).

        Args:
            arrived: The coded stripes of the other ranks, each at the place of its rank (uint8).
            x: This rank's numbers.
            residual: Is added to them as it was before; now it is the coding error of the sum. None for none.
            wire: The coded sum (uint8).
            stride: Bytes of a coded stripe.
            ranks: This rank, and the number of ranks.
            factor: Scales the sum (float32).
        """
        if x.size:
            numbers = (*map(np.int64, (x.size, stride)), *map(np.int32, ranks), factor)
            arrays = arrived, x, *_both(residual), wire
            self._reduce(self._grid(x.size, 1), (THREADS,), (*arrays, *numbers))

    def decode(
        self,
        wire: Any,
        out: Any,
        width: int,
        stride: int,
        stripes: int = 1,
        add: bool = False,
        spoilt: Any = None,
    ) -> None:
        """Decodes stripes into ``out``, or adds them to it.

        ``spoilt`` (one int32) becomes 1 where that has an infinite number or NaN.
        """
        if out.size:
            numbers = *map(np.int64, (out.size, width, stride, stripes)), np.int32(add)
            flag = 0 if spoilt is None else spoilt
            self._decode(self._grid(width, stripes), (THREADS,), (wire, out, flag, *numbers))

    def _grid(self, width: int, stripes: int) -> tuple[int]:
        warps = -(-width // self._block) * stripes
        return (min(-(-warps * WARP // THREADS), self._most_blocks),)


def stripe_kernels(name: str, block: int) -> StripeKernels:
    """The kernels of a codec on the current device."""
    return _made(name, block, load_cupy().cuda.runtime.getDevice())


@lru_cache(maxsize=64)
def _made(name: str, block: int, device: int) -> StripeKernels:
    return StripeKernels(name, block)


def _both(residual: Any) -> tuple[Any, Any]:
    return (0, 0) if residual is None else (residual.before, residual.now)


def look_on_device(x: Any, spoilt: Any) -> None:
    """Makes ``spoilt`` (one int32) 1 where an array on the current GPU is infinite or NaN."""
    _looking()(x, spoilt)


@lru_cache(maxsize=1)
def _looking() -> Any:
    cupy, body = load_cupy(), "if (!isfinite((double)x)) spoilt[0] = 1"
    return cupy.ElementwiseKernel("T x", "raw int32 spoilt", body, "flagcx_look")


def settle_on_device(now: Any, before: Any, spoilt: Any, same: bool) -> None:
    """Copies ``before`` to ``now`` if ``spoilt`` (one int32) is not 0; else the other way if ``same``."""
    words = now.nbytes // 4
    if words:
        grid = (min(-(-words // SETTLE_THREADS), _SETTLE_BLOCKS),)
        kernel = _settling(load_cupy().cuda.runtime.getDevice())
        kernel(grid, (SETTLE_THREADS,), (now, before, np.int64(words), spoilt, np.int32(same)))


@lru_cache(maxsize=64)
def _settling(device: int) -> Any:
    return compile_kernel(load_cupy(), settle_source(), SETTLE)
