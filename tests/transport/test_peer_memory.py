"""Peer memory without a GPU: the shape of launches, and a region and segments over a fake CUDA."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from flagcx.algorithms import build
from flagcx.bootstrap.remote_store import RemoteStore
from flagcx.bootstrap.store_server import StoreServer
from flagcx.config import Config
from flagcx.dtypes import dtype_of
from flagcx.errors import ArgumentError, ArrayError, PeerTimeoutError, ResourceError
from flagcx.kernels.epilogue import Epilogue
from flagcx.kernels.peer import PeerArgs, PeerLayout
from flagcx.transport.base import Call
from flagcx.transport.device import DeviceIdentity
from flagcx.transport.peer_memory import connect, region
from flagcx.transport.peer_memory.grids import (
    Grid,
    chunk_grid,
    most_blocks,
    most_packets,
    packet_grid,
    parts_of,
)
from flagcx.transport.peer_memory.plans import PeerPlan
from flagcx.transport.peer_memory.resource import form_of
from flagcx.transport.peer_memory.rows import row_grid
from flagcx.transport.peer_memory.segments import Segments, table_nbytes
from flagcx.transport.rows import Rows

COUNTS = (1, 5, 1003, 4096, 1_000_003, 50_000_000)


@pytest.mark.parametrize("one_gpu", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
@pytest.mark.parametrize("form", ["one_shot", "two_shot", "broadcast", "reduce", "alltoall"])
def test_a_launch_covers_the_message_within_its_memory(form, ranks, one_gpu):
    layout = PeerLayout(ranks, 12, one_gpu)
    for count in COUNTS:
        for itemsize in (1, 4, 16):
            part = parts_of(form, count, itemsize, layout, packets=False)
            grid = chunk_grid(form, count, itemsize, layout)
            assert 1 <= grid.blocks <= layout.blocks and grid.chunk <= layout.most_chunk
            assert grid.blocks * grid.chunk * grid.steps >= part == grid.part
            assert grid.blocks * grid.chunk * (grid.steps - 1) < part, "no step is empty for all blocks"
            for bare in (False, True):
                most = most_packets(form, layout, bare)
                packets = packet_grid(form, count, itemsize, layout, bare)
                all_of_it = parts_of(form, count, itemsize, layout, packets=True)
                if packets is None:
                    assert all_of_it > layout.blocks * most
                    continue
                assert packets.chunk <= most and packets.blocks <= layout.blocks
                assert (packets.blocks - 1) * packets.chunk < all_of_it <= packets.blocks * packets.chunk
                assert packets.threads % 32 == 0


def test_an_empty_message_needs_no_launch():
    layout = PeerLayout(4, 12, True)
    assert chunk_grid("two_shot", 0, 4, layout).blocks == 0
    assert packet_grid("one_shot", 0, 4, layout).blocks == 0


def test_communicators_leave_room_for_each_other():
    for processors, sharing in ((132, 8), (132, 2), (108, 4), (132, 1)):
        taken = 0
        while more := most_blocks(processors, sharing, taken):
            taken += more
        room = 2 * processors if sharing == 1 else processors // sharing
        assert taken == room, "all that is there is given away, and no more"


def test_what_has_a_form():
    assert form_of("allreduce", "two_shot") == "two_shot"
    assert form_of("allreduce", "ring") is None
    assert form_of("reduce_scatter", "direct") == "reduce_scatter"
    assert form_of("gather", "direct") == "gather"
    assert form_of("gather", "binomial") is None
    assert form_of("barrier", "dissemination") == "barrier"


class Memory:
    """What the fake GPUs hold, over all ranks: allocations, and how often each is mapped."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.buffers: dict[int, ctypes.Array] = {}
        self.mapped: Counter[int] = Counter()
        self.freed_while_mapped: list[int] = []


