"""The CUDA source of the kernels that encode, reduce and decode gradients: blocks with a factor, and casts.

As in ``flagcx.kernels.source``, no header of the CUDA toolkit is needed. The kernels produce the same bits as
the NumPy codecs, and a host compiler takes all but their head, with a warp of one thread.

A message, or a piece of it, consists of one stripe for each rank; all stripes are encoded in one launch. A
warp processes one block of a stripe, whose numbers its threads hold in groups that share a word of codes: it
finds the largest magnitude, as the largest bit pattern, so that NaN wins, and then writes the codes. One
kernel decodes the stripes of all ranks, adds them in the order of ranks and encodes the sum, so that all data
is read and written once.
"""

from __future__ import annotations

from types import MappingProxyType

from flagcx.errors import OperationError
from flagcx.kernels.codes import CAST_WORDS, CODES, FACTORS, WORDS
from flagcx.kernels.source import CONVERSIONS, DEVICE_FUNCTION, FLOAT16_CONVERSIONS

ENCODE, REDUCE, DECODE = "flagcx_encode", "flagcx_reduce", "flagcx_decode"
"""Names of the three kernels in every module."""

THREADS, WARP = 256, 32
"""Threads of a block of threads, and of a warp."""

_HEAD = r"""
#define FLAGCX_KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
FLAGCX_DEVICE int lane() { return threadIdx.x & (LANES - 1); }
FLAGCX_DEVICE long long warp() { return ((long long)blockIdx.x * THREADS + threadIdx.x) / LANES; }
FLAGCX_DEVICE long long warps() { return (long long)gridDim.x * (THREADS / LANES); }
FLAGCX_DEVICE unsigned largest_of_warp(unsigned x) {
#pragma unroll
  for (int step = LANES / 2; step; step >>= 1) {
    const unsigned other = __shfl_xor_sync(0xffffffffu, x, step);
    x = other > x ? other : x;
  }
  return x;
}
"""

