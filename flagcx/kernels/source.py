"""The CUDA source of the kernel that does all local work of a step in one launch.

One kernel is made for each pair of dtype and operation. Its source needs no header of the CUDA
toolkit: conversions of half precision and fp8 are written out here, so NVRTC alone compiles it, for
any architecture, on a machine without a GPU.

What a launch does is data (see ``flagcx.kernels.fuse``): a table of *chains*. A chain reads element i
of each of its sources in the order listed, combines them from left to right in the accumulator's type,
rounds once and writes element i of its destination.
"""

from __future__ import annotations

from flagcx.dtypes import DType, ReduceOp
from flagcx.errors import OperationError

NAME = "flagcx_fused"
"""Name of the kernel in every module."""

THREADS = 256
"""Threads of a block."""

MAX_SOURCES = 256
"""Most sources of one chain; their addresses lie in shared memory."""

DEVICE_FUNCTION = "#define FLAGCX_DEVICE __device__ __forceinline__\n"
"""How every source begins that is compiled for a GPU."""

OPTIONS = ("-std=c++17", "--fmad=false")
"""Options of NVRTC. Without contraction a complex product rounds as NumPy's does."""

TYPES = r"""
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
"""

CONVERSIONS = (
    TYPES
    + r"""
// bfloat16 is the upper half of a float32; ties go to the even one.
FLAGCX_DEVICE float from_bfloat16(u16 x) { return __uint_as_float((u32)x << 16); }
FLAGCX_DEVICE u16 to_bfloat16(float f) {
  u32 b = __float_as_uint(f);
  if ((b & 0x7fffffffu) > 0x7f800000u) return (u16)((b >> 16) & 0x8000u) | 0x7fc0u;
  return (u16)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

// fp8 e4m3fn: 4 bits of exponent with bias 7, no infinity, largest 448. Shifted into a float32 the
// exponent lacks 120, which the product restores; it is exact for subnormal numbers too.
FLAGCX_DEVICE float from_float8_e4m3fn(u8 x) {
  u32 sign = (u32)(x & 0x80u) << 24;
  if ((x & 0x7fu) == 0x7fu) return __uint_as_float(sign | 0x7fc00000u);
  float magnitude = __uint_as_float((u32)(x & 0x7fu) << 20) * __uint_as_float((120u + 127u) << 23);
  return __uint_as_float(sign | __float_as_uint(magnitude));
}
FLAGCX_DEVICE u8 to_float8_e4m3fn(float f) {
  u32 b = __float_as_uint(f), sign = (b >> 24) & 0x80u, a = b & 0x7fffffffu;
  if (a > 0x43e80000u) return (u8)(sign | 0x7fu);  // above 464, the middle of 448 and 480
  if (a >= 0x3c800000u) return (u8)(sign | (((a + 0x7ffffu + ((a >> 20) & 1u)) >> 20) - (120u << 3)));
  // Below 2^-6 the spacing is 2^-9, which is that of the float32 numbers from 2^14 on.
  return (u8)(sign | (__float_as_uint(__uint_as_float(a) + 16384.0f) - __float_as_uint(16384.0f)));
}

// fp8 e5m2: 5 bits of exponent with bias 15, with infinity, largest 57344.
FLAGCX_DEVICE float from_float8_e5m2(u8 x) {
  u32 sign = (u32)(x & 0x80u) << 24, a = x & 0x7fu;
  if (a >= 0x7cu) return __uint_as_float(sign | (a == 0x7cu ? 0x7f800000u : 0x7fc00000u));
  float magnitude = __uint_as_float(a << 21) * __uint_as_float((112u + 127u) << 23);
  return __uint_as_float(sign | __float_as_uint(magnitude));
}
FLAGCX_DEVICE u8 to_float8_e5m2(float f) {
  u32 b = __float_as_uint(f), sign = (b >> 24) & 0x80u, a = b & 0x7fffffffu;
  if (a > 0x7f800000u) return (u8)(sign | 0x7eu);
  if (a >= 0x47700000u) return (u8)(sign | 0x7cu);  // from 61440 on, the middle of 57344 and infinity
  if (a >= 0x38800000u) return (u8)(sign | (((a + 0xfffffu + ((a >> 21) & 1u)) >> 21) - (112u << 2)));
  return (u8)(sign | (__float_as_uint(__uint_as_float(a) + 128.0f) - __float_as_uint(128.0f)));
}
"""
)
"""The integer types, and the conversions from and to bfloat16 and fp8, which a host compiler takes too."""

