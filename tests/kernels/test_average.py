"""The kernels' averages, compiled for the host, against those of host transports, bit by bit."""

from __future__ import annotations

import ctypes
import subprocess

import ml_dtypes
import numpy as np
import pytest

from flagcx.dtypes import OPS, dtype_of
from flagcx.kernels.source import CONVERSIONS, base_name, element_source
from flagcx.transport.average import average_of
from tests.kernels.test_conversions import _DEVICE, COMPILER

NAMES = [f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")]
NAMES += ["bfloat16", "float8_e4m3fn", "float8_e5m2"]
_LOOP = """
extern "C" void mean(const T* x, T* out, int ranks, i64 n) {
  for (i64 i = 0; i < n; i++) {
    A sum = widen(x[i]);
    for (int q = 1; q < ranks; q++) sum = combine(sum, widen(x[q * n + i]));
    out[i] = narrow(finished(sum, 2, (double)ranks));
  }
}
extern "C" void kept(const T* x, T* out, i64 n) {
  for (i64 i = 0; i < n; i++) out[i] = narrow(finished(widen(x[i]), 0, 1.0));
}
"""


def _edges(name: str, ranks: int) -> np.ndarray:
    """Ranks of rows: the largest and smallest values, and others."""
    dtype, random = dtype_of(name).numpy, np.random.default_rng(ranks)
    rows = random.integers(0, 256, (ranks, 4000 * dtype.itemsize)).astype(np.uint8).view(dtype)
    if name in NAMES[:8]:
        limits = np.iinfo(dtype)
        rows[:, :9] = [limits.max, limits.min, limits.max - 1, limits.min + 1, 0, 1, 2, 3, 5]
    else:
        top, least = ml_dtypes.finfo(dtype).max, ml_dtypes.finfo(dtype).smallest_subnormal
        rows[~np.isfinite(rows.astype(np.float32))] = 1
        rows[:, :6] = [top, -top, float(top) / 2, 0, least, -least]
    rows[1:, 20:40] = rows[0, 20:40]
    return rows


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_as_on_hosts(name, tmp_path):
    dtype = dtype_of(name)
    (tmp_path / "host.cpp").write_text(_DEVICE + CONVERSIONS + element_source(dtype, OPS["avg"]) + _LOOP)
    command = [COMPILER, "-O1", "-Wall", "-Wno-unused-function", "-Werror", "-shared", "-fPIC"]
    made = tmp_path / "host.so"
    subprocess.run([*command, "-o", str(made), str(tmp_path / "host.cpp")], check=True)
    library = ctypes.CDLL(str(made))
    for ranks in (2, 3, 5, 8):
        x = _edges(name, ranks)
        got, want = np.empty_like(x[0]), np.empty_like(x[0])
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (x, got)]
        library.mean(*pointers, ranks, ctypes.c_long(x.shape[1]))
        average = average_of(dtype, ranks)
        sums = average.parts(x[0])
        for row in x[1:]:
            for total, part in zip(sums, average.parts(row), strict=True):
                total += part
        average.finish(sums, want)
        assert (got.view(np.uint8) == want.view(np.uint8)).all(), ranks
        library.kept(*pointers, ctypes.c_long(x.shape[1]))
        assert (got.view(np.uint8) == x[0].view(np.uint8)).all(), "a sum that is passed on"


def test_only_averages_that_need_it_have_a_kernel_of_their_own():
    own = {name for name in (*NAMES, "float16", "float32", "float64", "complex64")}
    own = {name for name in own if base_name(OPS["avg"], dtype_of(name)) == "avg"}
    assert own == {*NAMES[:8], "bfloat16"}