_KERNELS = r"""
// Groups of a block, and how many of them a thread holds: few in registers, many in local memory.
const int GROUPS = BLOCK / PER, HELD = (GROUPS + LANES - 1) / LANES;
const int UNROLL = HELD <= 8 ? HELD : 1, RANKS_AT_ONCE = HELD <= 2 ? 4 : 1;
struct alignas(16) Four { float x[4]; };

// The stripe of a piece that a block is in, and how many numbers it has, which may be none.
struct BlockPlace { i64 stripe, count, start, n; };
FLAGCX_DEVICE BlockPlace place_of(i64 at, i64 count, i64 width) {
  const i64 each = (width + BLOCK - 1) / BLOCK, stripe = at / each;
  const i64 left = count - stripe * width, own = left < width ? left : width;
  const i64 start = (at - stripe * each) * BLOCK, rest = own - start;
  return {stripe, own, start, rest < BLOCK ? rest : BLOCK};
}
// The factor and the codes of a block in the coded form of a stripe.
struct Coded { u8* codes; float* factor; };
FLAGCX_DEVICE Coded coded_at(u8* wire, i64 count, i64 start) {
  const i64 number = start / BLOCK;
  return {wire + factors_nbytes(count) + number * bytes_of(BLOCK), (float*)wire + number};
}
// Whether a block has its full length and is aligned, so that groups and words can be moved whole.
FLAGCX_DEVICE bool whole(i64 n, const float* x, const float* y, const u8* codes) {
  return n == BLOCK && (((u64)x | (u64)y) & 15) == 0 && ((u64)codes & (sizeof(Word) - 1)) == 0;
}

// Loads or stores group g of n numbers; numbers after the end are 0 and are not written.
template <bool WHOLE> FLAGCX_DEVICE void load_group(const float* x, i64 g, i64 n, float* v) {
#pragma unroll
  for (int part = 0; part < PER / 4; part++) {
    const i64 half = (n + 1) / 2, first = part * half + 4 * g, stop = PER == 4 || part ? n : half;
    if (WHOLE) {
      const Four four = *(const Four*)(x + first);
      for (int k = 0; k < 4; k++) v[4 * part + k] = four.x[k];
    } else {
      for (int k = 0; k < 4; k++) v[4 * part + k] = first + k < stop ? x[first + k] : 0.0f;
    }
  }
}
template <bool WHOLE> FLAGCX_DEVICE void store_group(float* x, i64 g, i64 n, const float* v) {
#pragma unroll
  for (int part = 0; part < PER / 4; part++) {
    const i64 half = (n + 1) / 2, first = part * half + 4 * g, stop = PER == 4 || part ? n : half;
    if (WHOLE) {
      Four four;
      for (int k = 0; k < 4; k++) four.x[k] = v[4 * part + k];
      *(Four*)(x + first) = four;
    } else {
      for (int k = 0; k < 4; k++)
        if (first + k < stop) x[first + k] = v[4 * part + k];
    }
  }
}
// Decodes group g; numbers after the end are 0.
template <bool WHOLE>
FLAGCX_DEVICE void load_coded(const u8* codes, i64 g, i64 n, float scale, float* v) {
  Word word = 0;
  if (WHOLE) {
    word = ((const Word*)codes)[g];
  } else {
    for (i64 i = 0, at = g * sizeof(Word); i < (i64)sizeof(Word) && at + i < bytes_of(n); i++)
      word |= (Word)codes[at + i] << 8 * i;
  }
  decode(word, scale, v);
  for (int k = 0; k < (WHOLE ? 0 : PER); k++) {
    const i64 half = (n + 1) / 2, low = 4 * g + k % 4, at = k < 4 ? low : half + low;
    if (at >= n || (PER > 4 && low >= half)) v[k] = 0.0f;
  }
}
template <bool WHOLE> FLAGCX_DEVICE void store_word(u8* codes, i64 g, i64 n, Word word) {
  if (WHOLE) {
    ((Word*)codes)[g] = word;
  } else {
    for (i64 i = 0, at = g * sizeof(Word); i < (i64)sizeof(Word) && at + i < bytes_of(n); i++)
      codes[at + i] = (u8)(word >> 8 * i);
  }
}

// Encodes the numbers that a warp holds. The error of the codes, divided by ``factor``, goes to ``lost``: 0
// for infinity and NaN, which no later call could correct.
template <bool WHOLE>
FLAGCX_DEVICE void code_held(float (*held)[PER], i64 n, const Coded& to, float* lost, float factor) {
  u32 largest = 0;
#pragma unroll UNROLL
  for (int h = 0; h < HELD; h++)
#pragma unroll
    for (int k = 0; k < PER; k++) {
      const u32 bits = __float_as_uint(held[h][k]) & 0x7fffffffu;
      largest = bits > largest ? bits : largest;
    }
  largest = largest_of_warp(largest);
  const float inverse = inverse_of(largest), scale = scale_of(largest);
  if (lane() == 0) store_factor(to.factor, scale);
#pragma unroll UNROLL
  for (int h = 0; h < HELD; h++) {
    const i64 g = lane() + h * LANES;
    if (g >= GROUPS) continue;
    const Word word = code(held[h], inverse);
    store_word<WHOLE>(to.codes, g, n, word);
    if (!lost) continue;
    float left[PER];
    decode(word, scale, left);
#pragma unroll
    for (int k = 0; k < PER; k++) {
      left[k] = held[h][k] - left[k];
      if (factor != 1.0f) left[k] /= factor;
      if ((__float_as_uint(left[k]) & 0x7f800000u) == 0x7f800000u) left[k] = 0.0f;
    }
    store_group<WHOLE>(lost, g, n, left);
  }
}

// The numbers of a block, with the residual if there is one.
template <bool WHOLE>
FLAGCX_DEVICE void take(const float* x, const float* residual, i64 n, float (*held)[PER]) {
#pragma unroll UNROLL
  for (int h = 0; h < HELD; h++) {
    const i64 g = lane() + h * LANES;
#pragma unroll
    for (int k = 0; k < PER; k++) held[h][k] = 0.0f;
    if (g >= GROUPS) continue;
    load_group<WHOLE>(x, g, n, held[h]);
    if (!residual) continue;
    float kept[PER];
    load_group<WHOLE>(residual, g, n, kept);
#pragma unroll
    for (int k = 0; k < PER; k++) held[h][k] += kept[k];
  }
}

template <bool WHOLE>
FLAGCX_DEVICE void encode_block(const float* x, const float* before, float* now, i64 n, const Coded& to) {
  float held[HELD][PER];
  take<WHOLE>(x, before, n, held);
  code_held<WHOLE>(held, n, to, now, 1.0f);
}

// A residual is read as it was before, and written as it is now; both are null where there is none.
FLAGCX_KERNEL flagcx_encode(
    const float* x, const float* before, float* now, u8* wire, i64 count, i64 width, i64 stride, i64 stripes,
    i64 own) {
  const i64 blocks = (width + BLOCK - 1) / BLOCK * stripes;
  for (i64 at = warp(); at < blocks; at += warps()) {
    const BlockPlace p = place_of(at, count, width);
    if (p.stripe == own || p.n <= 0) continue;
    const i64 first = p.stripe * width + p.start;
    const float* const kept = before ? before + first : nullptr;
    float* const lost = before ? now + first : nullptr;
    const Coded to = coded_at(wire + p.stripe * stride, p.count, p.start);
    const bool fast = whole(p.n, x + first, kept, to.codes) && whole(p.n, lost, lost, to.codes);
    if (fast) encode_block<true>(x + first, kept, lost, p.n, to);
    else encode_block<false>(x + first, kept, lost, p.n, to);
  }
}

template <bool WHOLE>
FLAGCX_DEVICE void reduce_block(
    const Coded& from, i64 stride, const float* x, const float* before, float* now, i64 n, const Coded& to,
    int rank, int size, float factor) {
  float own[HELD][PER], held[HELD][PER] = {};
  take<WHOLE>(x, before, n, own);
#pragma unroll RANKS_AT_ONCE
  for (int q = 0; q < size; q++) {
    const float scale = q == rank ? 0.0f : load_factor((const float*)((const u8*)from.factor + q * stride));
#pragma unroll UNROLL
    for (int h = 0; h < HELD; h++) {
      const i64 g = lane() + h * LANES;
      if (g >= GROUPS) continue;
      float v[PER];
      if (q != rank) load_coded<WHOLE>(from.codes + q * stride, g, n, scale, v);
#pragma unroll
      for (int k = 0; k < PER; k++) {
        const float number = q == rank ? own[h][k] : v[k];
        held[h][k] = q ? held[h][k] + number : number;
      }
    }
  }
  if (factor != 1.0f)
#pragma unroll UNROLL
    for (int h = 0; h < HELD; h++)
#pragma unroll
      for (int k = 0; k < PER; k++) held[h][k] *= factor;
  code_held<WHOLE>(held, n, to, now, factor);
}

FLAGCX_KERNEL flagcx_reduce(
    u8* arrived, const float* x, const float* before, float* now, u8* reduced, i64 count, i64 stride,
    int rank, int size, float factor) {
  for (i64 start = warp() * BLOCK; start < count; start += warps() * BLOCK) {
    const i64 n = count - start < BLOCK ? count - start : BLOCK;
    const float* const kept = before ? before + start : nullptr;
    float* const lost = before ? now + start : nullptr;
    const Coded from = coded_at(arrived, count, start), to = coded_at(reduced, count, start);
    const bool fast = whole(n, x + start, kept, to.codes) && whole(n, lost, lost, from.codes);
    if (fast) reduce_block<true>(from, stride, x + start, kept, lost, n, to, rank, size, factor);
    else reduce_block<false>(from, stride, x + start, kept, lost, n, to, rank, size, factor);
  }
}

template <bool WHOLE>
FLAGCX_DEVICE void decode_block(const Coded& from, float* out, int* spoilt, i64 n, bool add) {
  const float scale = load_factor(from.factor);
  u32 largest = 0;
#pragma unroll UNROLL
  for (int h = 0; h < HELD; h++) {
    const i64 g = lane() + h * LANES;
    if (g >= GROUPS) continue;
    float v[PER], before[PER];
    load_coded<WHOLE>(from.codes, g, n, scale, v);
    if (add) {
      load_group<WHOLE>(out, g, n, before);
#pragma unroll
      for (int k = 0; k < PER; k++) v[k] = before[k] + v[k];
    }
#pragma unroll
    for (int k = 0; k < PER; k++) {
      const u32 bits = __float_as_uint(v[k]) & 0x7fffffffu;
      largest = bits > largest ? bits : largest;
    }
    store_group<WHOLE>(out, g, n, v);
  }
  if (spoilt && largest >= 0x7f800000u) *spoilt = 1;
}

FLAGCX_KERNEL flagcx_decode(
    u8* wire, float* out, int* spoilt, i64 count, i64 width, i64 stride, i64 stripes, int add) {
  const i64 blocks = (width + BLOCK - 1) / BLOCK * stripes;
  for (i64 at = warp(); at < blocks; at += warps()) {
    const BlockPlace p = place_of(at, count, width);
    if (p.n <= 0) continue;
    const Coded from = coded_at(wire + p.stripe * stride, p.count, p.start);
    float* const to = out + p.stripe * width + p.start;
    if (whole(p.n, to, to, from.codes)) decode_block<true>(from, to, spoilt, p.n, add);
    else decode_block<false>(from, to, spoilt, p.n, add);
  }
}
"""

