"""The heap, the fence, cross-memory attach and the signals, each alone."""

from __future__ import annotations

import ctypes
import gc
import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagcx.config import Config
from flagcx.errors import (
    AbortedError,
    ArgumentError,
    MismatchError,
    PeerDiedError,
    PeerTimeoutError,
    ResourceError,
)
from flagcx.memory import ALIGNMENT, FreeList
from flagcx.transport.shared_memory import fence
from flagcx.transport.shared_memory.cross_memory import CrossMemory, probe
from flagcx.transport.shared_memory.heap import SHARED, Heap, PeerHeaps
from flagcx.transport.shared_memory.segment import Segment
from flagcx.transport.shared_memory.signals import Signals
from flagcx.transport.shared_memory.words import HEAP_COUNT, words_nbytes
from tests.transport.test_waits import GivesUpMeanwhile


@pytest.fixture
def words():
    return memoryview(bytearray(words_nbytes(1))).cast("Q")


def test_arrays_of_the_heap_are_found_by_peers(words):
    heap = Heap(words)
    array = heap.empty((10, 20), np.float32)
    other = heap.empty(5000, np.float64)
    array[...] = np.arange(200).reshape(10, 20)
    for view in (array, array[3:], array[2:7, :], array.reshape(-1)[7:]):
        location = heap.locate(view)
        assert location & SHARED
        peers = PeerHeaps([words], [os.getpid()])
        raw = peers.view(0, location, view.nbytes)
        assert (raw.view(np.float32) == view.reshape(-1)).all()
        peers.close()
    assert heap.locate(array) != heap.locate(other)
    assert heap.locate(np.zeros(3)) is None
    heap.close()


def test_memory_of_dead_arrays_is_used_again(words):
    heap = Heap(words)
    array = heap.empty(1000, np.float64)
    view = array[10:]
    first = heap.locate(array)
    del array
    gc.collect()
    assert heap._pool.stats().used_nbytes > 0, "a view keeps the memory"
    del view
    assert heap._pool.stats().used_nbytes == 0
    for _ in range(1000):
        assert heap.locate(heap.empty(1000, np.float64)) == first
    assert words[HEAP_COUNT] == 1
    heap.close()


def test_too_many_pieces_of_heap(words, monkeypatch):
    monkeypatch.setattr("flagcx.transport.shared_memory.heap.MOST_HEAPS", 1)
    heap = Heap(words)
    kept = heap.empty(32 << 20, np.uint8)
    with pytest.raises(ResourceError, match="1 pieces of shared memory are in use already"):
        heap.empty(1, np.uint8)
    del kept
    heap.empty(1, np.uint8)
    heap.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40_000)), max_size=60))
