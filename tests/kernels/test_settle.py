"""The kernel that takes a step back, compiled for the host; and a slot whose steps a graph replays."""

from __future__ import annotations

import ctypes
import subprocess

import numpy as np
import pytest

from flagcx.compression import Feedback, carried
from flagcx.kernels.settle import SETTLE, settle_source
from flagcx.kernels.source import OPTIONS
from tests.kernels import nvrtc
from tests.kernels.test_conversions import COMPILER

_HOST = """
#define __global__
struct Place { int x; } const blockIdx = {0}, blockDim = {1}, threadIdx = {0}, gridDim = {1};
"""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
def test_the_kernel_takes_back_or_makes_both_the_same(tmp_path):
    (tmp_path / "host.cpp").write_text(_HOST + settle_source())
    command = [COMPILER, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(tmp_path / "host.so")]
    subprocess.run([*command, str(tmp_path / "host.cpp")], check=True)
    kernel = getattr(ctypes.CDLL(str(tmp_path / "host.so")), SETTLE)
    for spoilt, same in ((0, 0), (0, 1), (1, 0), (1, 1)):
        now, before, flag = np.arange(7, dtype=np.float32), np.full(7, -1, np.float32), np.int32([spoilt])
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (now, before, flag)]
        kernel(*pointers[:2], ctypes.c_longlong(7), pointers[2], same)
        assert now.tolist() == ([-1] * 7 if spoilt else [0, 1, 2, 3, 4, 5, 6])
        assert before.tolist() == ([-1] * 7 if spoilt or not same else [0, 1, 2, 3, 4, 5, 6])


@pytest.mark.skipif(
    nvrtc.library() is None, reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12"
)
def test_the_kernel_compiles_without_a_warning():
    made = nvrtc.compile_for(settle_source(), "sm_90", OPTIONS)
    assert made.status == 0 and made.log == ""


def test_a_slot_of_a_graph_reads_the_same_array_in_every_step(monkeypatch):
    """Steps that are replayed, and others between them, go on from what the last good one left."""
    captures = []

    def settle(now, before, spoilt, same):
        if spoilt[0]:
            now[...] = before
        elif same:
            before[...] = now

    monkeypatch.setattr(carried, "settle_on_device", settle)
    monkeypatch.setattr(carried, "on_device", lambda array: True)
    monkeypatch.setattr("flagcx.compression.slot.captures", lambda array: bool(captures))
    slot, x = Feedback("int8")["x"], np.zeros(3, np.float32)

    def call(bad: int = 0) -> None:
        """Adds 1 to the residual."""
        slot.begin(x)
        slot.flag = np.int32([bad])
        replay(bad)
        slot.end(x, waits=False)

    def replay(bad: int = 0) -> None:
        np.add(read, 1, out=written) if replayed else np.add(slot.residuals.before, 1, out=slot.residuals.now)
        if replayed:
            settle(written, read, [bad], True)

    replayed = False
    call()
    call(bad=1)
    call()
    assert slot.residual.tolist() == [2, 2, 2] and slot.state_dict()["residual"].tolist() == [2, 2, 2]
    captures.append(True)
    slot.flag = np.int32([0])
    slot.begin(x)  # is captured, and does not run
    read, written = slot.residuals.before, slot.residuals.now
    slot.runs = False
    captures.clear()
    assert slot.state_dict()["residual"].tolist() == [2, 2, 2]
    for bad in (0, 1, 0):
        replayed = True
        replay(bad)
        replayed = False
        call()
        call(bad)
    assert slot.state_dict()["residual"].tolist() == [9, 9, 9]
    assert slot.residual.tolist() == [9, 9, 9]
