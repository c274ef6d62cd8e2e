"""The memory that a rank shares with its peers: allocated, exchanged, opened and tested.

Either every rank sees every other's memory, or no rank keeps any, for a reason that is the same on all.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from flagcx.bootstrap.store import Store
from flagcx.errors import FlagcxError
from flagcx.kernels.peer import MOST_RANKS, PeerLayout
from flagcx.transport.device import DeviceIdentity
from flagcx.transport.peer_memory.grids import most_blocks
from flagcx.transport.peer_memory.posted import PostedCounts
from flagcx.transport.peer_memory.segments import table_nbytes

_CONTROL_NBYTES = 64
_CLOSE_LIMIT_S = 5.0
_PROBE_NBYTES = 16
_LEAST_MAJOR = 7
_CLUSTERS_SINCE = 9


class Unavailable(Exception):
    """The peers' memory cannot be used; the message is the same on every rank."""


@lru_cache(maxsize=1)
def _taken() -> Counter[int]:
    """Blocks of threads that all communicators of this process may launch, by device."""
    return Counter()


@lru_cache(maxsize=1)
def _most_sharing() -> Counter[int]:
    """The most ranks that any communicator of this process has had, by device."""
    return Counter()


_Words = ctypes.c_uint32 * (_CONTROL_NBYTES // 4)


class PeerRegion:
    """One rank's shared memory, and the addresses of every rank's in this process.

    Args:
        cupy: The CuPy module.
        store: The communicator's part of the store.
        identities: Every rank's process and GPU.
        limit_s: How long to wait for the other ranks, in seconds.
        enabled: Whether this rank's settings allow it.

    Raises:
        Unavailable: A rank cannot see the memory of another.

    Attributes:
        layout: The layout of the memory.
        device: Number of this rank's device.
        at: Address of each rank's memory in this process.
        control: Words that host and GPU share: stop, whether a wait timed out, and for which peer.
        control_at: Their address.
        table: Address of zeros for ``Segments``.
    """

    def __init__(
        self,
        cupy: Any,
        store: Store,
        identities: Sequence[DeviceIdentity],
        limit_s: float,
        enabled: bool = True,
    ) -> None:
        self._cupy, self._runtime, self._store = cupy, cupy.cuda.runtime, store
        self._limit_s = limit_s
        self.rank, self.size = store.rank, store.size
        self._identities = identities
        self.device = identities[self.rank].device
        self._own = self.control_at = self.table = self._blocks = 0
        self.control: Any = _Words()  # not yet those that the GPU sees
        self._opened: list[int] = []
        self._handle = b""
        self.at: tuple[int, ...] = ()
        self._agree("able", self._obstacle() if enabled else "it is switched off (FLAGCX_PEER_MEMORY=0)")
        try:
            self._agree_on_layout()
            self._agree("allocated", self._tried(self._allocate))
            handles = self._exchange("handles", self._handle)
            self._agree("opened", self._tried(lambda: self._open(handles)))
            self._probe()
        except BaseException:
            self.close()
            raise
        self.control = _Words.from_address(self.control_at)

    def _exchange(self, name: str, value: bytes) -> list[bytes]:
        return self._store.exchange(f"peer/{name}", bytes(value), self._limit_s)

    def _agree(self, name: str, obstacle: str) -> None:
        """Raises on every rank if there is an obstacle on any."""
        for rank, found in enumerate(self._exchange(name, obstacle.encode())):
            if found:
                raise Unavailable(f"rank {rank}: {found.decode()}")

    def _tried(self, step: Callable[[], None]) -> str:
        try:
            step()
        except self._runtime.CUDARuntimeError as error:
            return str(error)
        return ""

    def _obstacle(self) -> str:
        """The reason why this rank cannot use peers' memory, as far as it shows without a test, or ""."""
        own = self._identities[self.rank]
        if self.size > MOST_RANKS:
            return f"there are {self.size} ranks, and the kernels are made for up to {MOST_RANKS}"
        if len({i.host for i in self._identities}) > 1:
            return "the ranks are on several hosts"
        major = int(self._cupy.cuda.Device(self.device).compute_capability) // 10
        if major < _LEAST_MAJOR:
            return f"its GPU has compute capability {major}, and the kernels need {_LEAST_MAJOR} or later"
        here = {
            bytes(self._runtime.getDeviceProperties(d)["uuid"]).hex(): d
            for d in range(self._runtime.getDeviceCount())
        }
        for rank, other in enumerate(self._identities):
            if other.uuid == own.uuid:
                continue
            seen = here.get(other.uuid)
            if seen is None:
                return f"the GPU of rank {rank} is hidden from this process (CUDA_VISIBLE_DEVICES)"
            if not self._runtime.deviceCanAccessPeer(own.device, seen):
                return f"device {own.device} has no access to the memory of rank {rank}'s GPU"
        return ""

    def _agree_on_layout(self) -> None:
        attributes = self._cupy.cuda.Device(self.device).attributes
        # After a split the ranks of a communicator share the GPU with those of the other parts.
        sharing = max(Counter(i.uuid for i in self._identities).values(), default=1)
        sharing = _most_sharing()[self.device] = max(sharing, _most_sharing()[self.device])
        major = int(self._cupy.cuda.Device(self.device).compute_capability) // 10
        ours = [attributes["MultiProcessorCount"], _taken()[self.device], sharing, major]
        found = [json.loads(each) for each in self._exchange("room", json.dumps(ours).encode())]
        fewest, taken, sharing = min(f[0] for f in found), max(f[1] for f in found), max(f[2] for f in found)
        clusters = all(f[3] >= _CLUSTERS_SINCE for f in found)
        blocks = most_blocks(fewest, sharing, taken)
        if blocks == 0:
            raise Unavailable(
                f"{sharing} ranks share a GPU of {fewest} multiprocessors, and other communicators have "
                f"{taken} blocks of threads of each: no room is left for threads that wait for each other"
            )
        one_gpu = len({i.uuid for i in self._identities}) == 1
        self.layout = PeerLayout(self.size, blocks, one_gpu, clusters)
        self._blocks = blocks
        _taken()[self.device] += blocks

    def _allocate(self) -> None:
        runtime = self._runtime
        self._own = runtime.malloc(self.layout.nbytes)
        cleared = self.layout.cleared_nbytes
        runtime.memset(self._own, 0, cleared)
        runtime.memset(self._own + cleared, 0xFF, self.layout.nbytes - cleared)
        flags = runtime.hostAllocMapped | runtime.hostAllocPortable
        nbytes = _CONTROL_NBYTES + ctypes.sizeof(PostedCounts)
        self.control_at = runtime.hostAlloc(nbytes, flags)
        ctypes.memset(self.control_at, 0, nbytes)
        self.table = runtime.malloc(table_nbytes(self.size))
        runtime.memset(self.table, 0, table_nbytes(self.size))
        runtime.deviceSynchronize()
        self._handle = runtime.ipcGetMemHandle(self._own)

    def _open(self, handles: Sequence[bytes]) -> None:
        at = []
        for rank, handle in enumerate(handles):
            if rank == self.rank:
                at.append(self._own)
                continue
            at.append(self._runtime.ipcOpenMemHandle(handle))
            self._opened.append(at[-1])
        self.at = tuple(at)

    def _probe(self) -> None:
        """Tests that every rank can write and read every other's memory."""
        place = self.layout.places["AT_INBOX"]
        slot = place + self.rank * _PROBE_NBYTES
        mark = bytes([self.rank + 1] * _PROBE_NBYTES)
        written = self._tried(lambda: self._copy_in([at + slot for at in self.at], mark))
        self._agree("written", written)
        expected = b"".join(bytes([q + 1] * _PROBE_NBYTES) for q in range(self.size))
        seen = [b""] * self.size

        def read() -> None:
            for q, at in enumerate(self.at):
                seen[q] = self._copy_out(at + place, len(expected))

        problem = self._tried(read)
        wrong = [str(q) for q in range(self.size) if seen[q] != expected]
        if not problem and wrong:
            problem = f"what was written to the memory of rank {wrong[0]} reads back differently"
        self._agree("probed", problem)

    def _copy_in(self, places: Sequence[int], data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        for at in places:
            self._runtime.memcpy(at, ctypes.addressof(buffer), len(data), self._runtime.memcpyHostToDevice)
        self._runtime.deviceSynchronize()

    def _copy_out(self, at: int, nbytes: int) -> bytes:
        buffer = ctypes.create_string_buffer(nbytes)
        self._runtime.memcpy(ctypes.addressof(buffer), at, nbytes, self._runtime.memcpyDeviceToHost)
        return buffer.raw

    def posted(self, stream: Any) -> PostedCounts:
        """Reads, by copies on a stream, what the peers are ready for and what this rank has made.

        The counts are those of the last such call.
        """
        layout, runtime = self.layout, self._runtime
        counts = PostedCounts.from_address(self.control_at + _CONTROL_NBYTES)  # pinned: no copy on the way
        places = layout.places["AT_POSTED"], layout.places["AT_PAIRS"] + layout.channels * MOST_RANKS * 16
        for part, at in zip((counts.posted, counts.pairs), places, strict=True):
            nbytes = ctypes.sizeof(part)
            kind = runtime.memcpyDeviceToHost
            runtime.memcpyAsync(ctypes.addressof(part), self._own + at, nbytes, kind, stream.ptr)
        stream.synchronize()
        return counts

    def detach(self) -> None:
        """Closes the views of the peers' memory."""
        opened, self._opened = self._opened, []
        for at in opened:
            self._quietly(self._runtime.ipcCloseMemHandle, at)

    def part(self) -> None:
        """Waits, with a limit, until all peers have closed their views of this rank's memory."""
        with contextlib.suppress(FlagcxError):
            self._store.exchange("peer/closed", b"", _CLOSE_LIMIT_S)

    def close(self) -> None:
        """Gives everything back."""
        self.detach()
        _taken()[self.device] -= self._blocks
        self._blocks, self.control = 0, _Words()
        for memory in (self._own, self.table):
            if memory:
                self._quietly(self._runtime.free, memory)
        if self.control_at:
            self._quietly(self._runtime.freeHost, self.control_at)
        self._own = self.table = self.control_at = 0

    def _quietly(self, function: Callable[..., Any], *args: Any) -> None:
        with contextlib.suppress(self._runtime.CUDARuntimeError):
            function(*args)
