"""The kernels before and after an average whose sums travel in a wider dtype; see ``transport.average``."""

from __future__ import annotations

from flagcx.dtypes import OPS, DType
from flagcx.kernels.source import CONVERSIONS, DEVICE_FUNCTION, FLOAT16_CONVERSIONS, element_source

WIDEN, MEAN = "flagcx_widen", "flagcx_mean"

_KERNELS = r"""
extern "C" __global__ void flagcx_widen(const T* x, P* upper, P* lower, i64 n) {
  const i64 threads = (i64)gridDim.x * blockDim.x;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads) {
    const A wide = widen(x[i]);
    upper[i] = UPPER(wide);
    if (HALVES) lower[i] = LOWER(wide);
  }
}

extern "C" __global__ void flagcx_mean(const P* upper, const P* lower, T* out, i64 n, double ranks) {
  const i64 threads = (i64)gridDim.x * blockDim.x;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads) {
    const A sum = SUM(upper[i], HALVES ? lower[i] : upper[i]);
    out[i] = narrow(finished(sum, 2, ranks));
  }
}
"""
_ONE = """
typedef A P;
#define HALVES 0
#define UPPER(x) x
#define LOWER(x) x
#define SUM(a, b) a
"""
_TWO = """
typedef T P;
#define HALVES 1
#define UPPER(x) (P)x.upper
#define LOWER(x) (P)x.lower
#define SUM(a, b) A{(i64)(a), (u64)(b)}
"""


def average_source(dtype: DType) -> str:
    """The CUDA source of ``WIDEN`` and ``MEAN`` for one dtype."""
    two = dtype.kind == "int" and dtype.numpy.itemsize == 8
    head = DEVICE_FUNCTION + CONVERSIONS + FLOAT16_CONVERSIONS
    return head + element_source(dtype, OPS["avg"]) + (_TWO if two else _ONE) + _KERNELS
