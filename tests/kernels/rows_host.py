"""The kernels that add up rows, on the host: ranks of ``peer_host`` whose memory they share with others."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from flagcx.dtypes import DType, dtype_of
from flagcx.kernels.epilogue import Epilogue
from flagcx.kernels.peer import PeerArgs, PeerLayout
from flagcx.kernels.rows import LOCAL, RowArgs, RowKernel
from tests.kernels import peer_host
from tests.kernels.peer_host import CONSTANTS, WARP, WORK, Host

_WARPS = r"""
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
    absent: tuple[int, ...] = ()

    @property
    def packs(self) -> int:
        """Packs of a row."""
        return -(-self.given[0].shape[1] // (16 // self.given[0].itemsize))

    @property
    def pieces(self) -> int:
        """Packs of a row that a thread holds."""
        return -(-self.packs // WORK)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        held = -(-self.packs // self.pieces)
        return -(-held // WARP) * WARP


class RowHost(Host):
    """Ranks that make calls of rows too."""

    def _parts(self, call: Any) -> tuple:
        if not isinstance(call, RowCall):
            return super()._parts(call)
        layout = PeerLayout(1, 1, True) if call.form == LOCAL else self.layout
        dtype = dtype_of(call.given[0].dtype)
        return self.directory, call.form, dtype, call.epilogue, layout, call.pieces

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
        args.rows, args.columns = call.given[rank].shape
        args.packs, args.share = call.packs, -(-call.packs // self.ranks)
        args.ahead = call.ahead
        return args


@cache
def _kernel(
    directory: Path, form: str, dtype: DType, epilogue: Epilogue, layout: PeerLayout, pieces: int
) -> Any:
    kernel = RowKernel(form, dtype, epilogue, layout, pieces)
    source = "#include <cmath>\n" + peer_host._HEAD
    source += kernel.source(peer_host._INTRINSICS, _WARPS, **CONSTANTS, ROW_THREADS=WORK)
    name = f"rows_{abs(hash((source, form)))}.so"
    library = peer_host.compile_library(source, directory / name, ctypes.RTLD_LOCAL, "-fvisibility=hidden")
    return library.flagcx_rows
