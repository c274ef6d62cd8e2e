"""The codecs by name, and what is known of each before anything is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from flagcx.compression.auto import CODECS, KINDS, Auto
from flagcx.compression.codec import Codec
from flagcx.compression.feedback import Feedback, Slot
from flagcx.errors import ArgumentError

_NOMINAL = 1 << 24

_MADE: MappingProxyType[str, Callable[[], Any]] = MappingProxyType({**CODECS, "auto": Auto})

# GB/s of float32 that one core takes through an all-reduce's coding and decoding; bench/compression.py.
_HOST_GB_PER_S = MappingProxyType(
    {
        "fp16": 0.9,
        "bf16": 3.0,
        "fp8": 0.6,
        "fp8_e5m2": 0.6,
        "int8": 1.3,
        "int4": 0.8,
        "topk": 1.5,
        "randomk": 2.5,
        "powersgd": 0.9,
        "sparse": 3.0,
    }
)
_NEEDS_FEEDBACK = frozenset({"int4", "topk", "randomk", "powersgd"})


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a codec.

    Attributes:
        name: As ``compression=`` takes it.
        codec: The codec with its usual settings.
        lossless: Whether nothing is lost.
        ratio: Bytes that an all-reduce sends, over those of the dense one, for 16 Mi elements on two ranks.
        host_gb_per_s: Bytes of float32 in a second that one core of a server takes through it, typically.
        needs_feedback: Whether training suffers without error feedback.
    """

    name: str
    codec: Codec
    lossless: bool
    ratio: float
    host_gb_per_s: float
    needs_feedback: bool


def catalogue() -> dict[str, Entry]:
    """The codecs by name, less "auto", which chooses among them.

    Example:
        >>> round(catalogue()["int8"].ratio, 3)
        0.254
    """
    entries = {}
    for name, speed in _HOST_GB_PER_S.items():
        codec = _MADE[name]()
        feedback = name in _NEEDS_FEEDBACK
        entries[name] = Entry(name, codec, codec.lossless, codec.ratio(_NOMINAL), speed, feedback)
    return entries


def codec_of(compression: Any) -> Any:
    """The codec that a caller names, with its usual settings, or gives.

    Raises:
        ArgumentError: It is neither a name nor a codec.
    """
    if isinstance(compression, str):
        make = _MADE.get(compression)
        if make is not None:
            return make()
    elif isinstance(compression, (*KINDS, Auto)):
        return compression
    raise ArgumentError(
        f"compression={compression!r} is not known; expected one of {', '.join(_MADE)}, a codec such as "
        f"flagcx.compression.Quantized('int8', block=128), or a Feedback or one of its slots"
    )


def as_feedback(compression: Any) -> Feedback | None:
    """Error feedback for what a caller names, for a training loop that compresses many arrays.

    Args:
        compression: None, a name, a codec, or a ``Feedback``, which is returned as it is.

    Raises:
        ArgumentError: It is none of these.
    """
    if compression is None or isinstance(compression, Feedback):
        return compression
    if isinstance(compression, Slot):
        raise ArgumentError(
            f"compression={compression!r} remembers one array; for many, give the Feedback that it is from"
        )
    return Feedback(codec_of(compression))
