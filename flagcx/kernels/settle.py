"""The CUDA source of the kernel that takes a step back where a flag on the GPU says so."""

from __future__ import annotations

from flagcx.kernels.source import TYPES

SETTLE, THREADS = "flagcx_settle", 256

_KERNEL = r"""
// Where the flag is 0 the kernel reads nothing else, unless both arrays shall be the same.
extern "C" __global__ void flagcx_settle(u32* now, u32* before, i64 n, const int* spoilt, int same) {
  const bool back = *spoilt != 0;
  if (!back && !same) return;
  const u32* const from = back ? before : now;
  u32* const to = back ? now : before;
  const i64 threads = (i64)gridDim.x * blockDim.x;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads) to[i] = from[i];
}
"""


def settle_source() -> str:
    """The whole source.

    Example:
        >>> SETTLE in settle_source()
        True
    """
    return TYPES + _KERNEL
