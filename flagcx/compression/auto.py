"""Whether compression pays, and which: by the link's speed, the codecs' speed, and how dense a gradient is.

On a fast link coding takes longer than sending plainly, and the answer is no. Nothing lossy is chosen unless
it was allowed by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np

from flagcx.arguments import format_nbytes
from flagcx.compression.cast import Cast
from flagcx.compression.codec import Scratch, namespace
from flagcx.compression.feedback import Slot
from flagcx.compression.peers import Peers
from flagcx.compression.powersgd import PowerSGD
from flagcx.compression.quantize import Quantized
from flagcx.compression.select import density_of
from flagcx.compression.topk import RandomK, Sparse, TopK
from flagcx.errors import ArgumentError
from flagcx.kernels.cuda import import_cupy

DENSE = "dense"
KINDS = (Cast, Quantized, TopK, RandomK, PowerSGD, Sparse)
"""The classes of codecs."""
CODECS: MappingProxyType[str, Callable[[], Any]] = MappingProxyType(
    {
        "fp16": lambda: Cast("fp16"),
        "bf16": lambda: Cast("bf16"),
        "fp8": lambda: Quantized("fp8"),
        "fp8_e5m2": lambda: Quantized("fp8_e5m2"),
        "int8": lambda: Quantized("int8"),
        "int4": lambda: Quantized("int4"),
        "topk": TopK,
        "randomk": RandomK,
        "powersgd": PowerSGD,
        "sparse": Sparse,
    }
)
"""By name, what makes each codec that may be chosen, with its usual settings."""
_log = logging.getLogger("flagcx.compression")
_GAIN = 0.9  # a codec must be so much faster than its rival before it is worth it
_SCAN_GB_PER_S = 6.0
_SPARSE_STEPS = 8
_SAMPLE_COUNT = 1 << 18
_WORTH_LOOKING = 20  # times the latency that a dense all-reduce must take before densities are compared
_WITHOUT_FEEDBACK = ("bf16", "int8")


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """What a decision stands on; the same on every rank.

    Attributes:
        ranks: Number of ranks.
        bandwidth_gb_per_s: What a rank sends in each direction, in 10^9 bytes per second.
        latency_us: Time of a step of an all-reduce with hardly any data.
        busy: Share of the sending time in which a core is at work, from 0 to 1.
        crowd: Ranks that share a core, 1 or more.
        known: Whether the link's speed was told; else it was measured.
    """

    ranks: int
    bandwidth_gb_per_s: float
    latency_us: float
    busy: float = 0.0
    crowd: float = 1.0
    known: bool = False


@dataclass(frozen=True, slots=True)
class Auto:
    """Compression where it pays, and none where it doesn't.

    Attributes:
        lossy: Codecs that may be used though they lose something: names or codecs; True for bf16 and int8,
            which need no error feedback. Nothing lossy by default.

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
            if not (one in CODECS if isinstance(one, str) else isinstance(one, KINDS)):
                raise ArgumentError(
                    f"lossy={self.lossy!r} has {one!r}, which is no codec; expected names out of "
                    f"{', '.join(CODECS)}, or codecs such as flagcx.compression.Quantized('int8', block=128)"
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
        """Whether nothing can be lost."""
        return not self.allowed


@dataclass(frozen=True, slots=True)
class Decision:
    """What "auto" does with arrays of one length, and why.

    Attributes:
        chosen: Name of the codec; "dense" for none.
        reason: Why, in a sentence.
        predicted_us: Time of each candidate, in us.
        sparse_below: Density under which an array goes as a sparse one, losslessly; 0 for never.
    """

    chosen: str
    reason: str
    predicted_us: Mapping[str, float] = field(default_factory=dict)
    sparse_below: float = 0.0

    def __str__(self) -> str:
        return self.reason


def decide(
    count: int,
    link: LinkProfile,
    codecs: Mapping[str, Any],
    speeds_gb_per_s: Mapping[str, float],
    itemsize: int = 4,
) -> Decision:
    """Chooses a codec by the model.

    Args:
        count: Elements.
        link: The link and the ranks.
        codecs: The lossy codecs that are allowed, by name.
        speeds_gb_per_s: For each of them, the bytes of float32 in a second that a core codes and decodes.
        itemsize: Bytes of an element.

    Example:
        >>> slow = LinkProfile(ranks=4, bandwidth_gb_per_s=0.0125, latency_us=100)
        >>> decide(1 << 24, slow, {}, {}).chosen
        'dense'
    """
    nbytes = itemsize * count
    dense = dense_us(nbytes, link)
    times = {DENSE: dense}
    for name, codec in codecs.items():
        times[name] = coded_us(nbytes, link, codec.ratio(count, link.ranks), speeds_gb_per_s[name])
    best = min(times, key=lambda name: (times[name], name))
    chosen = best if times[best] < _GAIN * dense else DENSE
    below = _sparse_below(nbytes, link, times[chosen])
    return Decision(chosen, _reason(chosen, times, link, nbytes, codecs, below), times, below)


def dense_us(nbytes: int, link: LinkProfile) -> float:
    """Predicted time of the dense all-reduce, in us."""
    n = link.ranks
    if n == 1:
        return 0.0
    return 2 * link.latency_us + 2 * (n - 1) / n * nbytes / link.bandwidth_gb_per_s / 1e3


def coded_us(nbytes: int, link: LinkProfile, ratio: float, speed_gb_per_s: float) -> float:
    """Predicted time of a compressed all-reduce, in us: coding goes on while the link sends by itself."""
    n = link.ranks
    sending = 2 * (n - 1) / n * nbytes * ratio / link.bandwidth_gb_per_s / 1e3
    coding = nbytes / speed_gb_per_s / 1e3 * link.crowd
    return 4 * link.latency_us + max(sending, coding) + link.busy * min(sending, coding)


def _sparse_below(nbytes: int, link: LinkProfile, rival_us: float) -> float:
    """The density at which a sparse all-reduce takes as long as its rival: both are linear in it."""
    n = link.ranks
    if n == 1:
        return 0.0
    fixed = _SPARSE_STEPS * link.latency_us + nbytes / _SCAN_GB_PER_S / 1e3 * link.crowd
    # Two words for each element that isn't zero, to its owner; and at worst those of all ranks back.
    full = 2 * (1 + n) * (n - 1) / n * nbytes / link.bandwidth_gb_per_s / 1e3
    gather_us = nbytes / 1e3 * link.crowd  # placing elements one by one: about 1 GB/s
    below = (_GAIN * rival_us - fixed) / (full + gather_us)
    looks = rival_us >= _WORTH_LOOKING * link.latency_us
    return min(below, 0.5) if looks and below > 1e-3 else 0.0


def _reason(
    chosen: str,
    times: Mapping[str, float],
    link: LinkProfile,
    nbytes: int,
    codecs: Mapping[str, Any],
    below: float,
) -> str:
    since = f"the link {'has' if link.known else 'was measured at'} {link.bandwidth_gb_per_s:.3g} GB/s"
    head = f"{format_nbytes(nbytes)} over {link.ranks} rank{'s' * (link.ranks > 1)}: "
    said = ", ".join(
        f"{name} {time / 1e3:.4g} ms" for name, time in sorted(times.items(), key=lambda t: t[1])
    )
    sparse = (
        f"; arrays with under {below:.1%} of elements that aren't zero go as sparse ones" if below else ""
    )
    if link.ranks == 1:
        return head + "there is nothing to send"
    if chosen != DENSE:
        return f"{head}{chosen}, since {since}: {said}{sparse}"
    if not codecs:
        return f"{head}no lossy codec, since none is allowed (Auto(lossy=...)), and {since}: {said}{sparse}"
    return f"{head}no codec, since {since}, and coding takes longer than it saves: {said}{sparse}"


@lru_cache(maxsize=32)
def measure_speed(codec: Any, device: bool = False) -> float:
    """Codes and decodes an array, and tells the bytes of float32 that went through in a second, in GB/s.

    Args:
        codec: The codec.
        device: Whether on the current GPU.
    """
    x: Any = np.random.default_rng(0).standard_normal(_SAMPLE_COUNT, np.float32)
    if codec.lossless:
        x[np.arange(_SAMPLE_COUNT) % 100 > 0] = 0  # what it is for
    best, finish = float("inf"), _nothing
    if device:
        cupy = import_cupy()
        x, finish = cupy.asarray(x), cupy.cuda.get_current_stream().synchronize
    if hasattr(codec, "encode_into"):
        xp = namespace(x)
        scratch, out = Scratch(), xp.empty_like(x)
        wire = xp.zeros(codec.wire_nbytes(x.size), np.uint8)

        def once() -> None:
            codec.encode_into(x, wire, scratch)
            codec.decode_into(wire, out, scratch, add=True)
            codec.decode_into(wire, out, scratch)
    else:

        def once() -> None:
            codec.decode(codec.encode(x))

    for _ in range(4):
        start = perf_counter()
        once()
        finish()
        best = min(best, perf_counter() - start)
    return x.nbytes / best / 1e9


def _nothing() -> None:
    """On the host all is done when a call returns."""


class AutoReduce:
    """An all-reduce that compresses where it pays.

    Args:
        peers: The ranks.
        codecs: The lossy codecs that are allowed, by name.
        link: Tells the link; asked at the first call, by all ranks together.
        speed: ``speed(codec)``: GB/s of float32 that it codes and decodes here.
        make: ``make(codec)``: the plan of a codec over the same slot.
        slot: Memory between calls.
        factor: What the sum is multiplied by.
        count: Elements.
    """

    def __init__(
        self,
        peers: Peers,
        codecs: Mapping[str, Any],
        link: Callable[[], LinkProfile],
        speed: Callable[[Any], float],
        make: Callable[[Any], Any],
        slot: Slot,
        factor: float,
        count: int,
    ) -> None:
        self._peers, self._codecs, self._link, self._make = peers, codecs, link, make
        self._speed = speed
        self._slot, self._factor, self._count = slot, factor, count
        self._plans: dict[str, Any] = {}
        self.decision: Decision | None = None

    def settle(self, itemsize: int = 4) -> Decision:
        """Decides, once; all ranks must call it."""
        if self.decision is None:
            link = self._link()
            own = [int(1e6 * self._speed(codec)) for codec in self._codecs.values()]
            speeds = self._peers.numbers(own).min(axis=0) / 1e6 if own else []
            by_name = dict(zip(self._codecs, (float(s) for s in speeds), strict=True))
            self.decision = decide(self._count, link, self._codecs, by_name, itemsize)
            if self._peers.rank == 0:
                _log.info("compression='auto': %s", self.decision.reason)
        return self.decision

    def run(self, given: Any, result: Any) -> None:
        """See ``transport.base.Plan``; the arrays have one dimension."""
        decision = self.settle(given.dtype.itemsize)
        chosen = decision.chosen
        residual = self._slot.residual
        if decision.sparse_below and residual is None:
            own = density_of(given, self._slot.step)
            if self._peers.numbers([int(1e6 * own)]).max() < 1e6 * decision.sparse_below:
                chosen = Sparse.name
        if chosen == DENSE:
            self._run_dense(given, result)
            return
        plan = self._plans.get(chosen)
        if plan is None:
            codec = Sparse() if chosen == Sparse.name else self._codecs[chosen]
            plan = self._plans[chosen] = self._make(codec)
        plan.run(given, result)

    def _run_dense(self, given: Any, result: Any) -> None:
        source = self._slot.source(given, self._peers.scratch, self._peers.size)
        if self._slot.residual is not None:
            self._slot.residual += source
            source = self._slot.residual
        self._peers.allreduce(source, result)
        if self._slot.residual is not None:
            self._slot.residual[...] = 0
        if self._factor != 1:
            result *= result.dtype.type(self._factor)
