"""The codecs' kernels: they compile, and their arithmetic makes the bits that the NumPy codecs make."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from flagcx.compression import Feedback, Quantized, two_step
from flagcx.compression.carried import Carried
from flagcx.compression.codec import Scratch
from flagcx.compression.device import StripeKernels
from flagcx.compression.stripes import FusedStripes, LoopedStripes
from flagcx.compression.two_step import cut_in_pieces
from flagcx.dtypes import OPS
from flagcx.errors import OperationError
from flagcx.kernels import compress
from flagcx.kernels.source import OPTIONS
from tests.compression.peers import on_ranks
from tests.kernels import nvrtc
from tests.kernels.test_conversions import COMPILER
from tests.ranges import exhaustive

BLOCKED = ("int8", "int4", "fp8", "fp8_e5m2")

# One warp of one thread.
_HEAD = """
#include <math.h>
#include <string.h>
#define FLAGCX_DEVICE static inline
#define FLAGCX_KERNEL extern "C" void
#define LANES 1
static inline int lane() { return 0; }
static inline long long warp() { return 0; }
static inline long long warps() { return 1; }
static inline unsigned largest_of_warp(unsigned x) { return x; }
static inline float __uint_as_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned x; memcpy(&x, &f, 4); return x; }
"""


@pytest.mark.skipif(
    nvrtc.library() is None, reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12"
)
@pytest.mark.parametrize("architecture", ["sm_90", *exhaustive(["sm_80"])])
@pytest.mark.parametrize("block", [256, *exhaustive([32, 4096])])
@pytest.mark.parametrize("name", compress.NAMES)
def test_kernels_compile_without_a_warning(name, block, architecture):
    quickly = (name, block, architecture) != ("int8", 256, "sm_90")
    made = nvrtc.compile_for(compress.compress_source(name, block), architecture, OPTIONS, quickly)
    assert made.status == 0, made.log
    assert made.log == ""
    for kernel in (compress.ENCODE, compress.REDUCE, compress.DECODE):
        assert kernel.encode() in made.code


def test_a_codec_without_kernels_is_named():
    with pytest.raises(OperationError, match="no kernels for 'topk'; expected one of int8, int4, fp8"):
        compress.compress_source("topk", 256)


class HostKernels(StripeKernels):
    """The kernels, compiled for the host."""

    def __init__(self, name: str, block: int, libraries: dict) -> None:
        self._block, self._most_blocks = block, 4096
        self._encode, self._reduce, self._decode = (
            partial(self._launch, getattr(libraries[name, block], kernel))
            for kernel in (compress.ENCODE, compress.REDUCE, compress.DECODE)
        )

    @staticmethod
    def _launch(function, grid, threads, arguments) -> None:
        assert grid[0] >= 1
        kinds = {np.int64: ctypes.c_longlong, np.int32: ctypes.c_int, np.float32: ctypes.c_float}
        function(
            *(
                a.ctypes.data_as(ctypes.c_void_p)
                if isinstance(a, np.ndarray)
                else None
                if isinstance(a, int)
                else kinds[type(a)](a)
                for a in arguments
            )
        )


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> dict[tuple[str, int], ctypes.CDLL]:
    if COMPILER is None:
        pytest.skip("no C++ compiler on this machine")
    directory, made = tmp_path_factory.mktemp("compress"), {}
    for name, block in itertools.product(BLOCKED, (32, 256)):
        source, library = directory / f"{name}{block}.cpp", directory / f"{name}{block}.so"
        source.write_text(_HEAD + compress.kernels(name, block))
        command = [COMPILER, "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        made[name, block] = ctypes.CDLL(str(library))
    return made


def placed(x: np.ndarray, offset: int) -> np.ndarray:
    """A copy so many elements behind a multiple of 16 bytes."""
    memory = np.empty(x.size + 8, np.float32)
    start = -memory.ctypes.data % 16 // 4 + offset
    memory[start : start + x.size] = x
    return memory[start : start + x.size]


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("block", [32, 256])
@pytest.mark.parametrize("count", [1, 2, 33, 255, 256, 70_001])
def test_the_kernels_make_the_bits_of_numpy(libraries, name, block, count):
    rng = np.random.default_rng(count)
    x = (rng.standard_normal(count) * 10.0 ** rng.uniform(-30, 30, count)).astype(np.float32)
    x[:: 2 * block + 1] = 0
    if count > 3 * block:
        x[:block] = 0
        x[block : 2 * block] = 1e-38
        x[2 * block : 3 * block] = np.arange(block) + np.float32(0.5)  # ties
    codec, kernels = Quantized(name, block), HostKernels(name, block, libraries)
    wire, want = (np.zeros(codec.wire_nbytes(count), np.uint8) for _ in range(2))
    codec.encode_into(x, want, Scratch())
    for offset in (0, 1):  # where blocks can be moved in packs of 16 bytes, and where they cannot
        wire[...] = 0
        kernels.encode(placed(x, offset), None, wire, count, 0)
        np.testing.assert_array_equal(wire, want)
    for offset in (0, 1):
        out, host = placed(x, offset), x.copy()
        for add in (False, True):
            kernels.decode(wire, out, count, 0, add=add)
            codec.decode_into(want, host, Scratch(), add)
            np.testing.assert_array_equal(out, host)


@pytest.mark.parametrize("name", BLOCKED)
def test_blocks_with_infinity_or_nan_decode_to_nan(libraries, name):
    x, codec = np.ones(96, np.float32), Quantized(name, 32)
    x[3], x[40] = np.inf, np.nan
    kernels, wire = HostKernels(name, 32, libraries), np.zeros(codec.wire_nbytes(96), np.uint8)
    kernels.encode(x, None, wire, 96, 0)
    out = np.empty_like(x)
    kernels.decode(wire, out, 96, 0)
    assert np.isnan(out[:64]).all() and (out[64:] == 1).all()


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("factor", [1, 1 / 3])
@pytest.mark.parametrize(("size", "count"), [(1, 40), (2, 3), (3, 700), (4, 20_000), (8, 70)])
def test_all_stripes_in_one_kernel_are_those_of_the_loops(libraries, name, feedback, factor, size, count):
    """A whole all-reduce of ranks of one process, by both; odd counts leave ranks short or empty stripes."""
    codec, scale = Quantized(name, 32), np.float32(factor)
    (piece,) = cut_in_pieces(count, size, 1 << 20)
    nbytes = codec.wire_nbytes(piece.width)
    numbers = [np.random.default_rng(q).standard_normal(count).astype(np.float32) for q in range(size)]
    before = [np.arange(count, dtype=np.float32) / (q + 3 * count) for q in range(size)]
    ends = []
    for fused in (False, True):
        kept = [Carried(np.full_like(b, np.nan), b.copy()) if feedback else None for b in before]
        coded = [np.zeros(size * nbytes, np.uint8) for _ in range(size)]
        gathered, result = np.zeros(size * nbytes, np.uint8), np.zeros(count, np.float32)
        ranks = []
        for q in range(size):
            peers = SimpleNamespace(rank=q, size=size, scratch=Scratch())
            kernels = HostKernels(name, 32, libraries)
            made = FusedStripes(codec, kernels, peers, scale) if fused else LoopedStripes(codec, peers, scale)
            made.encode(piece, numbers[q], kept[q], coded[q])
            ranks.append(made)
        for q, made in enumerate(ranks):
            arrived = np.concatenate([other[q * nbytes : (q + 1) * nbytes] for other in coded])
            made.reduce(piece, arrived, numbers[q], kept[q], gathered[q * nbytes : (q + 1) * nbytes])
        ranks[0].decode(piece, gathered, result)
        ends.append([result, gathered, *coded, *(array for k in kept if k for array in (k.now, k.before))])
    for looped, fused in zip(*ends, strict=True):
        np.testing.assert_array_equal(fused, looped)
    exact = factor * np.sum(numbers + (before if feedback else []), axis=0, dtype=np.float64)
    assert np.linalg.norm(ends[1][0] - exact) < 0.2 * np.linalg.norm(exact)


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_gpu_takes_piece_after_piece_and_ends_with_the_bits_of_the_host(
    libraries, monkeypatch, name, size, momentum
):
    """Also after a step with infinity and NaN, in stripes that other ranks own and in the rank's own.

    The last kernel flags it.
    """
    codec, count = Quantized(name, 32), 20_003
    kernels = HostKernels(name, 32, libraries)
    monkeypatch.setattr(Quantized, "kernels", lambda self: kernels)
    monkeypatch.setattr(two_step, "PIECE_NBYTES", 8192)
    monkeypatch.setattr(two_step, "DEVICE_PIECE_NBYTES", 8192)
    assert len(cut_in_pieces(count, size, 2048)) > 3

    def train(peers, device):
        slot = Feedback(codec, momentum=momentum)["x"]
        peers.on_device, peers.beside = device, False
        plan, results = two_step.TwoStep(peers, codec, count, OPS["avg"], slot), []
        for step in range(3):
            x = np.random.default_rng([peers.rank, step]).standard_normal(count, np.float32)
            if step == 1 and peers.rank == 1:
                x[:2] = np.inf, np.nan
                x[[count // 2, -1]] = np.nan, -np.inf
            slot.begin(x)
            slot.flag = np.zeros(1, np.int32)
            plan.run(x, x)
            assert plan.waits != device and slot.flag[0] == (device and step == 1)
            slot.flag = None
            slot.end(x)
            results.append(x)
        return [*results, slot.residual if slot.velocity is None else slot.residual + slot.velocity]

    host, device = (on_ranks(size, partial(train, device=device)) for device in (False, True))
    np.testing.assert_array_equal(device, host)
    for first, spoilt, last, kept in device:
        assert np.isnan(spoilt[[0, 1, count // 2, -1]]).all()
        assert all(np.isfinite(x).all() for x in (first, last, kept))
