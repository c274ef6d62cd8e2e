"""What a codec is: settings, and two functions of arrays.

A codec is a frozen dataclass and keeps nothing between calls; a ``Slot`` (``flagcx.compression.slot``) does.
The payload of a codec with a fixed rate has a size that follows from the count of elements alone, so its
all-reduce needs no agreement on sizes. Other codecs exchange their sizes first.

Arrays are NumPy or CuPy arrays of float32 and one dimension; results are of the same kind.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Protocol

import numpy as np

from flagcx.arguments import is_number, on_device
from flagcx.errors import ArgumentError, ArrayError
from flagcx.kernels.cuda import is_capturing

ALIGNMENT = 16
"""Bytes of a payload are padded to a multiple of this, so that payloads lie end to end and aligned."""


@dataclass(frozen=True, slots=True)
class Payload:
    """An encoded array.

    Attributes:
        codec: Name of the codec.
        count: Elements of the array.
        parts: The arrays to send.
    """

    codec: str
    count: int
    parts: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to send."""
        return sum(part.nbytes for part in self.parts)


class Codec(Protocol):
    """Encodes float32 arrays in fewer bytes.

    Attributes:
        name: As ``compression=`` takes it.
        lossless: Whether decoding restores every bit.
    """

    name: Any
    lossless: Any

    def encode(self, x: Any) -> Payload:
        """Encodes a float32 array."""

    def decode(self, payload: Payload, out: Any = None) -> Any:
        """Decodes a payload into ``out``, or into a new float32 array."""

    def ratio(self, count: int, ranks: int = 2) -> float:
        """Bytes that a rank sends in an all-reduce of ``count`` elements, over those of the dense one."""


class Scratch:
    """Arrays for intermediate results, allocated once and used again."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, bool], Any] = {}
        self._stream: Any = None
        self._captured: dict[int, Any] = {}

    def get(self, name: str, count: int, dtype: Any, like: Any, zeros: bool = False) -> Any:
        """An array of ``count`` elements with arbitrary content.

        Args:
            name: Name of the array; arrays of different names don't overlap.
            count: Elements.
            dtype: Element type; always the same for one name.
            like: A NumPy or CuPy array: the result is of the same kind.
            zeros: Whether all its users expect zeros and leave zeros.
        """
        key = name, on_device(like)
        array = self._arrays.get(key)
        if array is None or len(array) < count:
            array = self._arrays[key] = self._make(namespace(like), count, dtype, key[1])
            if zeros:
                array.fill(0)
        if key[1] and captures(
            array
        ):  # The captured graph uses this array even after a larger one replaces it.
            self._captured[id(array)] = array
        return array[:count]

    def _make(self, xp: Any, count: int, dtype: Any, on_gpu: bool) -> Any:
        """An array; on a GPU its memory belongs to a stream on which nothing else is allocated.

        CuPy gives memory that is freed to the next array of the stream it was made on. That may be a stream
        of the caller's, while operations on another one still use the array that a larger one replaces.
        """
        if not on_gpu:
            return xp.empty(count, dtype)
        self._stream = self._stream or xp.cuda.Stream(non_blocking=True)
        with self._stream:
            return xp.empty(count, dtype)


class FixedRate:
    """Base of codecs whose payload has a size that follows from the count alone."""

    __slots__ = ()
    name: str
    lossless: ClassVar[bool] = False

    def wire_nbytes(self, count: int) -> int:
        """Bytes of ``count`` encoded elements, a multiple of ``ALIGNMENT``."""
        raise NotImplementedError

    def kernels(self) -> Any:
        """Its ``flagcx.compression.device.StripeKernels``, for arrays on a GPU."""
        raise NotImplementedError

    def encode_into(self, x: Any, wire: Any, scratch: Scratch) -> None:
        """Encodes ``x`` (float32) into ``wire`` (uint8, ``wire_nbytes`` long)."""
        raise NotImplementedError

    def decode_into(self, wire: Any, out: Any, scratch: Scratch, add: bool = False) -> None:
        """Decodes ``wire`` into ``out`` (float32), or adds the decoded numbers to it."""
        raise NotImplementedError

    def is_spoilt(self, wire: Any, count: int) -> bool | None:
        """Whether encoded elements decode to infinity or NaN anywhere; None where only decoding shows it."""
        return None

    def encode(self, x: Any) -> Payload:
        """Encodes an array (float32)."""
        flat = namespace(x).ascontiguousarray(check_floats(x)).reshape(-1)
        wire = namespace(x).empty(self.wire_nbytes(flat.size), np.uint8)
        self.encode_into(flat, wire, Scratch())
        return Payload(self.name, flat.size, (wire,))

    def decode(self, payload: Payload, out: Any = None) -> Any:
        """Decodes a payload into ``out`` (float32), or into a new array."""
        (wire,) = payload.parts
        flat = namespace(wire).empty(payload.count, np.float32)
        if out is not None and check_floats(out, "out").size != payload.count:
            raise ArrayError(f"out has {out.size} elements, and the payload stands for {payload.count}")
        self.decode_into(wire, flat, Scratch())
        if out is None:
            return flat
        out[...] = flat.reshape(out.shape)
        return out

    def ratio(self, count: int, ranks: int = 2) -> float:
        """Encoded bytes over plain ones."""
        return self.wire_nbytes(count) / max(4 * count, 1)


def padded(nbytes: int) -> int:
    """``nbytes``, rounded up to a multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def namespace(array: Any) -> ModuleType:
    """NumPy or CuPy, by the kind of an array. Imports nothing that isn't imported."""
    return sys.modules["cupy"] if on_device(array) else np


def is_finite(x: Any) -> bool:
    """Whether an array has neither an infinite number nor NaN. On a GPU the host waits for the answer."""
    xp = namespace(x)
    with np.errstate(all="ignore"):
        wide = np.float32 if x.dtype.itemsize < 4 else None
        if xp is np and np.isfinite(x.sum(dtype=wide)):  # one pass; after an overflow there is another
            return True
        return bool(xp.isfinite(x).all())


def captures(array: Any) -> bool:
    """Whether the current stream of a GPU array records a caller's graph."""
    cuda = namespace(array).cuda
    return is_capturing(cuda.runtime, cuda.get_current_stream())


def check_steps(warmup_steps: Any) -> None:
    """Raises ArgumentError where something is no number of steps."""
    if not (is_number(warmup_steps) and warmup_steps >= 0):
        raise ArgumentError(f"warmup_steps={warmup_steps!r} must be a number of steps from 0")


def check_floats(x: Any, what: str = "x") -> Any:
    """The array itself, checked to be of float32.

    Raises:
        ArrayError: It has another dtype.
    """
    if getattr(x, "dtype", None) != np.float32:
        kind = getattr(x, "dtype", type(x).__name__)
        raise ArrayError(f"{what} has dtype {kind}; codecs work on float32: convert with .astype('float32')")
    return x