class Runtime:
    """One rank's CUDA runtime, as far as peer memory asks for it."""

    hostAllocMapped = hostAllocPortable = 0
    memcpyHostToDevice, memcpyDeviceToHost = 1, 2

    capability = "90"

    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self, memory: Memory, visible: list[str], access: bool, broken: bool = False) -> None:
        self.memory, self.visible, self.access, self.broken = memory, visible, access, broken

    def malloc(self, nbytes):
        buffer = ctypes.create_string_buffer(nbytes)
        with self.memory.lock:
            self.memory.buffers[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def hostAlloc(self, nbytes, flags):
        return self.malloc(nbytes)

    def free(self, at):
        with self.memory.lock:
            if self.memory.mapped[at]:
                self.memory.freed_while_mapped.append(at)
            del self.memory.buffers[at]

    freeHost = free

    def memset(self, at, value, nbytes):
        ctypes.memset(at, value, nbytes)

    def memcpy(self, to, source, nbytes, kind):
        if not self.broken or kind != self.memcpyDeviceToHost:
            ctypes.memmove(to, source, nbytes)

    def deviceSynchronize(self):
        pass

    def ipcGetMemHandle(self, at):
        return at.to_bytes(8, "little")

    def ipcOpenMemHandle(self, handle):
        at = int.from_bytes(handle, "little")
        with self.memory.lock:
            self.memory.mapped[at] += 1
        return at

    def ipcCloseMemHandle(self, at):
        with self.memory.lock:
            self.memory.mapped[at] -= 1

    def getDeviceCount(self):
        return len(self.visible)

    def getDeviceProperties(self, device):
        return {"uuid": bytes.fromhex(self.visible[device])}

    def deviceCanAccessPeer(self, device, peer):
        return self.access


class Array:
    """A CuPy array: its memory's owner is all that counts."""

    def __init__(self, shape, dtype, pointer):
        self.pointer = pointer


def fake_cupy(runtime: Runtime, processors: int = 132):
    device = SimpleNamespace(
        attributes={"MultiProcessorCount": processors}, compute_capability=runtime.capability
    )
    cuda = SimpleNamespace(
        runtime=runtime,
        Device=lambda n: device,
        driver=SimpleNamespace(launchKernel=None),
        UnownedMemory=lambda at, nbytes, owner: SimpleNamespace(at=at, owner=owner),
        MemoryPointer=lambda memory, offset: memory,
    )
    return SimpleNamespace(cuda=cuda, ndarray=Array)


@pytest.fixture
def stores():
    with StoreServer(2) as server:
        server.start()
        made = [RemoteStore(server.address, server.authkey, r, 2) for r in range(2)]
        yield made
        for store in made:
            store.close()


def on_each(function) -> list:
    """Both ranks at once."""
    results: list = [None, None]

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


GPUS = ["aa" * 16, "bb" * 16]


def identities(hosts=("h", "h"), uuids=GPUS):
    return [DeviceIdentity(hosts[r], 100 + r, r, uuids[r], 23007) for r in range(2)]


def joined(stores, memory, ranks=None, access=True, visible=(GPUS, GPUS), configs=None, broken=False):
    ranks = ranks or identities()
    configs = configs or [Config(init_timeout_s=20.0)] * 2

    def join(rank):
        cupy = fake_cupy(Runtime(memory, visible[rank], access, broken and rank == 1))
        return connect(cupy, stores[rank], ranks, SimpleNamespace(what="a call"), configs[rank])

    return on_each(join)


def test_gpus_that_are_too_old_for_the_kernels_do_without(stores, monkeypatch):
    monkeypatch.setattr(Runtime, "capability", "61")
    reason = "rank 0: its GPU has compute capability 6, and the kernels need 7 or later"
    assert joined(stores, Memory()) == [(None, reason)] * 2


def test_ranks_see_each_others_memory_and_give_everything_back(stores):
    memory = Memory()
    joins = joined(stores, memory)
    peers = [join[0] for join in joins]
    assert [join[1] for join in joins] == ["", ""]
    assert peers[0]._region.at == peers[1]._region.at, "the fake has one address for all"
    arrays = on_each(lambda r: peers[r].segments.empty(1000, np.float32))
    handles = [peers[r].segments.handle_of(arrays[r].pointer.at + 400, 3600) for r in range(2)]
    assert handles[0] == handles[1] != 0
    assert peers[0].segments.handle_of(arrays[0].pointer.at + 400, 4000) == 0, "it ends behind the segment"
    assert peers[0].segments.handle_of(12345, 4) == 0
    del arrays
    gc.collect()
    on_each(lambda r: peers[r].close())
    assert not memory.buffers and not +memory.mapped and not memory.freed_while_mapped


def test_an_array_that_outlives_the_communicator_keeps_its_memory(stores):
    memory = Memory()
    peers = [join[0] for join in joined(stores, memory)]
    arrays = on_each(lambda r: peers[r].segments.empty(1000, np.float32))
    on_each(lambda r: peers[r].close())
    assert set(memory.buffers) == {a.pointer.at for a in arrays}
    del arrays
    gc.collect()
    assert not memory.buffers


def segments_of(runtimes, stores) -> list[Segments]:
    tables = [runtime.malloc(table_nbytes(2)) for runtime in runtimes]
    return [Segments(fake_cupy(runtimes[r]), stores[r], 20.0, tables[r]) for r in range(2)]


def test_what_was_freed_on_all_ranks_is_used_again(stores):
    memory = Memory()
    segments = segments_of([Runtime(memory, GPUS, True) for _ in range(2)], stores)
    first = on_each(lambda r: segments[r].empty(100, np.float32))
    at = first[0].pointer.at
    del first[0]
    gc.collect()
    second = on_each(lambda r: segments[r].empty(100, np.float32))
    assert second[0].pointer.at != at, "rank 1 still has its array"
    first.clear()
    gc.collect()
    third = on_each(lambda r: segments[r].empty(100, np.float32))
    assert third[0].pointer.at == at
    others = on_each(lambda r: segments[r].empty(10 + r * 1000, np.float32))
    assert all(isinstance(e, ArgumentError) and "rank 1: 4096 bytes" in str(e) for e in others)


def test_an_array_that_one_rank_has_no_memory_for_is_made_on_none(stores):
    memory = Memory()
    runtimes = [Runtime(memory, GPUS, True) for _ in range(2)]
    segments = segments_of(runtimes, stores)

    def full(nbytes):
        raise Runtime.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")

    before = set(memory.buffers)
    runtimes[1].malloc = full
    errors = on_each(lambda r: segments[r].empty(1000, np.float32))
    assert all(isinstance(e, ResourceError) and "rank 1: cudaErrorMemory" in str(e) for e in errors), errors
    assert set(memory.buffers) == before and not +memory.mapped


@pytest.mark.parametrize("fails", [1, 2])
def test_a_rank_that_has_no_memory_for_it_keeps_none_and_says_so_to_all(stores, fails, monkeypatch):
    memory, malloc, calls = Memory(), Runtime.malloc, []

    def full(self, nbytes):
        if len(self.visible) == 3:
            calls.append(nbytes)
            if len(calls) == fails + 1:  # what the host shares is malloc's, too
                raise Runtime.CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        return malloc(self, nbytes)

    monkeypatch.setattr(Runtime, "malloc", full)
    joins = joined(stores, memory, visible=(GPUS, [*GPUS, "cc" * 16]))
    assert joins == [(None, "rank 1: cudaErrorMemoryAllocation: out of memory")] * 2
    assert not memory.buffers and not +memory.mapped


def test_a_part_of_the_ranks_of_a_gpu_leaves_room_for_the_others(stores, monkeypatch):
    sharing: Counter[int] = Counter()
    monkeypatch.setattr(region, "_most_sharing", lambda: sharing)
    monkeypatch.setattr(region, "_taken", Counter)
    together = identities(uuids=[GPUS[0]] * 2)
    alone, other = (join[0] for join in joined(stores, Memory(), together))
    on_each(lambda r: (alone, other)[r].close())
    sharing[0] = sharing[1] = 8  # there was one of all eight before
    part = joined(stores, Memory(), together)[0][0]
    assert (alone.blocks, part.blocks) == (most_blocks(132, 2, 0), most_blocks(132, 8, 0))


def test_who_waits_for_an_operation_after_the_end_reads_no_memory_that_is_gone(stores):
    peers = [join[0] for join in joined(stores, Memory())]
    peers[0]._region.control[1] = 1
    with pytest.raises(PeerTimeoutError, match=r"rank 0: rank 0 did not come to a call within"):
        peers[0].check()
    on_each(lambda r: peers[r].close())
    peers[0].check()
    peers[0].stop()
    assert peers[0].fault() is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"ranks": identities(hosts=("h", "g"))}, "the ranks are on several hosts"),
        ({"access": False}, "device 0 has no access to the memory of rank 1's GPU"),
        ({"visible": (GPUS, GPUS[1:])}, "rank 1: the GPU of rank 0 is hidden from this process"),
        ({"broken": True}, "rank 1: what was written to the memory of rank 0 reads back differently"),
        (
            {"configs": [Config(init_timeout_s=20.0), Config(peer_memory=False, init_timeout_s=20.0)]},
            "rank 1: it is switched off",
        ),
    ],
)
def test_where_it_cannot_be_used_all_ranks_know_the_same_reason(stores, changed, reason):
    memory = Memory()
    joins = joined(stores, memory, **changed)
    assert [join[0] for join in joins] == [None, None]
    assert joins[0][1] == joins[1][1] and reason in joins[0][1]
    assert not memory.buffers and not +memory.mapped


