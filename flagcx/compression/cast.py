"""Fewer bits for each number: float16 and bfloat16. Two bytes in place of four."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from flagcx.arguments import on_device
from flagcx.compression.codec import FixedRate, Scratch, padded
from flagcx.compression.device import StripeKernels, stripe_kernels
from flagcx.errors import ArgumentError

_DTYPES = MappingProxyType({"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)})
_TILE = 1 << 16
_BLOCK = 512  # numbers of a warp
_MAGNITUDE, _INFINITY = np.uint16(0x7FFF), MappingProxyType({"fp16": 0x7C00, "bf16": 0x7F80})  # as bits


@dataclass(frozen=True, slots=True)
class Cast(FixedRate):
    """Rounds each number to float16 ("fp16") or bfloat16 ("bf16"), to the nearest, ties to even.

    float16 keeps 11 bits of a number up to 65504, beyond which it becomes infinite; bfloat16 keeps 8 bits,
    and the range of float32.

    Attributes:
        name: "fp16" or "bf16".

    Example:
        >>> codec = Cast("bf16")
        >>> codec.decode(codec.encode(np.float32([1, 2.001]))).tolist()
        [1.0, 2.0]
    """

    name: str = "fp16"

    def __post_init__(self) -> None:
        if self.name not in _DTYPES:
            raise ArgumentError(f"Cast({self.name!r}) is not known; expected one of {', '.join(_DTYPES)}")

    def wire_nbytes(self, count: int) -> int:
        return padded(2 * count)

    def kernels(self) -> StripeKernels:
        return stripe_kernels(self.name, _BLOCK)

    def encode_into(self, x: Any, wire: Any, scratch: Scratch) -> None:
        if on_device(x):
            self.kernels().encode(x, None, wire, x.size, 0)
            return
        with np.errstate(over="ignore"):
            np.copyto(self._numbers(wire, x.size), x, casting="unsafe")

    def decode_into(self, wire: Any, out: Any, scratch: Scratch, add: bool = False) -> None:
        if on_device(out):
            self.kernels().decode(wire, out, out.size, 0, add=add)
            return
        numbers = self._numbers(wire, out.size)
        if not add:
            np.copyto(out, numbers)
            return
        for start in range(0, out.size, _TILE):
            tile = out[start : start + _TILE]
            wide = scratch.get("tile", tile.size, np.float32, out)
            np.copyto(wide, numbers[start : start + _TILE])
            with np.errstate(invalid="ignore"):  # infinity less infinity is NaN, for a loop that looks for it
                np.add(tile, wide, out=tile)

    def is_spoilt(self, wire: Any, count: int) -> bool:
        bits, least = wire[: 2 * count].view(np.uint16), _INFINITY[self.name]
        tiles = (bits[start : start + _TILE] for start in range(0, count, _TILE))
        return any(int((tile & _MAGNITUDE).max()) >= least for tile in tiles)

    def _numbers(self, wire: np.ndarray, count: int) -> np.ndarray:
        return wire[: 2 * count].view(_DTYPES[self.name])
