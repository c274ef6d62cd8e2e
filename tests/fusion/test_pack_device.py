"""Packing of arrays on a GPU, with a stand-in for CuPy whose memory is the host's."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from flagcx.dtypes import dtype_of, resolve_op
from flagcx.errors import ArrayError
from flagcx.fusion.fuse import Fusion
from flagcx.fusion.pack_device import DevicePacker
from flagcx.fusion.reductions import Reductions
from flagcx.memory import memory_stats


class Memory:
    """A pointer into memory that it keeps alive, like CuPy's MemoryPointer; a buffer, like its pinned one."""

    def __init__(self, array: np.ndarray, at: int = 0) -> None:
        self.array, self.ptr, self.device_id = array, array.ctypes.data + at, 0

    def __add__(self, offset: int) -> Memory:
        return Memory(self.array, self.ptr - self.array.ctypes.data + offset)


class DeviceArray:
    """The part of CuPy's array that packing looks at; ``host`` is its content."""

    def __init__(self, shape, dtype, memory: Memory) -> None:
        self.data, self.dtype = memory, np.dtype(dtype)
        count = int(np.prod(shape))
        raw = (ctypes.c_char * (count * self.dtype.itemsize)).from_address(memory.ptr)
        self.host = np.frombuffer(raw, dtype, count).reshape(shape)
        self.shape, self.size, self.nbytes = tuple(shape), count, self.host.nbytes


class Stream:
    def __init__(self, ptr: int = 7, log: list | None = None, **_: object) -> None:
        self.ptr, self._log = ptr, [] if log is None else log

    def wait_event(self, event) -> None:
        self._log.append(("wait", self.ptr))

    def synchronize(self) -> None:
        """All is done at once."""


class Event:
    def __init__(self, log: list) -> None:
        self._log = log

    def record(self, stream) -> None:
        self._log.append(("record", stream.ptr))

    @property
    def done(self) -> bool:
        return "busy" not in self._log

    def synchronize(self) -> None:
        self._log.append(("finish", 0))


class Device(contextlib.nullcontext):
    attributes: ClassVar = {"MultiProcessorCount": 2}

    def synchronize(self) -> None:
        pass


class FakeCupy:
    """Runs packing kernels at once, and keeps a log of what was enqueued where."""

    ndarray = DeviceArray

    def __init__(self) -> None:
        self.log: list = []
        self.current, self.capturing, self.uploads = Stream(5, self.log), set(), 0
        self.cuda = SimpleNamespace(
            alloc=lambda n: Memory(np.full(n + 4096, 0xAA, np.uint8)),
            alloc_pinned_memory=self._pinned,
            Stream=lambda **options: Stream(9, self.log),
            Event=lambda **options: Event(self.log),
            Device=Device,
            get_current_stream=lambda: self.current,
            function=SimpleNamespace(Module=self._module),
            nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
            device=SimpleNamespace(get_compute_capability=lambda: "90"),
            compiler=SimpleNamespace(compile_using_nvrtc=lambda source, options, filename: (b"", {})),
            runtime=SimpleNamespace(
                memcpyAsync=self._copy,
                memset=lambda ptr, value, n: ctypes.memset(ptr, value, n),
                streamIsCapturing=lambda ptr: ptr in self.capturing,
            ),
        )

    @staticmethod
    def _pinned(nbytes: int) -> np.ndarray:
        class Pinned(np.ndarray):
            @property
            def ptr(self) -> int:
                return self.ctypes.data

        return np.zeros(nbytes, np.uint8).view(Pinned)

    def _copy(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.uploads += 1
        ctypes.memmove(to, source, nbytes)

    def _module(self) -> SimpleNamespace:
        """A compiled module: its kernel moves what the table says, at once."""

        def launch(grid, block, args, stream) -> None:
            table, parts, message, unpacks = args
            rows = np.frombuffer((ctypes.c_char * (24 * parts)).from_address(table), np.int64).reshape(-1, 3)
            for at, offset, nbytes in rows.tolist():
                there = message + offset
                ctypes.memmove(*((at, there) if unpacks else (there, at)), nbytes)
            self.log.append(("unpack" if unpacks else "pack", stream.ptr))

        return SimpleNamespace(load=lambda binary: None, get_function=lambda name: launch)

    def array(self, values: np.ndarray) -> DeviceArray:
        made = DeviceArray(values.shape, values.dtype, Memory(np.zeros(max(values.nbytes, 1), np.uint8)))
        made.host[...] = values
        return made


SHAPES = ((3,), (100, 70), (), (0,), (5,))


@pytest.fixture
def cupy(tmp_path, monkeypatch) -> FakeCupy:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return FakeCupy()


def arrays_of(cupy: FakeCupy, seed: int = 0) -> list[DeviceArray]:
    draw = np.random.default_rng(seed)
    return [cupy.array(draw.standard_normal(shape)) for shape in SHAPES]


def test_arrays_go_into_the_message_and_back(cupy):
    packing = DevicePacker(0, cupy).packing(SHAPES, np.dtype(float))
    arrays = arrays_of(cupy)
    before = [array.host.copy() for array in arrays]
    packing.pack(arrays)
    flat = packing.flat.host
    assert flat.dtype == float and len(flat) % 2 == 0
    np.testing.assert_array_equal(flat[:3], before[0])
    np.testing.assert_array_equal(flat[4:7004], before[1].reshape(-1))  # at the next multiple of 16 bytes
    flat *= 3
    packing.unpack(arrays)
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array.host, 3 * old)


