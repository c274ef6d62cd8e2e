"""Few bits for each number, and one factor for each block of numbers: int8, int4 and fp8.

A block's factor maps its largest magnitude to the largest code. In memory the factors of an array (float32)
come first, then the codes: a byte for each number, or for int4 a byte for two, of which the first stands in
the first half of its block and the other at the same place of the second half.

Zero stays zero. A block that holds an infinite number or NaN decodes to NaN everywhere, so that a training
loop that looks for NaN finds it. A block of numbers up to 2e-34 becomes zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from flagcx.arguments import on_device
from flagcx.compression.codec import FixedRate, Scratch, padded
from flagcx.compression.device import StripeKernels, stripe_kernels
from flagcx.errors import ArgumentError

TINY = 2e-34
"""A block whose largest magnitude is no larger becomes zero: the inverse of its factor may exceed float32."""
_TILE = 1 << 17
"""Numbers that are coded at once: by half as many, 1 MiB takes 15% longer to code and 5 to 10% to decode."""
_LARGEST = float(np.finfo(np.float32).max)
_SAFE = 0.999 * _LARGEST

Pack = Callable[[np.ndarray, np.ndarray, Scratch], None]


@dataclass(frozen=True, slots=True)
class _Code:
    """A kind of code: its largest magnitude, codes in a byte, and the conversion in both directions.

    A row of numbers is a block. ``pack`` may overwrite the scaled numbers.
    """

    limit: float
    per_byte: int
    pack: Pack
    unpack: Pack


@dataclass(frozen=True, slots=True)
class Quantized(FixedRate):
    """Codes of a few bits with one float32 factor a block.

    Attributes:
        name: "int8", "int4", "fp8" (e4m3: 3 bits of mantissa) or "fp8_e5m2" (2 bits, more range).
        block: Numbers that share a factor: a multiple of 32, from 32 to 4096. Small blocks lose less and take
            more bytes: 4 for each factor.

    Example:
        >>> codec = Quantized("int8")
        >>> codec.decode(codec.encode(np.float32([1, -2, 127]))).tolist()
        [1.0, -2.0, 127.0]

    Source: the blocks of ZeRO++ (Wang et al. 2023, section 3.1).
    """

    name: str = "int8"
    block: int = 256

    def __post_init__(self) -> None:
        if self.name not in _CODES:
            raise ArgumentError(f"Quantized({self.name!r}) is not known; expected one of {', '.join(_CODES)}")
        if not (isinstance(self.block, int) and 32 <= self.block <= 4096 and self.block % 32 == 0):
            raise ArgumentError(f"block={self.block!r} must be a multiple of 32 from 32 to 4096")

    def wire_nbytes(self, count: int) -> int:
        return self._codes_at(count) + padded(self._bytes_of(count))

    def _codes_at(self, count: int) -> int:
        return padded(4 * -(-count // self.block))

    def _bytes_of(self, count: int) -> int:
        """Bytes of the codes: blocks have an even length, but for the last."""
        return -(-count // _CODES[self.name].per_byte)

    def kernels(self) -> StripeKernels:
        return stripe_kernels(self.name, self.block)

    def encode_into(self, x: Any, wire: Any, scratch: Scratch) -> None:
        if on_device(x):
            self.kernels().encode(x, None, wire, x.size, 0)
            return
        scales, codes = self._views(wire, x.size)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            for numbers, factors, packed in self._tiles(x, scales, codes):
                self._encode_tile(numbers, factors, packed, scratch)

    def decode_into(self, wire: Any, out: Any, scratch: Scratch, add: bool = False) -> None:
        if on_device(out):
            self.kernels().decode(wire, out, out.size, 0, add=add)
            return
        scales, codes = self._views(wire, out.size)
        unpack = _CODES[self.name].unpack
        with np.errstate(invalid="ignore", over="ignore"):
            for numbers, factors, packed in self._tiles(out, scales, codes):
                if not add:
                    unpack(packed, numbers, scratch)
                    np.multiply(numbers, factors[:, None], out=numbers)
                    continue
                wide = _rows("unpacked", numbers, scratch)
                unpack(packed, wide, scratch)
                np.multiply(wide, factors[:, None], out=wide)
                np.add(numbers, wide, out=numbers)

    def is_spoilt(self, wire: Any, count: int) -> bool | None:
        scales = self._views(wire, count)[0]
        largest = float(scales.max()) if len(scales) else 0.0  # NaN if any is
        if math.isnan(largest):
            return True
        return None if largest * _CODES[self.name].limit > _SAFE else False

    def _views(self, wire: Any, count: int) -> tuple[Any, Any]:
        blocks, at = -(-count // self.block), self._codes_at(count)
        return wire[: 4 * blocks].view(np.float32), wire[at : at + self._bytes_of(count)]

    def _tiles(self, x: np.ndarray, scales: np.ndarray, codes: np.ndarray):
        """Yields rows of whole blocks, as many as fit into the cache, and then the shorter last block."""
        whole, per_byte = x.size // self.block, _CODES[self.name].per_byte
        step = max(_TILE // self.block, 1)
        width = self.block // per_byte
        for row in range(0, whole, step):
            stop = min(row + step, whole)
            numbers = x[row * self.block : stop * self.block].reshape(-1, self.block)
            yield numbers, scales[row:stop], codes[row * width : stop * width].reshape(-1, width)
        if whole < len(scales):
            yield x[whole * self.block :][None], scales[whole:], codes[whole * width :][None]

    def _encode_tile(self, x: np.ndarray, scales: np.ndarray, codes: np.ndarray, scratch: Scratch) -> None:
        code, scaled = _CODES[self.name], _rows("scaled", x, scratch)
        np.abs(x, out=scaled)
        largest = np.maximum.reduce(scaled, axis=1, out=scratch.get("largest", len(x), np.float32, x))
        limit = np.float32(code.limit)
        inverse = np.divide(limit, largest, out=scratch.get("inverse", len(x), np.float32, x))
        np.divide(largest, limit, out=scales)
        usable = (largest > np.float32(TINY)) & (largest <= np.float32(_LARGEST))
        if not usable.all():
            inverse[~usable] = 0
            scales[~usable] = np.where(
                largest[~usable] <= np.float32(TINY), np.float32(0), np.float32(np.nan)
            )
        np.multiply(x, inverse[:, None], out=scaled)
        code.pack(scaled, codes, scratch)


def _rows(name: str, like: np.ndarray, scratch: Scratch) -> np.ndarray:
    return scratch.get(name, like.size, np.float32, like).reshape(like.shape)


def _pack_int8(scaled: np.ndarray, codes: np.ndarray, scratch: Scratch) -> None:
    np.rint(scaled, out=scaled)
    np.copyto(codes.view(np.int8), scaled, casting="unsafe")


def _unpack_int8(codes: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    np.copyto(out, codes.view(np.int8))


def _pack_int4(scaled: np.ndarray, codes: np.ndarray, scratch: Scratch) -> None:
    """low + 16 high, each with 8 added: in float32, where it costs least."""
    np.rint(scaled, out=scaled)
    half = codes.shape[1]
    low, high = scaled[:, :half], scaled[:, half:]
    low += np.float32(136)
    high *= np.float32(16)
    low[:, : high.shape[1]] += high
    np.copyto(codes, low, casting="unsafe")


def _unpack_int4(codes: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
    half = codes.shape[1]
    low, high = out[:, :half], out[:, half:]
    np.copyto(low, codes)
    above = _rows("nibbles", low, scratch)
    np.multiply(low, np.float32(1 / 16), out=above)
    np.floor(above, out=above)
    np.subtract(above[:, : high.shape[1]], np.float32(8), out=high)
    above *= np.float32(16)
    above += np.float32(8)
    low -= above


def _float8(name: str) -> tuple[Pack, Pack]:
    def pack(scaled: np.ndarray, codes: np.ndarray, scratch: Scratch) -> None:
        # The upper half of a float32, its last bit set if anything is below, rounds as the whole would.
        bits = scaled.view(np.uint32)
        low = scratch.get("low", bits.size, np.uint32, bits).reshape(bits.shape)
        np.bitwise_and(bits, np.uint32(0xFFFF), out=low)
        low += np.uint32(0xFFFF)
        low |= bits
        low >>= np.uint32(16)
        keys = scratch.get("keys", bits.size, np.uint16, bits).reshape(bits.shape)
        np.copyto(keys, low, casting="unsafe")
        np.take(_narrowing(name), keys, out=codes, mode="clip")

    def unpack(codes: np.ndarray, out: np.ndarray, scratch: Scratch) -> None:
        np.take(_widening(name), codes, out=out, mode="clip")

    return pack, unpack


@lru_cache(maxsize=2)
def _narrowing(name: str) -> np.ndarray:
    """The code of each bfloat16 number, by its bits."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    with np.errstate(all="ignore"):
        return numbers.astype(getattr(ml_dtypes, name)).view(np.uint8)


@lru_cache(maxsize=2)
def _widening(name: str) -> np.ndarray:
    """What each code stands for."""
    return np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(np.float32)


_CODES = MappingProxyType(
    {
        "int8": _Code(127.0, 1, _pack_int8, _unpack_int8),
        "int4": _Code(7.0, 2, _pack_int4, _unpack_int4),
        "fp8": _Code(448.0, 1, *_float8("float8_e4m3fn")),
        "fp8_e5m2": _Code(57344.0, 1, *_float8("float8_e5m2")),
    }
)
