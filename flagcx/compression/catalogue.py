"""The codecs by name, with their properties and nominal speeds; and the settings of "auto"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from flagcx.compression.cast import Cast
from flagcx.compression.codec import Codec, FixedRate
from flagcx.compression.powersgd import PowerSGD
from flagcx.compression.quantize import Quantized
from flagcx.compression.topk import RandomK, Sparse, TopK
from flagcx.errors import ArgumentError

_KINDS = (Cast, Quantized, TopK, RandomK, PowerSGD, Sparse)
_NOMINAL_COUNT = 1 << 24
_WITHOUT_FEEDBACK = ("bf16", "int8")

# By name: the codec with its usual settings; whether training suffers without error feedback; GB/s of float32
# that one core of a server codes and decodes in an all-reduce; and the time on a GPU in passes over its
# memory, both with feedback where it is needed (bench/compression.py). Three kernels took 82 us for 64 MiB on
# an H200, 5.9 passes; feedback reads and writes the array once more. Codecs without kernels of their own are
# a dozen of CuPy's or more: their passes are counted, not measured.
_TABLE: MappingProxyType[str, tuple[Callable[[], Any], bool, float, float]] = MappingProxyType(
    {
        "fp16": (partial(Cast, "fp16"), False, 0.75, 5.9),
        "bf16": (partial(Cast, "bf16"), False, 3.5, 5.9),
        "fp8": (partial(Quantized, "fp8"), False, 0.8, 5.9),
        "fp8_e5m2": (partial(Quantized, "fp8_e5m2"), False, 0.8, 5.9),
        "int8": (partial(Quantized, "int8"), False, 1.6, 5.9),
        "int4": (partial(Quantized, "int4"), True, 0.75, 8.6),
        "topk": (TopK, True, 0.7, 14.0),
        "randomk": (RandomK, True, 8.0, 7.0),
        "powersgd": (PowerSGD, True, 0.75, 33.0),
        "sparse": (Sparse, False, 2.7, 8.0),
    }
)
_DEVICE_LOOKS_US = 2000.0  # 64 MiB took 1.8 to 3.5 ms longer than its passes on an H200


@dataclass(frozen=True, slots=True)
class CodecInfo:
    """The properties of a codec that are known before anything is measured.

    Attributes:
        name: As ``compression=`` takes it.
        codec: The codec with its usual settings.
        lossless: Whether decoding restores every bit.
        ratio: Bytes that an all-reduce sends, over those of the dense one, for 16 Mi elements on two ranks.
        host_gb_per_s: Bytes of float32 in a second that one core of a server takes through it, typically.
        needs_feedback: Whether training suffers without error feedback; speeds are with it then.
        device_passes: Its time on a GPU, in passes of the plain array over the GPU's memory.
        device_call_us: Time of a call on a GPU besides: where the host looks at the data in between.
        steady: Whether trainings come with it as far as dense ones do, at the same step size.
    """

    name: str
    codec: Codec
    lossless: bool
    ratio: float
    host_gb_per_s: float
    needs_feedback: bool
    device_passes: float
    device_call_us: float
    steady: bool

    def device_gb_per_s(self, memory_gb_per_s: float) -> float:
        """Bytes of float32 in a second that a GPU takes through it, by the bandwidth of its memory."""
        return memory_gb_per_s / self.device_passes


def is_steady(codec: Any) -> bool:
    """Whether a codec may replace the dense all-reduce of a training that keeps its step size.

    Random-k may not: with feedback, an element arrives as the sum of many steps at once.
    """
    return not isinstance(codec, RandomK)


def catalogue() -> dict[str, CodecInfo]:
    """The codecs by name, less "auto", which chooses among them.

    Example:
        >>> round(catalogue()["int8"].ratio, 3)
        0.254
    """
    codecs = {}
    for name, (make, feedback, speed, passes) in _TABLE.items():
        codec = make()
        looks_us = 0.0 if isinstance(codec, FixedRate) else _DEVICE_LOOKS_US
        facts = codec.lossless, codec.ratio(_NOMINAL_COUNT), speed, feedback, passes, looks_us
        codecs[name] = CodecInfo(name, codec, *facts, is_steady(codec))
    return codecs


@dataclass(frozen=True, slots=True)
class Auto:
    """Compression where it pays, and none where it doesn't.

    Attributes:
        lossy: The lossy codecs that may be used: names or codecs; True for bf16 and int8, which need no
            error feedback. None by default. Random-k is never used, since trainings diverge with it at the
            step size that they have: name it itself, and take a smaller one.

    Raises:
        ArgumentError: ``lossy`` is none of these, has a name that no codec has, or two codecs of one name.

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
        names = [one if isinstance(one, str) else one.name for one in self.lossy]
        if len(set(names)) < len(names):
            raise ArgumentError(f"lossy={self.lossy!r} has two codecs of one name; give one of them")
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
