"""Averages over several hops on GPUs: the kernels before and after, compiled for the host."""

from __future__ import annotations

import ctypes
import subprocess
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from flagcx.algorithms import build
from flagcx.dtypes import OPS, dtype_of
from flagcx.kernels.average import MEAN, WIDEN, average_source
from flagcx.kernels.source import DEVICE_FUNCTION, FLOAT16_CONVERSIONS, OPTIONS
from flagcx.transport.average import averaging
from flagcx.transport.base import Call
from flagcx.transport.nccl import average as module
from tests.kernels import nvrtc
from tests.kernels.test_conversions import _DEVICE, COMPILER

_ONE_THREAD = """
#define __global__
struct Index { int x; };
static const Index blockIdx = {0}, threadIdx = {0}, blockDim = {1}, gridDim = {1};
"""
NAMES = ["uint8", "int16", "int32", "uint32", "int64", "uint64", "bfloat16", "float8_e4m3fn"]


@pytest.mark.skipif(
    nvrtc.library() is None, reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12"
)
@pytest.mark.parametrize("name", [*NAMES, "int8", "uint16", "float16", "float8_e5m2"])
def test_compiles_without_a_warning(name):
    made = nvrtc.compile_for(average_source(dtype_of(name)), "sm_90", OPTIONS)
    assert (made.status, made.log) == (0, "")


class Array:
    """What a plan sees of an array on a GPU."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.data = array, SimpleNamespace(ptr=array.ctypes.data, device_id=0)


class SameOnAllRanks:
    """Adds up what every rank has alike; of a message with blocks, the first."""

    def __init__(self, call: Call) -> None:
        self.call, self.runs = call, 0

    def run(self, sendbuf: Array, recvbuf: Array | None) -> None:
        self.runs += 1
        assert sendbuf.array.dtype == self.call.dtype.numpy
        assert (sendbuf is recvbuf) == (self.call.in_place and recvbuf is not None)
        if recvbuf is not None:
            recvbuf.array[...] = sendbuf.array[: len(recvbuf.array)] * self.call.schedule.size


def fake(monkeypatch, directory, name: str):
    """A CuPy and an order that do with NumPy and a host's compiler as a GPU would."""
    text = average_source(dtype_of(name)).replace(DEVICE_FUNCTION, "").replace(FLOAT16_CONVERSIONS, "")
    (directory / "host.cpp").write_text(_DEVICE + _ONE_THREAD + text)
    made = str(directory / "host.so")
    command = [COMPILER, "-O1", "-w", "-shared", "-fPIC", "-o", made, str(directory / "host.cpp")]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(made)

    def load(cupy, device, source, kernel):
        kinds = [ctypes.c_void_p] * 3 + [ctypes.c_longlong] + [ctypes.c_double] * (kernel == MEAN)
        function = getattr(library, kernel)
        assert kernel in (WIDEN, MEAN)

        def launch(grid, block, args, stream):
            function(*(kind(a) for kind, a in zip(kinds, args, strict=True)))

        return launch

    monkeypatch.setattr(module, "load_kernel", load)
    cuda = SimpleNamespace(get_current_stream=lambda: "stream")
    cupy = SimpleNamespace(cuda=cuda, empty=lambda count, dtype: Array(np.empty(count, dtype)))
    return cupy, SimpleNamespace(device=0, rank=0, is_capturing=lambda stream: False)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize("name", NAMES)
def test_the_mean_of_the_largest_values_is_the_largest(monkeypatch, tmp_path, name, collective):
    size, count, dtype = 5, 7, dtype_of(name)
    cupy, order = fake(monkeypatch, tmp_path, name)
    limits = np.iinfo(name) if dtype.kind == "int" else ml_dtypes.finfo(name)
    blocks = size if collective == "reduce_scatter" else 1
    x = np.resize(np.array([limits.max, limits.min, 0, 1, limits.max], dtype.numpy), count * blocks)
    root = 0 if collective == "reduce" else None
    for rank in (0, size - 1):
        schedule = build(collective, "ring" if root is None else "tree", size, root)
        call = Call(schedule, rank, count, dtype, OPS["avg"], False)
        sums: list[SameOnAllRanks] = []

        def make(call, sums=sums):
            sums.append(SameOnAllRanks(call))
            return sums[-1]

        def wrap(*rest, call=call):
            return module.AveragedPlan(cupy, 0, order, None, call, *rest)

        plan = averaging(call, make, wrap)
        out = None if root is not None and rank else np.zeros(count, dtype.numpy)
        plan.run(Array(x), None if out is None else Array(out))
        assert sums[0].runs == (2 if name.endswith("int64") else 1)
        assert sums[0].call.op == OPS["sum"]
        if out is not None:
            assert (out == x[:count]).all()
