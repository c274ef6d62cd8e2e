"""Packed buckets on a GPU lie where the peers reach them; with a stand-in for CuPy."""

from __future__ import annotations

import numpy as np
import pytest

from flagcx.errors import ResourceError
from flagcx.fusion.pack_device import DevicePacker
from tests.fusion.test_pack_device import DeviceArray, FakeCupy, Memory

SHAPES = ((3, 5), (7,), ())


@pytest.fixture
def cupy(tmp_path, monkeypatch) -> FakeCupy:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return FakeCupy()


def _packed(packer: DevicePacker, cupy: FakeCupy, own: bool = True) -> tuple[DeviceArray, list[np.ndarray]]:
    values = [np.arange(int(np.prod(s)), dtype=np.float32).reshape(s) + 10 * i for i, s in enumerate(SHAPES)]
    arrays = [cupy.array(v) for v in values]
    packing = packer.packing(SHAPES, np.dtype(np.float32), own=own)
    packing.pack(arrays)
    packing.flat.host[...] *= 2
    packing.unpack(arrays)
    for array, value in zip(arrays, values, strict=True):
        np.testing.assert_array_equal(array.host, 2 * value)
    packing.close()
    return packing.flat, values


def _memory() -> tuple[list, object]:
    made: list = []

    def empty(count, dtype):
        made.append(DeviceArray((count,), dtype, Memory(np.full(4096, 0xAA, np.uint8))))
        return made[-1]

    return made, empty


def test_a_bucket_is_packed_into_memory_that_the_peers_reach(cupy):
    made, empty = _memory()
    flat, _ = _packed(DevicePacker(0, cupy, empty), cupy)
    assert [array is flat for array in made] == [True]
    used = np.zeros(flat.size, bool)
    for offset, count in ((0, 15), (16, 7), (24, 1)):
        used[offset : offset + count] = True
    assert (flat.host[~used] == 0).all(), "what lies between arrays is reduced too, so it must be numbers"


def test_the_message_that_is_shared_does_not_need_all_ranks(cupy):
    made, empty = _memory()
    _packed(DevicePacker(0, cupy, empty), cupy, own=False)
    assert made == []


def test_where_no_rank_gets_such_memory_the_pool_has_some(cupy):
    def full(count, dtype):
        raise ResourceError("no memory left")

    packer = DevicePacker(0, cupy, full)
    _packed(packer, cupy)
    assert packer.memory.stats().taken == 2, "the message and the table of addresses"
