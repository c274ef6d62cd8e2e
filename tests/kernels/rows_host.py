"""The kernels that add up rows, on the host: ranks of ``peer_host`` whose memory they share with others."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from flagcx.dtypes import dtype_of
from flagcx.kernels.epilogue import Epilogue
from flagcx.kernels.peer import PeerArgs, PeerLayout
from flagcx.kernels.rows import LOCAL, RowArgs, RowKernel, RowShape
from tests.kernels import peer_host
from tests.kernels.peer_host import CONSTANTS, WARP, WORK, Host

_MATHS = 'extern "C" { float expf(float), sqrtf(float), fabsf(float), rintf(float), tanhf(float); }\n'
"""All that kernels need of <cmath>, which takes half as long to read as a kernel to compile."""

_OWN = r"""
#define FLAGCX_ROW_KERNEL extern "C" __attribute__((visibility("default"))) void
#pragma GCC visibility push(default)
extern "C" {
void* host_in_block(void* at, int block); void host_arrive(int blocks); void host_await(int blocks);
}
#pragma GCC visibility pop
FLAGCX_DEVICE float* in_block(float* at, int block) {
  return (float*)host_in_block(at, host_block() / CLUSTER * CLUSTER + block);
}
FLAGCX_DEVICE void arrive_in_cluster() { host_arrive(CLUSTER); }
FLAGCX_DEVICE void await_cluster() { host_await(CLUSTER); }
FLAGCX_DEVICE u32 two_bfloat16(float a, float b) { return (u32)to_bfloat16(b) << 16 | to_bfloat16(a); }
FLAGCX_DEVICE u32 two_float16(float a, float b) { return (u32)to_float16(b) << 16 | to_float16(a); }
FLAGCX_DEVICE float from_lane(float x, int apart) {
  float* const lanes = (float*)host_shared(-1, 4 * 1024);
  const int t = host_thread();
  lanes[t] = x;
  host_join_warp(true);
  const float y = lanes[t / WARP * WARP + (t % WARP ^ apart)];
  host_join_warp(true);
  return y;
}
"""


@dataclass(frozen=True)
class RowCall:
    """One call as the ranks of a test make it; the lists have an entry for each rank."""

    form: str
    epilogue: Epilogue
    given: list[np.ndarray]
    arrays: list[list[np.ndarray | None]]
    result: list[np.ndarray]
    grid: int = 1
    ahead: int = 0
    cluster: int = 1
    aligned: bool = False
    absent: tuple[int, ...] = ()

    @property
    def shape(self) -> RowShape:
        """How threads share a row."""
        columns = self.given[0].shape[1]
        packs = -(-columns // (16 // self.given[0].itemsize))
        pieces = -(-packs // (self.cluster * WORK))
        held = -(-packs // (self.cluster * pieces))
        return RowShape(columns, packs, pieces, -(-held // WARP) * WARP, self.cluster)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.shape.threads


class RowHost(Host):
    """Ranks that make calls of rows too."""

    def _parts(self, call: Any) -> tuple:
        if not isinstance(call, RowCall):
            return super()._parts(call)
        layout = PeerLayout(1, 1, True) if call.form == LOCAL else self.layout
        dtype = dtype_of(call.given[0].dtype)
        kernel = RowKernel(call.form, dtype, call.epilogue, layout, call.shape, call.aligned, call.ahead)
        return self.directory, kernel

    def _compile(self, calls: list) -> None:
        super()._compile([call for call in calls if not isinstance(call, RowCall)])

    def _kernel(self, call: Any):
        return _kernel(*self._parts(call)) if isinstance(call, RowCall) else super()._kernel(call)

    def _args(self, call: Any, rank: int) -> Any:
        if not isinstance(call, RowCall):
            return super()._args(call, rank)
        args = RowArgs(a=PeerArgs(control=self.words[rank].ctypes.data, limit_ns=self.limit_ns, rank=rank))
        for q, memory in enumerate(self.memory):
            args.a.peer[q] = memory.ctypes.data
        args.a.sendbuf, args.a.recvbuf = call.given[rank].ctypes.data, call.result[rank].ctypes.data
        for place, array in enumerate(call.arrays[rank]):
            args.arrays[place] = 0 if array is None else array.ctypes.data
        for place, number in enumerate(call.epilogue.numbers):
            args.numbers[place] = number
        args.rows = len(call.given[rank])
        return args


@cache
def _kernel(directory: Path, kernel: RowKernel) -> Any:
    source = _MATHS + peer_host._HEAD
    source += kernel.source(peer_host._INTRINSICS, _OWN, **CONSTANTS)
    made = directory / f"rows_{hashlib.sha1(source.encode()).hexdigest()}.so"
    library = peer_host.compile_library(source, made, ctypes.RTLD_LOCAL, *peer_host.ALONE)
    return library.flagcx_rows