_CASTS = MappingProxyType({"fp16": "float16", "bf16": "bfloat16"})
NAMES = (*CODES, *_CASTS)
"""The codecs that have kernels."""


def kernels(name: str, block: int) -> str:
    """The kernels of a codec without their head, which defines a warp.

    Args:
        name: "int8", "int4", "fp8", "fp8_e5m2", "fp16" or "bf16".
        block: Numbers that share a factor, and that one warp processes: a multiple of 32.

    Raises:
        OperationError: There are no kernels for that codec.
    """
    head = f"#define BLOCK {block}\n" + CONVERSIONS
    if name in CODES:
        return head + CODES[name] + FACTORS + WORDS + _KERNELS
    if name not in _CASTS:
        raise OperationError(f"there are no kernels for {name!r}; expected one of {', '.join(NAMES)}")
    kind = _CASTS[name]
    casts = f"#define TO to_{kind}\n#define FROM from_{kind}\n"
    return head + casts + FLOAT16_CONVERSIONS + CAST_WORDS + _KERNELS


def compress_source(name: str, block: int) -> str:
    """The whole CUDA source of a codec's kernels, ``ENCODE``, ``REDUCE`` and ``DECODE``.

    Takes and raises the same as ``kernels``.

    Example:
        >>> "flagcx_encode" in compress_source("int8", 256)
        True
    """
    return f"{DEVICE_FUNCTION}#define THREADS {THREADS}\n#define LANES {WARP}\n{_HEAD}{kernels(name, block)}"
