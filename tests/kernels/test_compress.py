"""The codecs' kernels: they compile, and their arithmetic makes the bits that the NumPy codecs make."""

from __future__ import annotations

import ctypes
import subprocess

import numpy as np
import pytest

from flagcx.compression import Quantized
from flagcx.errors import OperationError
from flagcx.kernels import compress
from flagcx.kernels.source import OPTIONS
from tests.kernels import nvrtc
from tests.kernels.test_conversions import COMPILER

BLOCKED = ("int8", "int4", "fp8", "fp8_e5m2")

_HOST = """
#include <math.h>
#include <string.h>
#define FLAGCX_DEVICE static inline
static inline float __uint_as_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned x; memcpy(&x, &f, 4); return x; }
"""
# The kernels' loops, one thread after the other.
_LOOPS = """
extern "C" void encode(const float* x, u8* codes, float* scales, long count, long block) {
  for (long b = 0; b * block < count; b++) {
    const float* from = x + b * block;
    long left = count - b * block, n = left < block ? left : block;
    u32 largest = 0;
    for (long i = 0; i < n; i++) {
      u32 bits = __float_as_uint(from[i]) & 0x7fffffffu;
      largest = bits > largest ? bits : largest;
    }
    scales[b] = scale_of(largest);
    u8* to = codes + b * bytes_of(block);
    for (long j = 0; j < bytes_of(n); j++) to[j] = byte_at(from, j, n, inverse_of(largest));
  }
}
extern "C" void decode(const u8* codes, const float* scales, float* out, long count, long block) {
  for (long i = 0; i < count; i++) {
    long b = i / block, left = count - b * block, n = left < block ? left : block;
    out[i] = number_at(codes + b * bytes_of(block), i - b * block, n) * scales[b];
  }
}
"""


@pytest.mark.skipif(
    nvrtc.library() is None, reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12"
)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", compress.NAMES)
def test_kernels_compile_without_a_warning(name, architecture):
    made = nvrtc.compile_for(compress.compress_source(name), architecture, OPTIONS)
    assert made.status == 0, made.log
    assert made.log == ""
    assert compress.ENCODE.encode() in made.code and compress.DECODE.encode() in made.code


def test_a_codec_without_kernels_is_named():
    with pytest.raises(OperationError, match="no kernels for 'topk'; expected one of int8, int4, fp8"):
        compress.compress_source("topk")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> dict[str, ctypes.CDLL]:
    if COMPILER is None:
        pytest.skip("no C++ compiler on this machine")
    directory, made = tmp_path_factory.mktemp("compress"), {}
    for name in BLOCKED:
        source, library = directory / f"{name}.cpp", directory / f"{name}.so"
        source.write_text(_HOST + compress.arithmetic(name) + _LOOPS)
        command = [COMPILER, "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        made[name] = ctypes.CDLL(str(library))
    return made


def pointers(*arrays: np.ndarray) -> list[ctypes.c_void_p]:
    return [a.ctypes.data_as(ctypes.c_void_p) for a in arrays]


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("block", [32, 256])
@pytest.mark.parametrize("count", [1, 2, 33, 255, 256, 70_001])
def test_the_kernels_arithmetic_makes_the_bits_of_numpy(libraries, name, block, count):
    rng = np.random.default_rng(count)
    x = (rng.standard_normal(count) * 10.0 ** rng.uniform(-30, 30, count)).astype(np.float32)
    x[:: 2 * block + 1] = 0
    if count > 3 * block:
        x[:block] = 0
        x[block : 2 * block] = 1e-38
        x[2 * block : 3 * block] = np.arange(block) + np.float32(0.5)  # ties
    codec = Quantized(name, block)
    wire = np.zeros(codec.wire_nbytes(count), np.uint8)
    want = codec.encode(x).parts[0]
    scales, codes = codec._views(wire, count)
    libraries[name].encode(*pointers(x, codes, scales), ctypes.c_long(count), ctypes.c_long(block))
    want_scales, want_codes = codec._views(want, count)
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_array_equal(codes, want_codes)
    out = np.empty_like(x)
    libraries[name].decode(*pointers(codes, scales, out), ctypes.c_long(count), ctypes.c_long(block))
    np.testing.assert_array_equal(out, codec.decode(codec.encode(x)))


@pytest.mark.parametrize("name", BLOCKED)
def test_blocks_with_infinity_or_nan_decode_to_nan(libraries, name):
    x = np.ones(96, np.float32)
    x[3], x[40] = np.inf, np.nan
    scales, codes = np.empty(3, np.float32), np.empty(96, np.uint8)
    libraries[name].encode(*pointers(x, codes, scales), ctypes.c_long(96), ctypes.c_long(32))
    out = np.empty_like(x)
    libraries[name].decode(*pointers(codes, scales, out), ctypes.c_long(96), ctypes.c_long(32))
    assert np.isnan(out[:64]).all() and (out[64:] == 1).all()