def test_a_free_list_never_hands_out_a_byte_twice(steps):
    free, held = FreeList(40 * ALIGNMENT), {}
    for take, number in steps:
        if take:
            start = free.take(number)
            if start is not None:
                held[start] = max(-(-number // ALIGNMENT), 1) * ALIGNMENT
        elif held:
            start = sorted(held)[number % len(held)]
            del held[start]
            free.give(start)
        spans = sorted(held.items())
        assert all(a + n <= b for (a, n), (b, _) in pairwise(spans))
        assert all(a + n <= free.nbytes for a, n in spans)
        assert free.used_nbytes == sum(held.values())
    for start in held:
        free.give(start)
    assert free.take(free.nbytes) == 0, "what is given back is joined"


def test_no_fence_where_the_hardware_keeps_order():
    assert fence.memory_fence("x86_64") is None


def test_the_machine_code_for_arm_is_a_full_fence():
    """dmb ish and ret, as the Arm manual encodes them: CRm=ish (1011), opc=01 (dmb); ret x30."""
    dmb, ret = (int.from_bytes(fence._DMB_ISH_RET[i : i + 4], "little") for i in (0, 4))
    assert dmb == 0b1101_0101_0000_0011_0011_0000_1011_1111 | 0b1011 << 8
    assert ret == 0xD65F0000 | 30 << 5


def test_a_fence_for_other_machines_can_be_called():
    made = [m("aarch64") for m in (fence._from_libatomic, fence._from_membarrier)]
    for call in made:
        if call is not None:
            call()
    with pytest.raises(ResourceError, match="needs a memory fence"):
        _without_any_fence()


def _without_any_fence():
    makers = fence._from_libatomic, fence._from_machine_code, fence._from_membarrier
    try:
        fence._from_libatomic = fence._from_machine_code = fence._from_membarrier = lambda machine: None
        fence.memory_fence("sparc")
    finally:
        fence._from_libatomic, fence._from_machine_code, fence._from_membarrier = makers


def test_cross_memory_reads_and_writes():
    memory = ctypes.create_string_buffer(b"0123456789", 10)
    near = ctypes.create_string_buffer(10)
    own = CrossMemory(os.getpid(), 0)
    own.read(ctypes.addressof(near), ctypes.addressof(memory), 10)
    assert near.raw == b"0123456789"
    near[0] = b"x"
    own.write(ctypes.addressof(near), ctypes.addressof(memory), 10)
    assert memory.raw == b"x123456789"
    assert probe(own, ctypes.addressof(memory), b"x123456789")
    assert not probe(own, ctypes.addressof(memory), b"0123456789")
    assert memory.raw == b"x123456789", "a process that is not the peer is not written to"
    assert not probe(own, 8, b"0123456789")


def test_cross_memory_of_a_dead_process_names_the_rank():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    near = ctypes.create_string_buffer(10)
    with pytest.raises(PeerDiedError, match=r"rank 3 \(process \d+\) died") as caught:
        CrossMemory(child, 3).read(ctypes.addressof(near), 4096, 10)
    assert caught.value.peer == 3


@pytest.fixture
def pair():
    """Two ranks' signals in one process."""
    segments = [Segment.create(words_nbytes(2)) for _ in range(2)]
    both = [Signals(rank, segments, 0.05) for rank in range(2)]
    yield both
    for signals in both:
        signals.close()
    for segment in segments:
        segment.close()


def test_the_call_log_shows_who_called_what(pair):
    a, b = pair
    value = a.enter(a.log.signature("allreduce of 3"))
    b.enter(b.log.signature("broadcast of 3"))
    with pytest.raises(MismatchError, match=r"rank 0 called allreduce of 3, rank 1 called broadcast of 3"):
        a.wait_call(a.words[1], 0, value)


def test_calls_that_agree_pass(pair):
    a, b = pair
    for i in range(40):
        value = a.enter(a.log.signature("allreduce of 3"))
        assert b.enter(b.log.signature("allreduce of 3")) == value
        a.wait_call(a.words[1], i % 16, value)


def test_a_peer_that_does_not_come(pair):
    a, _ = pair
    value = a.enter(a.log.signature("barrier"))
    with pytest.raises(PeerTimeoutError, match=r"rank 1 did not take part within 0\.\d s .* in barrier"):
        a.wait_call(a.words[1], 0, value)


def test_a_peer_that_gives_up_while_it_is_looked_into_is_not_to_blame(pair):
    a, b = pair
    a._waits = GivesUpMeanwhile(lambda: b.abort("enough", None))
    value = a.enter(a.log.signature("barrier"))
    with pytest.raises(AbortedError, match="rank 1 gave up: enough"):
        a.wait_call(a.words[1], 0, value)


def test_settings_are_checked():
    with pytest.raises(ArgumentError, match="timeout_s must be above 0"):
        Config(timeout_s=0)
    with pytest.raises(ArgumentError, match="multiple of 4096"):
        Config(slot_nbytes=1000)
    with pytest.raises(ArgumentError, match="not a switch"):
        Config.from_environment({"FLAGCX_CROSS_MEMORY": "maybe"})
    assert not Config.from_environment({"FLAGCX_CROSS_MEMORY": "off"}).cross_memory
