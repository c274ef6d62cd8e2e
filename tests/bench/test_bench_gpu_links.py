"""The links' bandwidth: who moves what where, the table, and that the kernels compile for Hopper."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import gpu_links as bench
import numpy as np
import pytest

from flagcx.kernels.source import OPTIONS
from tests.kernels.nvrtc import compile_for, library


@pytest.mark.parametrize("gpus", [2, 3, 8])
def test_stores_and_reads_end_with_the_same(gpus):
    """Block q of GPU p's outbox becomes block p of GPU q's inbox, whoever moves it."""
    outboxes, inboxes = [1000 * g for g in range(gpus)], [10**6 + 1000 * g for g in range(gpus)]
    wanted = {(outboxes[p] + 10 * q, inboxes[q] + 10 * p) for p in range(gpus) for q in range(gpus) if p != q}
    for reads in (False, True):
        each = [bench.moves(outboxes, inboxes, 10, me, reads) for me in range(gpus)]
        assert {(int(a), int(b)) for moved in each for a, b in moved.T} == wanted
        near = 1 if reads else 0
        bounds = (inboxes, outboxes)[not reads]
        for me, moved in enumerate(each):
            assert moved.shape == (2, gpus - 1)
            assert all(bounds[me] <= int(at) < bounds[me] + 1000 for at in moved[near])
        firsts = [int(moved[1 - near, 0]) for moved in each]
        assert len(set(firsts)) == gpus


# -- the measurement, on GPUs that are NumPy arrays


class Array(np.ndarray):
    """An array with an address as CuPy's have."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


class Device(contextlib.nullcontext):
    """A GPU by its number."""

    def synchronize(self):
        pass


class Stream(contextlib.nullcontext):
    """Remembers what is enqueued between the ends of a capture."""

    ptr = property(id)

    def __init__(self, **_):
        super().__init__()
        STREAMS[id(self)] = self

    def begin_capture(self):
        self.work = []

    def end_capture(self):
        work = list(self.work)
        return SimpleNamespace(upload=lambda stream: None, launch=lambda stream: [do() for do in work])

    def synchronize(self):
        pass


STREAMS: dict[int, Stream] = {}


def memcpy(target, source, nbytes, kind, stream):
    assert kind == 4
    STREAMS[stream].work.append(lambda: ctypes.memmove(target, source, nbytes))


def machine(loses=0):
    """CuPy with NumPy's arrays, and a kernel that forgets the last ``loses`` bytes of each block."""

    def kernel(grid, block, given, shared, stream):
        def move():
            for source, target in zip(*given[:2], strict=True):
                ctypes.memmove(int(target), int(source), int(given[3]) - loses)

        assert len(given[0]) == given[2] and grid[0] > 0 and shared % 16 == 0
        stream.work.append(move)

    cuda = SimpleNamespace(
        Device=Device,
        Stream=Stream,
        Event=lambda: SimpleNamespace(record=lambda stream: None),
        get_elapsed_time=lambda start, end: 2.0,
        runtime=SimpleNamespace(memcpyAsync=memcpy),
    )
    return SimpleNamespace(
        cuda=cuda,
        uint32=np.uint32,
        arange=lambda *a, **k: np.arange(*a, **k).view(Array),
        asarray=lambda x: x.view(Array),
        empty_like=np.empty_like,
        count_nonzero=np.count_nonzero,
    ), kernel


@pytest.mark.parametrize("way", bench.WAYS)
@pytest.mark.parametrize("gpus", [2, 4])
def test_all_bytes_are_moved_and_checked(monkeypatch, gpus, way):
    cupy, kernel = machine()
    monkeypatch.setattr(bench, "compile_kernel", lambda cupy, source, name: kernel)
    row = bench.Links(cupy, gpus, 8192).measure(way, 16)
    assert row["wrong"] == 0 and row["blocks"] == 16 and row["way"] == way
    # 100 moves in a graph that takes 2 ms.
    assert row["us"] == pytest.approx(20.0)
    assert row["gb_per_s"] == pytest.approx(8192 * (gpus - 1) / 20e3, abs=0.1)


def test_bytes_that_are_lost_are_counted(monkeypatch):
    cupy, kernel = machine(loses=12)
    monkeypatch.setattr(bench, "compile_kernel", lambda cupy, source, name: kernel)
    assert bench.Links(cupy, 4, 8192).measure("stores", 16)["wrong"] == 4 * 3 * 3


def test_the_table_has_a_column_for_each_number_of_blocks():
    rows = [
        {"way": way, "gpus": 2, "nbytes": 1 << 20, "blocks": blocks, "gb_per_s": gb, "wrong": wrong}
        for way, blocks, gb, wrong in (
            ("stores", 16, 100.0, 0), ("stores", 32, 200.0, 7), ("copy engines", 0, 390.0, 0),
        )
    ]  # fmt: skip
    header, stores, executors = bench.table(rows).splitlines()
    assert header.split()[-4:] == ["16", "blocks", "32", "blocks"]
    assert stores.split()[-2:] == ["100.0", "200.0*"] and executors.split()[-2:] == ["390.0", "390.0"]


@pytest.mark.skipif(library() is None, reason="needs an NVRTC library")
@pytest.mark.parametrize("name", ["plain", "bulk"])
def test_kernels_compile(name):
    source, threads, shared = bench.KERNELS[name]
    compiled = compile_for(source, "sm_90", OPTIONS)
    assert compiled.status == 0 and compiled.code, compiled.log
    assert threads >= 1 and shared <= 48 << 10