def test_an_array_between_elements_is_refused_before_anything_is_enqueued():
    def plan(dtype):
        call = Call(build("allgather", "direct", 2), 0, 8, dtype_of(dtype), None, False)
        order, grid = SimpleNamespace(device=0, rank=0), Grid(1, 64, 4, 1, 4)
        return PeerPlan(call, "chunks", None, None, grid, PeerArgs(), order, None, None, 0)

    def array(at):
        return SimpleNamespace(data=SimpleNamespace(device_id=0, ptr=at))

    with pytest.raises(
        ArrayError, match="an array begins at address 0x1002, and its dtype needs a multiple of 4"
    ):
        plan("float32").run(array(0x1002), array(0x2000))
    with pytest.raises(ArrayError, match="an array begins at address 0x2006"):
        plan("complex64").run(array(0x1004), array(0x2006))
    with pytest.raises(AttributeError, match="enter"):  # a multiple of four bytes is enough for two of four
        plan("complex64").run(array(0x1004), array(0x2004))


def test_rows_that_fit_one_kernel():
    kind = dtype_of("float16")
    nothing = Epilogue((), (), (), kind)
    layout, shared = PeerLayout(8, 128, False, True), PeerLayout(2, 48, True)
    few = row_grid("one_shot", Rows(1, 16384, kind, nothing), layout)
    assert few.blocks == few.shape.cluster == 8 and few.shape.places * 8 == 2048
    assert row_grid("one_shot", Rows(48, 16384, kind, nothing), layout).shape.cluster == 1
    assert row_grid("one_shot", Rows(1, 4096, kind, nothing), shared).shape.cluster == 1
    # A block's slots hold 2048 packs from each of 8 ranks, and of two-shot's sums 1024 each.
    assert row_grid("one_shot", Rows(129, 16384, kind, nothing), layout) is None
    assert row_grid("two_shot", Rows(4 * 128, 16384, kind, nothing), layout).blocks == 128
    assert row_grid("two_shot", Rows(4 * 128 + 1, 16384, kind, nothing), layout) is None
    assert row_grid("one_shot", Rows(1, 16385, kind, nothing), layout) is None, "more than registers hold"
    assert row_grid("ring", Rows(1, 64, kind, nothing), layout) is None
    assert row_grid("one_shot", Rows(0, 64, kind, nothing), layout).blocks == 0