FLOAT16_CONVERSIONS = r"""
FLAGCX_DEVICE float from_float16(u16 x) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
  return f;
}
FLAGCX_DEVICE u16 to_float16(float f) {
  u16 x;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x) : "f"(f));
  return x;
}
"""
"""The conversions from and to float16, which are instructions of the GPU."""

PACK = r"""
const int N = 16 / sizeof(T);  // elements of a pack
union Pack { uint4 raw; u8 bytes[16]; FLAGCX_DEVICE T* at() { return (T*)bytes; } };
"""
"""Elements move in packs of 16 bytes. Follows the definition of the element type ``T``."""

_DIRECT = r"""
typedef {scalar} T;
typedef T A;
FLAGCX_DEVICE A widen(T x) {{ return x; }}
FLAGCX_DEVICE T narrow(A x) {{ return x; }}
"""

_WIDENED = r"""
typedef {scalar} T;
typedef float A;
FLAGCX_DEVICE A widen(T x) {{ return from_{name}(x); }}
FLAGCX_DEVICE T narrow(A x) {{ return to_{name}(x); }}
"""

_COMPLEX = r"""
typedef {part} PART;
struct T {{ PART re, im; }};
typedef T A;
FLAGCX_DEVICE A widen(T x) {{ return x; }}
FLAGCX_DEVICE T narrow(A x) {{ return x; }}
"""

# Averages of integers and bfloat16, whose sums would overflow; see flagcx.transport.average.
_WIDER = r"""
typedef {scalar} T;
typedef {wide} A;
FLAGCX_DEVICE A widen(T x) {{ return (A)x; }}
FLAGCX_DEVICE T narrow(A x) {{ return (T)x; }}
"""

_HALVES = r"""
typedef {scalar} T;
struct A {{ i64 upper; u64 lower; }};
FLAGCX_DEVICE A widen(T x) {{ return A{{(i64)(x >> 32), (u64)x & 0xffffffffull}}; }}
FLAGCX_DEVICE T narrow(A x) {{ return (T)(((u64)x.upper << 32) + x.lower); }}
FLAGCX_DEVICE A quotient(A x, i64 n) {{
  i64 upper = x.upper / n, left = x.upper % n;
  if (left < 0) {{ left += n; upper--; }}
  const u64 lower = x.lower + ((u64)left << 32);
  u64 mean = ((u64)upper << 32) + lower / (u64)n;
  {toward_zero}
  return A{{0, mean}};
}}
"""

_WEIGHTED = r"""
typedef u16 T;
typedef float A;
FLAGCX_DEVICE A widen(T x) { return from_bfloat16(x) * 1.52587890625e-5f; }  // 2^-16
FLAGCX_DEVICE T narrow(A x) { return to_bfloat16(x); }
"""

