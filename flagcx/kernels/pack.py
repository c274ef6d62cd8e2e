"""One kernel that packs any number of arrays into one message, or unpacks the message into them.

A table has a row for each part of an array, of at most ``PART_NBYTES``: its address, its offset in the
message, and its length, all in bytes. A block of threads moves a part: 16 bytes at a time where array and
message are equally far from a multiple of 16, else in the widest words that fit both.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from flagcx.errors import ArrayError
from flagcx.kernels.compile import load_kernel
from flagcx.kernels.cuda import is_capturing
from flagcx.kernels.source import DEVICE_FUNCTION, TYPES
from flagcx.memory import Block, Pool

THREADS = 256
PART_NBYTES = 16 << 10
ALIGNMENT = 16
"""Bytes to which the offset of each array in the message is rounded up."""
NAME = "flagcx_pack"
_BLOCKS_PER_PROCESSOR = 8
_MOST_TABLES = 16

_KERNEL = r"""
// Whole words between the first and the last address that is a multiple of sizeof(W); the rest by bytes.
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
    // The gap after the array: a codec may have left NaN there.
    if (!unpacks && (nbytes & (ALIGNMENT - 1)) && threadIdx.x < ALIGNMENT - (nbytes & (ALIGNMENT - 1)))
      to[nbytes + threadIdx.x] = 0;
  }
}
"""


def pack_source() -> str:
    """The whole CUDA source of the kernel."""
    numbers = f"#define THREADS {THREADS}\n#define ALIGNMENT {ALIGNMENT}\n"
    return f"{DEVICE_FUNCTION}{numbers}{TYPES}{_KERNEL}"


class PackLayout:
    """The offsets of arrays in a message, and the parts that blocks of threads move.

    Args:
        sizes: Bytes of each array, in order.

    Attributes:
        offsets: Offset of each array in the message, in bytes.
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
    """The kernel on one device, with pools of device and pinned memory for its tables."""

    def __init__(self, cupy: Any, device: int, memory: Pool, pinned: Pool) -> None:
        self._cupy, self.device, self._memory, self._pinned = cupy, device, memory, pinned
        self._function = load_kernel(cupy, device, pack_source(), NAME)
        self._blocks = _BLOCKS_PER_PROCESSOR * cupy.cuda.Device(device).attributes["MultiProcessorCount"]
        self._copies = cupy.cuda.Stream(non_blocking=True)

    def upload(self, rows: np.ndarray) -> Block:
        """Copies a table to the device."""
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
        """Takes back a table that no kernel reads any more."""
        self._memory.give(table)


class DevicePacking:
    """CuPy arrays end to end in one message.

    Tables are kept for the arrays of recent calls, so arrays that come back cost one launch.

    Args:
        cupy: The CuPy module.
        kernel: The kernel.
        flat: The message: an array of one dimension, of ``layout.nbytes`` bytes.
        layout: The arrays' places in it.
        give: Called by ``close``, to give the message back.
    """

    def __init__(
        self, cupy: Any, kernel: PackKernel, flat: Any, layout: PackLayout, give: Any = None
    ) -> None:
        self.flat = flat
        self._cupy, self._kernel, self._layout, self._give = cupy, kernel, layout, give
        self._tables: OrderedDict[tuple[int, ...], PackTable] = OrderedDict()
        self._packed: tuple[Sequence[Any], PackTable] | None = None

    def pack(self, arrays: Sequence[Any]) -> None:
        """Enqueues the copy of the arrays into the message, on the current stream."""
        table = self.places(arrays)
        self.pack_at(table)
        self._packed = arrays, table

    def unpack(self, arrays: Sequence[Any]) -> None:
        """Enqueues the copy of the message into the arrays, on the current stream."""
        packed, self._packed = self._packed, None  # The same list as in ``pack`` needs no look-up.
        self.unpack_at(packed[1] if packed is not None and packed[0] is arrays else self.places(arrays))

    def pack_at(self, places: PackTable) -> None:
        """Enqueues the copy of the arrays of a table into the message."""
        self._packed = None
        self._move(places, False)

    def unpack_at(self, places: PackTable) -> None:
        """Enqueues the copy of the message into the arrays of a table."""
        self._move(places, True)

    def _move(self, table: PackTable, unpacks: bool) -> None:
        if table.block is not None:
            stream = self._cupy.cuda.get_current_stream()
            self._kernel.launch(table.block, self._layout.parts, self.flat.data.ptr, unpacks, stream)
            table.used(stream)

    def places(self, arrays: Sequence[Any]) -> PackTable:
        """The table of these arrays.

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
        made = self._tables[key] = PackTable(self._cupy, block)
        return made

    def _forget_oldest(self) -> None:
        evictable = [key for key, table in self._tables.items() if not table.captured]
        if len(evictable) >= _MOST_TABLES:
            oldest = self._tables.pop(evictable[0])
            oldest.finish()
            self._give_back(oldest)

    def _give_back(self, table: PackTable) -> None:
        block, table.block, table.kept = table.block, None, False
        if block is not None:
            self._kernel.give(block)

    def close(self) -> None:
        """Gives back the memory that no kernel still uses, without waiting."""
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


class PackTable:
    """The rows of certain arrays on the device, and the event of their last use.

    Attributes:
        block: The rows; None where there is nothing to move.
        captured: Whether a graph reads them.
        kept: Whether they have not been given back.
    """

    __slots__ = ("_event", "_runtime", "block", "captured", "kept")

    def __init__(self, cupy: Any, block: Block | None) -> None:
        self.block, self.captured, self.kept = block, False, True
        self._runtime, self._event = cupy.cuda.runtime, cupy.cuda.Event(disable_timing=True)

    def used(self, stream: Any) -> None:
        """Notes that a kernel on the stream reads the rows; a captured one may read them at any time."""
        if is_capturing(self._runtime, stream):
            self.captured = True
        else:
            self._event.record(stream)

    @property
    def is_idle(self) -> bool:
        """Whether no kernel reads the rows, now or in a graph that is replayed."""
        return not self.captured and bool(self._event.done)

    def finish(self) -> None:
        """Waits until no kernel reads the rows."""
        self._event.synchronize()
