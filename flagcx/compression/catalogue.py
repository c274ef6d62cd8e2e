"""The codecs by name, with their properties and nominal speeds; and the settings of "auto"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from flagcx.compression.cast import Cast
from flagcx.compression.codec import Codec
from flagcx.compression.powersgd import PowerSGD
from flagcx.compression.quantize import Quantized
from flagcx.compression.topk import RandomK, Sparse, TopK
from flagcx.errors import ArgumentError

_KINDS = (Cast, Quantized, TopK, RandomK, PowerSGD, Sparse)
_NOMINAL_COUNT = 1 << 24
_WITHOUT_FEEDBACK = ("bf16", "int8")

# By name: the codec with its usual settings; GB/s of float32 that one core codes and decodes in an all-reduce
# (bench/compression.py); and whether training suffers without error feedback.
_TABLE: MappingProxyType[str, tuple[Callable[[], Any], float, bool]] = MappingProxyType(
    {
        "fp16": (partial(Cast, "fp16"), 0.9, False),
        "bf16": (partial(Cast, "bf16"), 3.0, False),
        "fp8": (partial(Quantized, "fp8"), 0.6, False),
        "fp8_e5m2": (partial(Quantized, "fp8_e5m2"), 0.6, False),
        "int8": (partial(Quantized, "int8"), 1.3, False),
        "int4": (partial(Quantized, "int4"), 0.8, True),
        "topk": (TopK, 1.5, True),
        "randomk": (RandomK, 2.5, True),
        "powersgd": (PowerSGD, 0.9, True),
        "sparse": (Sparse, 3.0, False),
    }
)


@dataclass(frozen=True, slots=True)
class CodecInfo:
    """The properties of a codec that are known before anything is measured.

    Attributes:
        name: As ``compression=`` takes it.
        codec: The codec with its usual settings.
        lossless: Whether decoding restores every bit.
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


def catalogue() -> dict[str, CodecInfo]:
    """The codecs by name, less "auto", which chooses among them.

    Example:
        >>> round(catalogue()["int8"].ratio, 3)
        0.254
    """
    codecs = {}
    for name, (make, speed, feedback) in _TABLE.items():
        codec = make()
        codecs[name] = CodecInfo(name, codec, codec.lossless, codec.ratio(_NOMINAL_COUNT), speed, feedback)
    return codecs


@dataclass(frozen=True, slots=True)
class Auto:
    """Compression where it pays, and none where it doesn't.

    Attributes:
        lossy: The lossy codecs that may be used: names or codecs; True for bf16 and int8, which need no
            error feedback. None by default.

    Raises:
        ArgumentError: ``lossy`` is none of these, or has a name that no codec has.

    Example:
        >>> Auto(lossy=True).allowed
        ('bf16', 'int8')
    """

    name = "auto"
    lossy: bool | Sequence[Any] = ()

    def __post_init__(self) -> None:
        if isinstance(self.lossy, (str, bytes)) or not isinstance(self.lossy, (bool, Sequence)):
            raise ArgumentError(
                f"lossy={self.lossy!r} must be True, False, or a list of codecs such as ('int8',)"
            )
        if isinstance(self.lossy, bool):
            return
        for one in self.lossy:
            if not (one in _TABLE if isinstance(one, str) else isinstance(one, _KINDS)):
                raise ArgumentError(
                    f"lossy={self.lossy!r} has {one!r}, which is no codec; expected names out of "
                    f"{', '.join(_TABLE)}, or codecs such as flagcx.compression.Quantized('int8', block=128)"
                )
        object.__setattr__(self, "lossy", tuple(self.lossy))

    @property
    def allowed(self) -> tuple[Any, ...]:
        """The lossy codecs that may be chosen."""
        if isinstance(self.lossy, bool):
            return _WITHOUT_FEEDBACK if self.lossy else ()
        return tuple(self.lossy)

    @property
    def lossless(self) -> bool:
        """Whether no lossy codec may be chosen."""
        return not self.allowed


def codec_of(compression: Any) -> Any:
    """The codec that a caller gives, or names: then with its usual settings.

    Raises:
        ArgumentError: It is neither a name nor a codec.
    """
    if isinstance(compression, (*_KINDS, Auto)):
        return compression
    if isinstance(compression, str) and compression in (*_TABLE, Auto.name):
        return Auto() if compression == Auto.name else _TABLE[compression][0]()
    raise ArgumentError(
        f"compression={compression!r} is not known; expected one of {', '.join(_TABLE)}, auto, a codec "
        f"such as flagcx.compression.Quantized('int8', block=128), or a Feedback or one of its slots"
    )
