"""One kernel that packs any number of arrays into one message, or unpacks it into them.

The arrays are given by a table with a row for each part of at most ``PART_NBYTES``: its address, where it
lies in the message, and its length, all in bytes. A block of threads moves a part: 16 bytes at a time where
array and message are equally far from a multiple of 16, else in the widest words that fit both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from flagcx.errors import ArrayError
from flagcx.kernels.compile import load_kernel
from flagcx.kernels.cuda import is_capturing
from flagcx.memory import Block, Pool

THREADS = 256
PART_NBYTES = 16 << 10
ALIGNMENT = 16
"""In the message each array begins at a multiple of so many bytes."""
NAME = "flagcx_pack"
_BLOCKS_PER_PROCESSOR = 8
_MOST_TABLES = 16

SOURCE = r"""
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long u64;

// Whole words between the first and the last address that is a multiple of sizeof(W); single bytes around.
template <typename W>
FLAGCX_DEVICE void copy_words(u8* to, const u8* from, i64 nbytes, i64 thread, i64 threads) {
  i64 head = (i64)(-(u64)to & (sizeof(W) - 1));
  if (head > nbytes) head = nbytes;
  const i64 words = (nbytes - head) / (i64)sizeof(W), tail = head + words * (i64)sizeof(W);
  W* const wide_to = (W*)(to + head);
  const W* const wide_from = (const W*)(from + head);
  for (i64 i = thread; i < words; i += threads) wide_to[i] = wide_from[i];
  for (i64 i = thread; i < head; i += threads) to[i] = from[i];
  for (i64 i = tail + thread; i < nbytes; i += threads) to[i] = from[i];
}

extern "C" __global__ void __launch_bounds__(THREADS) flagcx_pack(
    const i64* rows, i64 count, u8* message, int unpacks) {
  for (i64 row = blockIdx.x; row < count; row += gridDim.x) {
    u8* const array = (u8*)rows[3 * row];
    u8* const part = message + rows[3 * row + 1];
    const i64 nbytes = rows[3 * row + 2];
    u8* const to = unpacks ? array : part;
    const u8* const from = unpacks ? part : array;
    const u32 apart = (u32)((u64)to ^ (u64)from);
    if ((apart & 15) == 0) copy_words<uint4>(to, from, nbytes, threadIdx.x, THREADS);
    else if ((apart & 7) == 0) copy_words<u64>(to, from, nbytes, threadIdx.x, THREADS);
    else if ((apart & 3) == 0) copy_words<u32>(to, from, nbytes, threadIdx.x, THREADS);
    else if ((apart & 1) == 0) copy_words<u16>(to, from, nbytes, threadIdx.x, THREADS);
    else copy_words<u8>(to, from, nbytes, threadIdx.x, THREADS);
  }
}
"""


def pack_source() -> str:
    """The whole CUDA source of the kernel."""
    head = f"#define FLAGCX_DEVICE __device__ __forceinline__\n#define THREADS {THREADS}\n"
    return head + SOURCE


class Layout:
    """Where arrays lie in a message, and the parts that blocks of threads move.

    Args:
        sizes: Bytes of each array, in order.

    Attributes:
        offsets: Where each array begins in the message, in bytes.
        nbytes: Bytes of the message.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.offsets: list[int] = []
        at = 0
        for nbytes in sizes:
            self.offsets.append(at)
            at += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.nbytes = at
        parts = [(i, s) for i, nbytes in enumerate(sizes) for s in range(0, nbytes, PART_NBYTES)]
        self._array, self._start = np.array(parts, np.int64).reshape(-1, 2).T
        whole = np.array(sizes, np.int64)
        self._lengths = np.minimum(whole[self._array] - self._start, PART_NBYTES)
        self._places = np.array(self.offsets, np.int64)[self._array] + self._start

    @property
    def parts(self) -> int:
        """How many rows a table has."""
        return len(self._array)

    def table(self, addresses: Sequence[int]) -> np.ndarray:
        """The kernel's table for arrays at these addresses: int64 of shape (parts, 3)."""
        rows = np.empty((self.parts, 3), np.int64)
        rows[:, 0] = np.array(addresses, np.int64)[self._array] + self._start
        rows[:, 1], rows[:, 2] = self._places, self._lengths
        return rows


class PackKernel:
    """The kernel on one device, and memory for its tables.

    Args:
        cupy: The CuPy module.
        device: Number of the device.
        memory: Memory of that device.
        pinned: Memory of the host, from which tables are copied there.
    """

    def __init__(self, cupy: Any, device: int, memory: Pool, pinned: Pool) -> None:
        self._cupy, self.device, self._memory, self._pinned = cupy, device, memory, pinned
        self._function = load_kernel(cupy, device, pack_source(), NAME)
        self._blocks = _BLOCKS_PER_PROCESSOR * cupy.cuda.Device(device).attributes["MultiProcessorCount"]
        self._copies = cupy.cuda.Stream(non_blocking=True)

    def upload(self, rows: np.ndarray) -> Block:
        """Puts a table where the kernel reads it."""
        there, here = self._memory.take(rows.nbytes), self._pinned.take(rows.nbytes)
        staged = np.frombuffer(here.memory, np.int64, rows.size, here.offset)
        staged[:] = rows.reshape(-1)
        target = there.memory.ptr + there.offset
        copy = self._cupy.cuda.runtime.memcpyAsync
        copy(target, here.memory.ptr + here.offset, rows.nbytes, 1, self._copies.ptr)
        self._copies.synchronize()
        self._pinned.give(here)
        return there

    def launch(self, table: Block, parts: int, message: int, unpacks: bool, stream: Any) -> None:
        """Enqueues the move of all parts of a table."""
        at = table.memory.ptr + table.offset
        grid = (max(1, min(parts, self._blocks)),)
        self._function(grid, (THREADS,), (at, parts, message, np.int32(unpacks)), stream=stream)

    def give(self, table: Block) -> None:
        """Takes a table back that no kernel reads any more."""
        self._memory.give(table)


