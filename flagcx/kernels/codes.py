"""The CUDA source of codes: how a warp's numbers become words of codes, and numbers again.

``flagcx.kernels.compress`` has the kernels around it.
"""

from __future__ import annotations

from types import MappingProxyType

FACTORS = r"""
// Factors of a block whose largest magnitude has these bits: 0 up to 2e-34, NaN for infinity and NaN.
FLAGCX_DEVICE float inverse_of(u32 bits) {
  float largest = __uint_as_float(bits);
  return bits < 0x7f800000u && largest > 2e-34f ? LIMIT / largest : 0.0f;
}
FLAGCX_DEVICE float scale_of(u32 bits) {
  float largest = __uint_as_float(bits);
  if (bits >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  return largest > 2e-34f ? largest / LIMIT : 0.0f;
}
"""

CODES = MappingProxyType(
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

# A word holds the codes of a group: of four numbers, or of four of a block's first half and the four at the
# same place of its second half.
WORDS = r"""
typedef u32 Word;
#ifdef PAIRS
const int PER = 8;
FLAGCX_DEVICE i64 bytes_of(i64 n) { return (n + 1) / 2; }
FLAGCX_DEVICE Word code(const float* v, float inverse) {
  Word word = 0;
#pragma unroll
  for (int k = 0; k < 4; k++)
    word |= (Word)(u8)((to_code(v[k] * inverse) & 15) | to_code(v[4 + k] * inverse) << 4) << 8 * k;
  return word;
}
FLAGCX_DEVICE void decode(Word word, float scale, float* v) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    v[k] = from_code((u8)(word >> 8 * k & 15)) * scale;
    v[4 + k] = from_code((u8)(word >> (8 * k + 4) & 15)) * scale;
  }
}
#else
const int PER = 4;
FLAGCX_DEVICE i64 bytes_of(i64 n) { return n; }
FLAGCX_DEVICE Word code(const float* v, float inverse) {
  Word word = 0;
#pragma unroll
  for (int k = 0; k < 4; k++) word |= (Word)to_code(v[k] * inverse) << 8 * k;
  return word;
}
FLAGCX_DEVICE void decode(Word word, float scale, float* v) {
#pragma unroll
  for (int k = 0; k < 4; k++) v[k] = from_code((u8)(word >> 8 * k)) * scale;
}
#endif
FLAGCX_DEVICE i64 factors_nbytes(i64 count) { return ((count + BLOCK - 1) / BLOCK * 4 + 15) / 16 * 16; }
FLAGCX_DEVICE float load_factor(const float* at) { return *at; }
FLAGCX_DEVICE void store_factor(float* at, float x) { *at = x; }
"""

# Casts have no factors.
CAST_WORDS = r"""
typedef u64 Word;
const int PER = 4;
FLAGCX_DEVICE i64 bytes_of(i64 n) { return 2 * n; }
FLAGCX_DEVICE Word code(const float* v, float) {
  Word word = 0;
#pragma unroll
  for (int k = 0; k < 4; k++) word |= (Word)TO(v[k]) << 16 * k;
  return word;
}
FLAGCX_DEVICE void decode(Word word, float, float* v) {
#pragma unroll
  for (int k = 0; k < 4; k++) v[k] = FROM((u16)(word >> 16 * k));
}
FLAGCX_DEVICE i64 factors_nbytes(i64) { return 0; }
FLAGCX_DEVICE float load_factor(const float*) { return 1.0f; }
FLAGCX_DEVICE void store_factor(float*, float) {}
FLAGCX_DEVICE float inverse_of(u32) { return 1.0f; }
FLAGCX_DEVICE float scale_of(u32) { return 1.0f; }
"""
