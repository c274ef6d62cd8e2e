"""The packing kernel: its table, its code compiled for GPUs, and its moves when it is run on the host."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import numpy as np
import pytest

from flagcx.kernels.pack import ALIGNMENT, NAME, PART_NBYTES, PackLayout, pack_source
from flagcx.kernels.source import OPTIONS
from tests.kernels import nvrtc

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
SIZES = (1, 3, 16, 17, 0, 4096, PART_NBYTES, PART_NBYTES + 5, 3 * PART_NBYTES - 1, 8)

_HOST = """
#include <stdint.h>
#define FLAGCX_DEVICE static inline
#define THREADS 32
#define __global__
#define __launch_bounds__(n)
struct alignas(16) uint4 { unsigned x, y, z, w; };
static struct { int x; } blockIdx, threadIdx, gridDim;
"""
_LOOP = """
extern "C" void run(const long long* rows, long long count, unsigned char* message, int unpacks, int blocks) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++) flagcx_pack(rows, count, message, unpacks);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    """The kernel, compiled for the host; a check of alignment stops it where a GPU would."""
    if COMPILER is None:
        pytest.skip("no C++ compiler on this machine")
    directory = tmp_path_factory.mktemp("pack")
    source = pack_source().split("\n", 2)[2]  # less the two definitions that _HOST has
    (directory / "host.cpp").write_text(_HOST + source + _LOOP)
    made = directory / "host.so"
    flags = ["-O1", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, "-o", made, directory / "host.cpp"], check=True, capture_output=True)
    return ctypes.CDLL(str(made))


def run(library, layout: PackLayout, arrays, message: np.ndarray, unpacks: bool, blocks: int = 3) -> None:
    rows = layout.table([a.ctypes.data for a in arrays])
    table, to = (ctypes.c_void_p(a.ctypes.data) for a in (rows, message))
    library.run(table, ctypes.c_longlong(len(rows)), to, int(unpacks), blocks)


def arrays_with_offset(offset: int) -> list[np.ndarray]:
    """Arrays of SIZES that begin ``offset`` bytes behind a multiple of 64, with guards around each."""
    made = []
    for i, nbytes in enumerate(SIZES):
        memory = np.zeros(nbytes + 256, np.uint8)
        start = -memory.ctypes.data % 64 + offset
        memory[:] = 0xEE
        view = memory[start : start + nbytes]
        view[:] = (np.arange(nbytes) * 7 + i) % 251
        made.append(view)
    return made


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 6, 8, 12])
def test_arrays_wherever_they_begin(library, offset):
    layout, arrays = PackLayout(SIZES), arrays_with_offset(offset)
    want = [a.copy() for a in arrays]
    memory = np.full(layout.nbytes + 64 + 256, 0xAA, np.uint8)
    start = -memory.ctypes.data % 64
    message = memory[start : start + layout.nbytes]
    run(library, layout, arrays, message, unpacks=False)
    covered = np.zeros(layout.nbytes, bool)
    for at, array in zip(layout.offsets, want, strict=True):
        np.testing.assert_array_equal(message[at : at + len(array)], array)
        covered[at : at + len(array)] = True
    assert not message[~covered].any() and (memory[start + layout.nbytes :] == 0xAA).all()

    for at, array in zip(layout.offsets, arrays, strict=True):
        message[at : at + len(array)] += 1
        array[:] = 0
    run(library, layout, arrays, message, unpacks=True)
    for got, array in zip(arrays, want, strict=True):
        np.testing.assert_array_equal(got, array + np.uint8(1))
        start = got.ctypes.data - got.base.ctypes.data
        assert (got.base[:start] == 0xEE).all(), "written before the array"
        assert (got.base[start + len(got) :] == 0xEE).all(), "written behind the array"


def test_the_table_covers_each_array_once_in_parts():
    layout = PackLayout(SIZES)
    addresses = [1 << 20 | i << 32 for i in range(len(SIZES))]
    rows = layout.table(addresses)
    assert rows.dtype == np.int64 and rows.shape == (layout.parts, 3)
    assert (rows[:, 2] <= PART_NBYTES).all() and (rows[:, 2] > 0).all()
    for address, offset, nbytes in zip(addresses, layout.offsets, SIZES, strict=True):
        mine = rows[(rows[:, 0] >= address) & (rows[:, 0] < address + max(nbytes, 1))]
        assert mine[:, 2].sum() == nbytes
        np.testing.assert_array_equal(mine[:, 0] - address, mine[:, 1] - offset)
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    assert layout.nbytes % ALIGNMENT == 0 and layout.nbytes < sum(SIZES) + ALIGNMENT * len(SIZES)
    assert PackLayout(()).parts == 0 and PackLayout((0, 0)).nbytes == 0


@pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is missing: pip install nvidia-cuda-nvrtc-cu12")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_it_compiles_without_a_warning(architecture):
    made = nvrtc.compile_for(pack_source(), architecture, OPTIONS)
    assert made.status == 0 and made.log == "", made.log
    assert NAME.encode() in made.code
