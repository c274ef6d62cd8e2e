"""What a codec is: settings, and two functions of arrays.

A codec is a frozen dataclass. It keeps nothing between calls; what must be kept is in a ``Slot`` (see
``flagcx.compression.feedback``). Codecs with a fixed rate make bytes whose number depends on the count alone,
so that their all-reduce needs no agreement on sizes; the others say how much they made.

Arrays are NumPy arrays or CuPy arrays, float32, of one dimension; what comes out is of the same kind.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Protocol

import numpy as np

from flagcx.arguments import on_device
from flagcx.errors import ArrayError
from flagcx.kernels.cuda import is_capturing

ALIGNMENT = 16
"""Bytes of a payload are padded to a multiple of this, so that payloads lie end to end and aligned."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What a codec makes of an array.

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
    """One way to say an array in fewer bytes.

    Attributes:
        name: As ``compression=`` takes it.
        lossless: Whether decoding gives the very array back.
    """

    name: Any
    lossless: Any

    def encode(self, x: Any) -> Payload:
        """Makes a payload of a float32 array."""

    def decode(self, payload: Payload, out: Any = None) -> Any:
        """Makes a float32 array of a payload: ``out``, or a new one."""

    def ratio(self, count: int, ranks: int = 2) -> float:
        """Bytes that a rank sends in an all-reduce of ``count`` elements, over those of the dense one."""


class Scratch:
    """Arrays for intermediate results, made once and used again."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, bool], Any] = {}
        self._captured: dict[int, Any] = {}

    def get(self, name: str, count: int, dtype: Any, like: Any, zeros: bool = False) -> Any:
        """An array of ``count`` elements with arbitrary content.

        Args:
            name: Which array: two with different names don't overlap.
            count: Elements.
            dtype: Element type; always the same for one name.
            like: An array of the kind wanted: NumPy's or CuPy's.
            zeros: Whether its users find zeros, and leave zeros.
        """
        key = name, on_device(like)
        array = self._arrays.get(key)
        if array is None or len(array) < count:
            make = namespace(like).zeros if zeros else namespace(like).empty
            array = self._arrays[key] = make(count, dtype)
        if key[1] and captures(array):  # A caller's graph uses it, also when a larger one takes its place.
            self._captured[id(array)] = array
        return array[:count]


class FixedRate:
    """Base of codecs whose payload has a size that follows from the count alone."""

    __slots__ = ()
    name: str
    lossless: ClassVar[bool] = False

    def wire_nbytes(self, count: int) -> int:
        """Bytes that ``count`` elements become, a multiple of ``ALIGNMENT``."""
        raise NotImplementedError

    def kernels(self) -> Any:
        """Its ``flagcx.compression.device.StripeKernels``, for arrays on a GPU; None if it has none."""
        return None

    def encode_into(self, x: Any, wire: Any, scratch: Scratch) -> None:
        """Writes the payload of ``x`` (float32) into ``wire`` (uint8, ``wire_nbytes`` long)."""
        raise NotImplementedError

    def decode_into(self, wire: Any, out: Any, scratch: Scratch, add: bool = False) -> None:
        """Writes what ``wire`` stands for into ``out`` (float32), or adds it to what is there."""
        raise NotImplementedError

    def encode(self, x: Any) -> Payload:
        """See ``Codec``."""
        flat = namespace(x).ascontiguousarray(check_floats(x)).reshape(-1)
        wire = namespace(x).empty(self.wire_nbytes(flat.size), np.uint8)
        self.encode_into(flat, wire, Scratch())
        return Payload(self.name, flat.size, (wire,))

    def decode(self, payload: Payload, out: Any = None) -> Any:
        """See ``Codec``."""
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
        """See ``Codec``."""
        return self.wire_nbytes(count) / max(4 * count, 1)


def padded(nbytes: int) -> int:
    """``nbytes``, rounded up to a multiple of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def namespace(array: Any) -> ModuleType:
    """NumPy or CuPy, by the kind of an array. Imports nothing that isn't imported."""
    return sys.modules["cupy"] if on_device(array) else np


def captures(array: Any) -> bool:
    """Whether what is done with an array of a GPU goes into a caller's graph now."""
    cuda = namespace(array).cuda
    return is_capturing(cuda.runtime, cuda.get_current_stream())


def check_floats(x: Any, what: str = "x") -> Any:
    """Checks that an array is one that codecs work on.

    Raises:
        ArrayError: It is not of float32.
    """
    if getattr(x, "dtype", None) != np.float32:
        kind = getattr(x, "dtype", type(x).__name__)
        raise ArrayError(f"{what} has dtype {kind}; codecs work on float32: convert with .astype('float32')")
    return x
