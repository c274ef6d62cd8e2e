"""The kernels' conversions of bfloat16 and fp8, compiled for the host, against ml_dtypes, bit by bit."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import ml_dtypes
import numpy as np
import pytest

from flagcx.kernels.source import CONVERSIONS

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
NAMES = {"bfloat16": "u16", "float8_e4m3fn": "u8", "float8_e5m2": "u8"}

_DEVICE = """
#include <string.h>
#define FLAGCX_DEVICE static inline
static inline float __uint_as_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned x; memcpy(&x, &f, 4); return x; }
"""
_LOOPS = """
extern "C" void widen_{name}(const {kind}* a, float* b, long n) {{
  for (long i = 0; i < n; i++) b[i] = from_{name}(a[i]);
}}
extern "C" void narrow_{name}(const float* a, {kind}* b, long n) {{
  for (long i = 0; i < n; i++) b[i] = to_{name}(a[i]);
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("no C++ compiler on this machine")
    directory = tmp_path_factory.mktemp("conversions")
    loops = "".join(_LOOPS.format(name=name, kind=kind) for name, kind in NAMES.items())
    (directory / "host.cpp").write_text(_DEVICE + CONVERSIONS + loops)
    made = directory / "host.so"
    command = [COMPILER, "-O1", "-shared", "-fPIC", "-o", str(made), str(directory / "host.cpp")]
    subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(made))


def converted(function, given: np.ndarray, dtype) -> np.ndarray:
    result = np.empty(len(given), dtype)
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (given, result)]
    function(*pointers, ctypes.c_long(len(given)))
    return result


def all_values(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Every bit pattern of a dtype, as unsigned numbers and as what they stand for in float32."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    bits = np.arange(1 << (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}")
    return bits, bits.view(dtype).astype(np.float32)


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(want[numbers]))


@pytest.mark.parametrize("name", NAMES)
def test_every_value_widens_as_ml_dtypes_says(library, name):
    bits, values = all_values(name)
    assert_same(converted(getattr(library, f"widen_{name}"), bits, np.float32), values)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_narrow_as_ml_dtypes_says(library, name):
    """Every value, every middle of two with its neighbours, and a million bit patterns at random."""
    bits, values = all_values(name)
    finite = np.unique(values[np.isfinite(values)])
    middles = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)]
    random = np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, np.uint32).view(np.float32)
    edges = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 464, 465, 61439, 61440, 65536, 1e-10])
    given = np.concatenate([values, middles, *beside, random, edges])
    got = converted(getattr(library, f"narrow_{name}"), given, bits.dtype)
    dtype = getattr(ml_dtypes, name)
    with np.errstate(all="ignore"):
        want = given.astype(dtype)
    assert_same(got.view(dtype).astype(np.float32), want.astype(np.float32))
