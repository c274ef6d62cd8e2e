"""The CUDA source of the kernels that code and decode gradients: blocks with a factor, and casts.

As in ``flagcx.kernels.source``, no header of the CUDA toolkit is needed, and the arithmetic is in functions
that a host compiler takes too. They make the very bits that the NumPy codecs make.

A warp codes one block: it finds the largest magnitude, as the largest pattern of bits, so that NaN wins; then
it writes the codes. Decoding has a thread for each number.
"""

from __future__ import annotations

from types import MappingProxyType

from flagcx.errors import OperationError
from flagcx.kernels.source import conversions, float16_conversions

ENCODE, DECODE = "flagcx_encode", "flagcx_decode"
"""Names of the two kernels in every module."""

THREADS = 256
"""Threads of a block."""

_HEAD = "#define FLAGCX_DEVICE __device__ __forceinline__\n"

_FACTORS = r"""
// Factors of a block whose largest magnitude has these bits: 0 under 1e-36, NaN for infinity and NaN.
FLAGCX_DEVICE float inverse_of(u32 bits) {
  float largest = __uint_as_float(bits);
  return bits < 0x7f800000u && largest > 1e-36f ? LIMIT / largest : 0.0f;
}
FLAGCX_DEVICE float scale_of(u32 bits) {
  float largest = __uint_as_float(bits);
  if (bits >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  return largest > 1e-36f ? largest / LIMIT : 0.0f;
}
"""

_CODES = MappingProxyType(
    {
        "int8": r"""
#define LIMIT 127.0f
FLAGCX_DEVICE u8 to_code(float x) { return (u8)(signed char)(int)rintf(x); }
FLAGCX_DEVICE float from_code(u8 code) { return (float)(signed char)code; }
""",
        "int4": r"""
#define LIMIT 7.0f
#define PAIRS
FLAGCX_DEVICE u8 to_code(float x) { return (u8)((int)rintf(x) + 8); }
FLAGCX_DEVICE float from_code(u8 code) { return (float)((int)code - 8); }
""",
        "fp8": r"""
#define LIMIT 448.0f
FLAGCX_DEVICE u8 to_code(float x) { return to_float8_e4m3fn(x); }
FLAGCX_DEVICE float from_code(u8 code) { return from_float8_e4m3fn(code); }
""",
        "fp8_e5m2": r"""
#define LIMIT 57344.0f
FLAGCX_DEVICE u8 to_code(float x) { return to_float8_e5m2(x); }
FLAGCX_DEVICE float from_code(u8 code) { return from_float8_e5m2(code); }
""",
    }
)

# Where the code of number j of a block of n stands, and what of its byte it is.
_PLACES = r"""
FLAGCX_DEVICE float number_at(const u8* codes, i64 j, i64 n) {
#ifdef PAIRS
  const i64 half = (n + 1) / 2;
  return from_code(j < half ? (u8)(codes[j] & 15) : (u8)(codes[j - half] >> 4));
#else
  (void)n;
  return from_code(codes[j]);
#endif
}
FLAGCX_DEVICE i64 bytes_of(i64 n) {
#ifdef PAIRS
  return (n + 1) / 2;
#else
  return n;
#endif
}
FLAGCX_DEVICE u8 byte_at(const float* x, i64 j, i64 n, float inverse) {
#ifdef PAIRS
  const i64 half = (n + 1) / 2;
  const u8 high = j + half < n ? to_code(x[j + half] * inverse) : (u8)8;
  return (u8)((to_code(x[j] * inverse) & 15) | high << 4);
#else
  (void)n;
  return to_code(x[j] * inverse);
#endif
}
"""

_BLOCK_KERNELS = r"""
extern "C" __global__ void __launch_bounds__(THREADS) flagcx_encode(
    const float* x, u8* codes, float* scales, i64 count, i64 block) {
  const int lane = threadIdx.x & 31;
  const i64 warps = (i64)gridDim.x * (THREADS / 32), blocks = (count + block - 1) / block;
  for (i64 b = ((i64)blockIdx.x * THREADS + threadIdx.x) / 32; b < blocks; b += warps) {
    const float* from = x + b * block;
    const i64 left = count - b * block, n = left < block ? left : block;
    u32 largest = 0;
    for (i64 i = lane; i < n; i += 32) {
      const u32 bits = __float_as_uint(from[i]) & 0x7fffffffu;
      largest = bits > largest ? bits : largest;
    }
#pragma unroll
    for (int step = 16; step; step >>= 1) {
      const u32 other = __shfl_xor_sync(0xffffffffu, largest, step);
      largest = other > largest ? other : largest;
    }
    const float inverse = inverse_of(largest);
    if (lane == 0) scales[b] = scale_of(largest);
    u8* to = codes + b * bytes_of(block);
    for (i64 j = lane; j < bytes_of(n); j += 32) to[j] = byte_at(from, j, n, inverse);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) flagcx_decode(
    const u8* codes, const float* scales, float* out, i64 count, i64 block, int add) {
  const i64 threads = (i64)gridDim.x * THREADS;
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < count; i += threads) {
    const i64 b = i / block, left = count - b * block, n = left < block ? left : block;
    const float x = number_at(codes + b * bytes_of(block), i - b * block, n) * scales[b];
    out[i] = add ? out[i] + x : x;
  }
}
"""

_CAST_KERNELS = r"""
extern "C" __global__ void __launch_bounds__(THREADS) flagcx_encode(const float* x, u16* codes, i64 count) {
  const i64 threads = (i64)gridDim.x * THREADS;
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < count; i += threads) codes[i] = TO(x[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS) flagcx_decode(
    const u16* codes, float* out, i64 count, int add) {
  const i64 threads = (i64)gridDim.x * THREADS;
  for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < count; i += threads) {
    const float x = FROM(codes[i]);
    out[i] = add ? out[i] + x : x;
  }
}
"""

_CASTS = MappingProxyType({"fp16": "float16", "bf16": "bfloat16"})
NAMES = (*_CODES, *_CASTS)
"""The codecs that have kernels."""


def arithmetic(name: str) -> str:
    """The functions on which a block's kernels stand, in C that a host compiler takes too."""
    return conversions() + _CODES[name] + _FACTORS + _PLACES


def compress_source(name: str) -> str:
    """The whole CUDA source of a codec's kernels, ``ENCODE`` and ``DECODE``.

    Args:
        name: "int8", "int4", "fp8", "fp8_e5m2", "fp16" or "bf16".

    Raises:
        OperationError: There are no kernels for that codec.

    Example:
        >>> "flagcx_encode" in compress_source("int8")
        True
    """
    head = f"{_HEAD}#define THREADS {THREADS}\n"
    if name in _CODES:
        return head + arithmetic(name) + _BLOCK_KERNELS
    if name not in _CASTS:
        raise OperationError(f"there are no kernels for {name!r}; expected one of {', '.join(NAMES)}")
    kind = _CASTS[name]
    head += f"#define TO to_{kind}\n#define FROM from_{kind}\n"
    return head + conversions() + float16_conversions() + _CAST_KERNELS
