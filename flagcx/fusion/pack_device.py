"""Packs CuPy arrays, in pooled memory of the GPU, for fused messages and buckets of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from flagcx.errors import ResourceError
from flagcx.fusion.fuse import Shapes
from flagcx.fusion.limits import Limits
from flagcx.kernels.cuda import PER_THREAD, is_capturing, load_cupy
from flagcx.kernels.pack import ALIGNMENT, DevicePacking, PackKernel, PackLayout, PackTable
from flagcx.memory import DEVICE, PINNED, Pool

_LEAST_PINNED_NBYTES = 1 << 20


def device_pool(cupy: Any) -> Pool:
    """A pool of memory of the current GPU."""
    return Pool(DEVICE, lambda nbytes: (cupy.cuda.alloc(nbytes), nbytes))


def pinned_pool(cupy: Any) -> Pool:
    """A pool of pinned memory of the host."""
    allocate = cupy.cuda.alloc_pinned_memory
    return Pool(PINNED, lambda nbytes: (allocate(nbytes), nbytes), _LEAST_PINNED_NBYTES)


class DevicePacker:
    """Packs CuPy arrays of one device.

    Args:
        device: Number of the device.
        cupy: The CuPy module, imported if None.
        empty: Makes an array that the peers reach without a copy, on all ranks together: ``empty(count,
            dtype)``. Messages of their own lie there; in memory of the pool if None.
    """

    limits = Limits(4 << 20, 64 << 20)
    lasting = True

    def __init__(
        self, device: int, cupy: Any = None, empty: Callable[[int, np.dtype], Any] | None = None
    ) -> None:
        self._cupy = cupy = load_cupy() if cupy is None else cupy
        self.memory, self._pinned = device_pool(cupy), pinned_pool(cupy)
        self._kernel = PackKernel(cupy, device, self.memory, self._pinned)
        self._empty, self._shared = empty, None
        self._turn = _Turn(cupy)

    def packing(self, shapes: Shapes, dtype: np.dtype, own: bool = False) -> DevicePacking:
        """A packing of arrays of these shapes; see ``flagcx.fusion.fuse.Packer``."""
        layout = PackLayout([prod(shape) * dtype.itemsize for shape in shapes])
        if own:
            return self._reached(layout, dtype) or self._own(layout, dtype)
        if layout.nbytes > self.limits.message_nbytes:  # by what rounding up adds to very small arrays
            return self._own(layout, dtype)
        if self._shared is None:
            self._shared = self._zeros(self.limits.message_nbytes)
        flat = self._view(self._shared, layout, dtype)
        return _Shared(self._cupy, self._kernel, flat, layout, self._turn)

    def memory_of(self, arrays: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where each array begins, and its bytes."""
        return tuple([array.data.ptr for array in arrays]), tuple([array.nbytes for array in arrays])

    def current_stream(self) -> Any:
        """The stream on which packings are enqueued now."""
        return self._cupy.cuda.get_current_stream()

    def _reached(self, layout: PackLayout, dtype: np.dtype) -> DevicePacking | None:
        """A packing into memory that peers reach; None where there is none left, on any rank."""
        if self._empty is None:
            return None
        try:
            flat = self._empty(layout.nbytes // dtype.itemsize, dtype)
        except ResourceError:
            return None
        self._clear(flat.data.ptr, layout.nbytes)
        return DevicePacking(self._cupy, self._kernel, flat, layout)

    def _own(self, layout: PackLayout, dtype: np.dtype) -> DevicePacking:
        block = self._zeros(layout.nbytes)
        give: Callable[[], object] = lambda: self.memory.give(block)  # noqa: E731
        return DevicePacking(self._cupy, self._kernel, self._view(block, layout, dtype), layout, give)

    def _zeros(self, nbytes: int) -> Any:
        """Memory of zeros, since the gaps between arrays are reduced along with these."""
        block = self.memory.take(max(nbytes, ALIGNMENT))
        self._clear(block.memory.ptr + block.offset, max(nbytes, ALIGNMENT))
        return block

    def _clear(self, at: int, nbytes: int) -> None:
        self._cupy.cuda.runtime.memset(at, 0, nbytes)
        self._cupy.cuda.Device().synchronize()

    def _view(self, block: Any, layout: PackLayout, dtype: np.dtype) -> Any:
        count = layout.nbytes // dtype.itemsize
        return self._cupy.ndarray((count,), dtype, block.memory + block.offset)

    def close(self) -> None:
        """Gives all memory back, once no enqueued work uses it."""
        self._shared = None
        self.memory.close()
        self._pinned.close()


class _Turn:
    """Whose turn it is with the shared message: a stream waits for the one that used it before."""

    def __init__(self, cupy: Any) -> None:
        self._cupy, self._event = cupy, cupy.cuda.Event(disable_timing=True)
        self._last: Any = None

    def take(self) -> None:
        """Makes the current stream wait for the stream that had the message before."""
        stream = self._cupy.cuda.get_current_stream()
        same = self._last is None or (self._last.ptr == stream.ptr != PER_THREAD)
        if not same and not self._captures(stream):
            stream.wait_event(self._event)

    def give(self) -> None:
        """Ends what ``take`` began."""
        stream = self._cupy.cuda.get_current_stream()
        if not self._captures(stream):
            self._event.record(stream)
            self._last = stream  # as long as it lives, no other stream has its handle

    def _captures(self, stream: Any) -> bool:
        return is_capturing(self._cupy.cuda.runtime, stream)


class _Shared(DevicePacking):
    """A packing into the message that packings share."""

    def __init__(self, cupy: Any, kernel: PackKernel, flat: Any, layout: PackLayout, turn: _Turn) -> None:
        super().__init__(cupy, kernel, flat, layout)
        self._turn = turn

    def pack_at(self, places: PackTable) -> None:
        """Copies the arrays into the message, when it is this stream's turn."""
        self._turn.take()
        super().pack_at(places)

    def unpack_at(self, places: PackTable) -> None:
        """Copies the message into the arrays, and gives the turn away."""
        super().unpack_at(places)
        self._turn.give()