def test_the_gaps_of_a_message_of_its_own_are_zeros(cupy):
    packing = DevicePacker(0, cupy).packing(((3,), (1,)), np.dtype(np.float32), own=True)
    packing.pack([cupy.array(np.ones(n, np.float32)) for n in (3, 1)])
    np.testing.assert_array_equal(packing.flat.host, [1, 1, 1, 0, 1, 0, 0, 0])


def test_a_table_is_made_once_for_arrays_that_come_back(cupy):
    packing = DevicePacker(0, cupy).packing(SHAPES, np.dtype(float))
    sets = [arrays_of(cupy, seed) for seed in range(3)]
    for _ in range(5):
        for arrays in sets:
            packing.pack(arrays)
            packing.unpack(arrays)
    assert cupy.uploads == 3
    taken = memory_stats()["device"].taken
    others = [arrays_of(cupy, seed) for seed in range(40)]
    for arrays in others:  # other arrays each time: the oldest tables go, once they are no longer read
        packing.pack(arrays)
    assert ("finish", 0) in cupy.log
    figures = memory_stats()
    assert figures["device"].taken > taken and figures["pinned"].used_nbytes == 0
    packing.close()


def test_all_memory_comes_back(cupy):
    packer = DevicePacker(0, cupy)
    own = packer.packing(SHAPES, np.dtype(float), own=True)
    shared = packer.packing(SHAPES, np.dtype(float))
    for packing in (own, shared):
        packing.pack(arrays_of(cupy))
        packing.close()
        packing.close()
    assert packer.memory.stats().blocks == 1  # the shared message
    packer.close()
    assert packer.memory.stats().reserved_nbytes == 0
    packer.close()


def test_memory_that_is_still_used_does_not_come_back(cupy):
    packer = DevicePacker(0, cupy)
    own = packer.packing(SHAPES, np.dtype(float), own=True)
    own.pack(arrays_of(cupy))
    cupy.log.append("busy")
    own.close()
    assert packer.memory.stats().blocks == 2  # message and table


def test_a_stream_waits_for_the_one_that_had_the_shared_message(cupy):
    packer = DevicePacker(0, cupy)
    a, b = (packer.packing(SHAPES, np.dtype(kind)) for kind in (float, np.int64))
    arrays = arrays_of(cupy)
    a.pack(arrays)
    a.unpack(arrays)
    assert ("wait", 5) not in cupy.log
    cupy.current = Stream(6, cupy.log)
    b.pack(arrays)
    waits = [entry for entry in cupy.log if entry[1] == 6]
    assert waits[:2] == [("wait", 6), ("pack", 6)]


def test_a_table_in_a_captured_graph_stays(cupy):
    packing = DevicePacker(0, cupy).packing(SHAPES, np.dtype(float))
    kept = arrays_of(cupy)
    cupy.capturing.add(5)
    packing.pack(kept)
    cupy.capturing.clear()
    uploads = cupy.uploads
    others = [arrays_of(cupy, seed) for seed in range(50)]
    for arrays in (*others, kept):
        packing.pack(arrays)
    assert cupy.uploads == uploads + 50


def test_an_array_of_another_device_is_refused(cupy):
    packing = DevicePacker(0, cupy).packing(((2,),), np.dtype(float))
    array = cupy.array(np.ones(2))
    array.data.device_id = 1
    with pytest.raises(ArrayError, match="on device 1, the communicator's are on device 0"):
        packing.pack([array])


def test_arrays_of_nothing(cupy):
    packing = DevicePacker(0, cupy).packing(((0,), (2, 0)), np.dtype(float))
    packing.pack([cupy.array(np.ones(s)) for s in ((0,), (2, 0))])
    assert packing.flat.size == 0 and cupy.uploads == 0


def test_places_are_known_until_others_take_their_turn(cupy):
    packing = DevicePacker(0, cupy).packing(SHAPES, np.dtype(float))
    arrays = arrays_of(cupy)
    places = packing.places(arrays)
    packing.pack_at(places)
    packing.flat.host *= 2
    before = [array.host.copy() for array in arrays]
    packing.unpack_at(places)
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array.host, 2 * old)
    assert packing.places(arrays) is places and places.kept
    others = [arrays_of(cupy, seed) for seed in range(16)]
    for each in others:
        packing.places(each)
    assert not places.kept
    again = packing.places(arrays)
    assert again is not places and again.kept
    packing.close()
    assert not again.kept