_KERNEL = r"""
struct Chain { i64 memory, start, count, first, sources, finish; };
struct Source { i64 memory, start; };

// Combines K further sources into the accumulators of one pack; all loads come before the first use.
template <int K> FLAGCX_DEVICE void take(A* sum, const T* const* from, i64 i) {
  Pack pack[K];
#pragma unroll
  for (int k = 0; k < K; k++) pack[k].raw = *(const uint4*)(from[k] + i);
#pragma unroll
  for (int k = 0; k < K; k++)
#pragma unroll
    for (int e = 0; e < N; e++) sum[e] = combine(sum[e], widen(pack[k].at()[e]));
}

FLAGCX_DEVICE void one_pack(T* to, const T* const* from, int sources, i64 i, i64 finish, double factor) {
  Pack pack;
  pack.raw = *(const uint4*)(from[0] + i);
  if (sources > 1 || finish) {
    A sum[N];
#pragma unroll
    for (int e = 0; e < N; e++) sum[e] = widen(pack.at()[e]);
    int k = 1;
    for (; k + 4 <= sources; k += 4) take<4>(sum, from + k, i);
    if (sources - k == 3) take<3>(sum, from + k, i);
    if (sources - k == 2) take<2>(sum, from + k, i);
    if (sources - k == 1) take<1>(sum, from + k, i);
#pragma unroll
    for (int e = 0; e < N; e++) pack.at()[e] = narrow(finished(sum[e], finish, factor));
  }
  *(uint4*)(to + i) = pack.raw;
}

FLAGCX_DEVICE void one_element(T* to, const T* const* from, int sources, i64 i, i64 finish, double factor) {
  T x = from[0][i];
  if (sources > 1 || finish) {
    A sum = widen(x);
    for (int k = 1; k < sources; k++) sum = combine(sum, widen(from[k][i]));
    x = narrow(finished(sum, finish, factor));
  }
  to[i] = x;
}

extern "C" __global__ void __launch_bounds__(THREADS) flagcx_fused(
    const Chain* chains, const Source* sources, u8* sendbuf, u8* recvbuf, u8* scratch, u8* scaled,
    double factor) {
  __shared__ const T* from[MAX_SOURCES];
  __shared__ int misaligned;
  const Chain chain = chains[blockIdx.y];
  u8* const memory[4] = {sendbuf, recvbuf, scratch, scaled};
  T* const to = (T*)memory[chain.memory] + chain.start;
  const u32 offset = (u32)((u64)to & 15);
  if (threadIdx.x == 0) misaligned = offset % sizeof(T) != 0;
  __syncthreads();
  for (int k = threadIdx.x; k < chain.sources; k += THREADS) {
    const Source source = sources[chain.first + k];
    from[k] = (const T*)memory[source.memory] + source.start;
    if (((u64)from[k] & 15) != offset) misaligned = 1;
  }
  __syncthreads();
  const i64 thread = (i64)blockIdx.x * THREADS + threadIdx.x, threads = (i64)gridDim.x * THREADS;
  const int n = (int)chain.sources;
  // Whole packs between the first and the last address that is a multiple of 16; the rest by elements.
  i64 head = misaligned ? chain.count : offset ? (i64)((16 - offset) / sizeof(T)) : 0;
  if (head > chain.count) head = chain.count;
  const i64 packs = (chain.count - head) / N, tail = head + packs * N;
  const i64 finish = chain.finish;
  for (i64 i = thread; i < head; i += threads) one_element(to, from, n, i, finish, factor);
  for (i64 i = thread; i < packs; i += threads) one_pack(to, from, n, head + i * N, finish, factor);
  for (i64 i = tail + thread; i < chain.count; i += threads) one_element(to, from, n, i, finish, factor);
}
"""

_SCALARS = {
    "bool": "u8",
    "int8": "signed char",
    "uint8": "u8",
    "int16": "short",
    "uint16": "u16",
    "int32": "int",
    "uint32": "u32",
    "int64": "i64",
    "uint64": "u64",
    "float32": "float",
    "float64": "double",
    "float16": "u16",
    "bfloat16": "u16",
    "float8_e4m3fn": "u8",
    "float8_e5m2": "u8",
}

_MIN = "a < b || a != a ? a : b"
_MAX = "a > b || a != a ? a : b"
_LAND = "(A)(a != 0 && b != 0)"
_LOR = "(A)(a != 0 || b != 0)"

_EXPRESSIONS: dict[str, dict[str, str]] = {
    "bool": {
        "sum": "a | b", "prod": "a & b", "min": "a & b", "max": "a | b",
        "band": "a & b", "bor": "a | b", "bxor": "a ^ b", "land": "a & b", "lor": "a | b",
    },
    # In unsigned numbers, whose overflow is defined.
    "int": {
        "sum": "(A)((u64)a + (u64)b)", "prod": "(A)((u64)a * (u64)b)",
        "min": "a < b ? a : b", "max": "a > b ? a : b",
        "band": "(A)(a & b)", "bor": "(A)(a | b)", "bxor": "(A)(a ^ b)", "land": _LAND, "lor": _LOR,
    },
    "float": {
        "sum": "a + b", "prod": "a * b", "min": _MIN, "max": _MAX, "land": _LAND, "lor": _LOR,
    },
    "complex": {
        "sum": "A{a.re + b.re, a.im + b.im}",
        "prod": "A{a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}",
        "land": "A{(a.re != 0 || a.im != 0) && (b.re != 0 || b.im != 0) ? PART(1) : PART(0), PART(0)}",
        "lor": "A{a.re != 0 || a.im != 0 || b.re != 0 || b.im != 0 ? PART(1) : PART(0), PART(0)}",
    },
}  # fmt: skip

# The last operation on a result: the product with a factor, or the quotient by the number of ranks.
_FINISHES = {
    "bool": ("x", "x"),
    "int": ("x", "(A)((WIDE)x / (WIDE)factor)"),  # toward zero
    "float": ("x * (A)factor", "x / (A)factor"),
    "complex": (
        "A{x.re * (PART)factor, x.im * (PART)factor}",
        "A{x.re / (PART)factor, x.im / (PART)factor}",
    ),
}