class DevicePacking:
    """CuPy arrays end to end in one message.

    Tables are kept for the arrays that came last, so arrays that come back cost one launch.

    Args:
        cupy: The CuPy module.
        kernel: The kernel.
        flat: The message: an array of one dimension, of ``layout.nbytes`` bytes.
        layout: Where arrays lie in it.
        give: Called by ``close``.

    Attributes:
        flat: The message.
    """

    def __init__(self, cupy: Any, kernel: PackKernel, flat: Any, layout: Layout, give: Any = None) -> None:
        self.flat = flat
        self._cupy, self._kernel, self._layout, self._give = cupy, kernel, layout, give
        self._tables: OrderedDict[tuple[int, ...], Table] = OrderedDict()
        self._packed: tuple[Sequence[Any], Table] | None = None

    def pack(self, arrays: Sequence[Any]) -> None:
        """Enqueues the copy of the arrays into the message, on the current stream."""
        table = self.places(arrays)
        self.pack_at(table)
        self._packed = arrays, table

    def unpack(self, arrays: Sequence[Any]) -> None:
        """Enqueues the copy of the message into the arrays, on the current stream."""
        packed, self._packed = self._packed, None  # the very list that was packed need not be looked up
        self.unpack_at(packed[1] if packed is not None and packed[0] is arrays else self.places(arrays))

    def pack_at(self, places: Table) -> None:
        """Enqueues the copy of the arrays that lie there into the message."""
        self._packed = None
        self._move(places, False)

    def unpack_at(self, places: Table) -> None:
        """Enqueues the copy of the message into the arrays that lie there."""
        self._move(places, True)

    def _move(self, table: Table, unpacks: bool) -> None:
        if table.block is not None:
            stream = self._cupy.cuda.get_current_stream()
            self._kernel.launch(table.block, self._layout.parts, self.flat.data.ptr, unpacks, stream)
            table.used(stream)

    def places(self, arrays: Sequence[Any]) -> Table:
        """Where these arrays lie, in the form that the kernel reads.

        Raises:
            ArrayError: One lies on another device.
        """
        key = tuple([array.data.ptr for array in arrays])
        found = self._tables.get(key)
        if found is not None:
            return found
        for array in arrays:
            if array.data.device_id != self._kernel.device:
                raise ArrayError(
                    f"an array lies on device {array.data.device_id}, the communicator's are on device "
                    f"{self._kernel.device}; move it there"
                )
        self._forget_oldest()
        block = self._kernel.upload(self._layout.table(key)) if self._layout.parts else None
        made = self._tables[key] = Table(self._cupy, block)
        return made

    def _forget_oldest(self) -> None:
        evictable = [key for key, table in self._tables.items() if not table.captured]
        if len(evictable) >= _MOST_TABLES:
            oldest = self._tables.pop(evictable[0])
            oldest.finish()
            self._give_back(oldest)

    def _give_back(self, table: Table) -> None:
        block, table.block, table.kept = table.block, None, False
        if block is not None:
            self._kernel.give(block)

    def close(self) -> None:
        """Gives its memory back, but for what kernels still use. Never waits. Idempotent."""
        idle = True
        while self._tables:
            _, table = self._tables.popitem()
            table.kept = False
            if table.is_idle:
                self._give_back(table)
            else:
                idle = False
        give, self._give = self._give, None
        if give is not None and idle:
            give()


class Table:
    """Where certain arrays lie: a table on the device, and when it was used last.

    Attributes:
        block: The table; None where there is nothing to move.
        captured: Whether a graph has it.
        kept: Whether it is still there.
    """

    __slots__ = ("_event", "_runtime", "block", "captured", "kept")

    def __init__(self, cupy: Any, block: Block | None) -> None:
        self.block, self.captured, self.kept = block, False, True
        self._runtime, self._event = cupy.cuda.runtime, cupy.cuda.Event(disable_timing=True)

    def used(self, stream: Any) -> None:
        """Marks that a kernel on the stream reads it. One that is captured may read it at any time."""
        if is_capturing(self._runtime, stream):
            self.captured = True
        else:
            self._event.record(stream)

    @property
    def is_idle(self) -> bool:
        """Whether no kernel reads it, now or in a graph that is replayed."""
        return not self.captured and bool(self._event.done)

    def finish(self) -> None:
        """Waits until no kernel reads it."""
        self._event.synchronize()