class Executor:
    """As if two ranks had the same arrays: each operation doubles what it is given."""

    def __init__(self) -> None:
        self.ran: list[int] = []

    def check(self) -> None:
        """Never over."""

    def find(self, collective, count, dtype, op, root, algorithm, in_place, part_of="") -> SimpleNamespace:
        def run(given, result) -> None:
            assert given.size == count
            self.ran.append(given.nbytes)
            result.host[...] = given.host * 2

        return SimpleNamespace(run=run)

    def run(self, plan, given, result) -> None:
        plan.run(given, result)


def reduce(fusion: Fusion, arrays, ops=("sum",)) -> None:
    """Reduces arrays as a group does, with the operations by turns."""
    reductions = Reductions(lambda executor: fusion)
    for i, x in enumerate(arrays):
        op = ops[i % len(ops)]
        if not reductions.add_quickly(x, op):
            dtype = dtype_of(x.dtype)
            reductions.add(fusion.executor, x, x, dtype, resolve_op(op, dtype), op, None)
            reductions.remember(x, op, lambda x: True)
    reductions.run()


KINDS = (np.float32, np.int64, np.float32, np.float16)


def mixed(cupy: FakeCupy, count: int = 40) -> list[DeviceArray]:
    return [cupy.array((np.arange(i % 9) + i).astype(KINDS[i % 4])) for i in range(count)]


@pytest.mark.parametrize("ops", [("sum",), ("sum", "max", "sum")])
def test_arrays_that_come_back_cost_no_look(cupy, ops, monkeypatch):
    fusion, arrays = Fusion(Executor(), DevicePacker(0, cupy)), mixed(cupy)
    looks = []
    look = fusion.packer.memory_of
    monkeypatch.setattr(fusion.packer, "memory_of", lambda arrays: (looks.append(1), look(arrays))[1])
    for turn in range(1, 6):
        reduce(fusion, arrays, ops)
        for i, array in enumerate(arrays):
            np.testing.assert_array_equal(array.host, (np.arange(i % 9) + i) * 2**turn, f"{turn}, array {i}")
    assert len(looks) == 2
    kinds = {(dtype, ops[i % len(ops)]) for i, dtype in enumerate(KINDS * 3)}
    assert len(fusion.executor.ran) == 5 * len(kinds)
    assert cupy.uploads == len(kinds)


def test_new_arrays_in_the_same_memory_need_no_new_table(cupy):
    fusion, kept = Fusion(Executor(), DevicePacker(0, cupy)), mixed(cupy)
    for _ in range(6):
        arrays = [DeviceArray(a.shape, a.dtype, a.data) for a in kept]
        reduce(fusion, arrays)
    assert cupy.uploads == 3
    other = [DeviceArray((1, *a.shape), a.dtype, a.data) for a in kept[:-1]]
    reduce(fusion, other)
    for i, array in enumerate(kept):
        np.testing.assert_array_equal(array.host, (np.arange(i % 9) + i) * 2 ** (7 if i < 39 else 6))


def test_other_numbers_in_the_same_memory_are_other_arrays(cupy):
    fusion = Fusion(Executor(), DevicePacker(0, cupy))
    floats = [cupy.array(np.arange(1, n, dtype=np.float32)) for n in (4, 30)]
    for _ in range(2):
        reduce(fusion, floats)
    whole = [DeviceArray(a.shape, np.int32, a.data) for a in floats]
    for array in whole:
        array.host[...] = np.arange(array.size) - 1000
    reduce(fusion, whole)
    for array in whole:
        np.testing.assert_array_equal(array.host, 2 * np.arange(array.size) - 2000)


def test_large_arrays_go_alone_and_overlapping_ones_in_order(cupy):
    fusion = Fusion(Executor(), DevicePacker(0, cupy))
    large = [cupy.array(np.full(n, i, np.float32)) for i, n in enumerate((3, 2 << 20, 5, 2 << 20, 2))]
    for turn in range(1, 4):
        fusion.executor.ran.clear()
        reduce(fusion, large)
        assert [bool(nbytes > 1 << 20) for nbytes in fusion.executor.ran] == [False, True, True]
        assert all((a.host == i * 2**turn).all() for i, a in enumerate(large))
    whole = cupy.array(np.arange(1.0, 9.0))
    halves = [DeviceArray((4,), float, whole.data + at) for at in (0, 16, 32)]
    for turn in range(1, 4):
        reduce(fusion, halves)
        want = np.arange(1.0, 9.0) * np.array([2, 2, 4, 4, 4, 4, 2, 2]) ** turn
        np.testing.assert_array_equal(whole.host, want)