_COMBINED = r"""
FLAGCX_DEVICE A combine(A a, A b) {{ return {expression}; }}
FLAGCX_DEVICE A scaled(A x, double factor) {{ (void)factor; return {scaled}; }}
FLAGCX_DEVICE A divided(A x, double factor) {{ (void)factor; return {divided}; }}
FLAGCX_DEVICE A finished(A x, i64 finish, double factor) {{
  return finish == 0 ? {kept} : finish == 1 ? scaled(x, factor) : divided(x, factor);
}}
"""

_SHARED_NAMES = {"avg": "sum", "scaled_sum": "sum"}


def base_name(op: ReduceOp | None, dtype: DType) -> str:
    """Name of the operation whose kernel serves ``op``; "sum" for a call that combines nothing.

    Averages share the kernel of the sum, except where they need a wider accumulator.
    """
    if op is not None and op.average and (dtype.kind == "int" or dtype.name == "bfloat16"):
        return op.name
    return "sum" if op is None else _SHARED_NAMES.get(op.name, op.name)


def has_kernel(dtype: DType, op: ReduceOp | None) -> bool:
    """Whether the operation is one of the table's, and not a ufunc or kernel of the caller's own."""
    if op is not None and op.code == 0:
        return False
    return op is None or _SHARED_NAMES.get(op.name, op.name) in _EXPRESSIONS[dtype.kind]


def kernel_source(dtype: DType, op: ReduceOp | None) -> str:
    """The whole CUDA source of the kernel for one dtype and operation.

    Args:
        dtype: The element type.
        op: The operation, one of ``flagcx.dtypes.OPS`` or a scaled sum; None for copies alone.

    Raises:
        OperationError: The operation is not one of the table's.

    Example:
        >>> from flagcx.dtypes import OPS, dtype_of
        >>> "flagcx_fused" in kernel_source(dtype_of("float32"), OPS["max"])
        True
    """
    if not has_kernel(dtype, op):
        name = "None" if op is None else op.name
        raise OperationError(
            f"there is no kernel for op={name!r} of {dtype.name} arrays; expected one of "
            f"{', '.join(sorted(_EXPRESSIONS[dtype.kind]))}"
        )
    head = f"{DEVICE_FUNCTION}#define THREADS {THREADS}\n#define MAX_SOURCES {MAX_SOURCES}\n"
    return head + CONVERSIONS + FLOAT16_CONVERSIONS + element_source(dtype, op) + PACK + _KERNEL


def element_source(dtype: DType, op: ReduceOp | None) -> str:
    """The element type ``T``, its accumulator ``A``, and ``widen``, ``narrow``, ``combine``, ``finished``.

    Follows ``CONVERSIONS`` and ``FLOAT16_CONVERSIONS``.
    """
    name = base_name(op, dtype)
    if name == "avg":
        return _average_source(dtype)
    scaled, divided = _FINISHES[dtype.kind]
    expression = _EXPRESSIONS[dtype.kind][name]
    combined = _COMBINED.format(expression=expression, scaled=scaled, divided=divided, kept="x")
    return _type_source(dtype) + combined


def _average_source(dtype: DType) -> str:
    scalar, nbytes, kept = _SCALARS[dtype.name], dtype.numpy.itemsize, "x"
    expression, divided = "a + b", "x / (A)factor"
    if dtype.kind != "int":
        source, kept, divided = _WEIGHTED, "x * 65536.0f", "x / ((A)factor * 1.52587890625e-5f)"
    elif nbytes < 8:
        source = _WIDER.format(scalar=scalar, wide="int" if nbytes < 4 else "i64")
    else:
        signed = dtype.numpy.kind == "i"
        toward_zero = "if ((i64)mean < 0 && lower % (u64)n) mean++;" if signed else ""
        source = _HALVES.format(scalar=scalar, toward_zero=toward_zero)
        expression, divided = "A{a.upper + b.upper, a.lower + b.lower}", "quotient(x, (i64)factor)"
    return source + _COMBINED.format(expression=expression, scaled="x", divided=divided, kept=kept)


def _type_source(dtype: DType) -> str:
    if dtype.kind == "complex":
        return _COMPLEX.format(part="float" if dtype.name == "complex64" else "double")
    form = _DIRECT if dtype.accumulate is None else _WIDENED
    wide = "typedef i64 WIDE;\n" if dtype.numpy.kind == "i" else "typedef u64 WIDE;\n"
    return form.format(scalar=_SCALARS[dtype.name], name=dtype.name) + wide
