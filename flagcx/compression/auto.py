"""Whether compression pays, and which: by the link's speed, the codecs' speed, and how dense a gradient is.

A codec's speed is that of the device that does the work, with error feedback where there is some.

On a fast link coding takes longer than sending plain numbers, and the answer is no. A lossy codec is chosen
only if the caller allows it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flagcx.arguments import format_nbytes
from flagcx.compression.catalogue import Auto, is_steady
from flagcx.compression.peers import CodecReduce, Peers
from flagcx.compression.select import density_of
from flagcx.compression.slot import Slot
from flagcx.compression.topk import Sparse
from flagcx.dtypes import ReduceOp
from flagcx.errors import ArgumentError
from flagcx.report import Report

DENSE = "dense"
SPARSE_STEPS = 8
"""Steps of a sparse all-reduce."""
ELEMENT_WORDS = 1.5
"""Words of a sparse all-reduce for an element: its number, and the gap to the one before in half of one."""
_log = logging.getLogger("flagcx.compression")
_GAIN = 0.9  # a codec's time must be below this share of its rival's
_SCAN_GB_PER_S = 6.0
_WORTH_SAMPLING = 20  # latencies that a dense all-reduce must take before the density is sampled


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """The link and the cores on which a decision is based; the same on every rank.

    Attributes:
        ranks: Number of ranks.
        bandwidth_gb_per_s: Bandwidth of a rank in each direction, in 10^9 bytes per second.
        latency_us: Time of a step of an all-reduce with hardly any data.
        busy: Share of the sending time in which a core is at work, from 0 to 1.
        crowd: Ranks that share a core, 1 or more.
        known: Whether the link's speed is a setting; else it was measured.
    """

    ranks: int
    bandwidth_gb_per_s: float
    latency_us: float
    busy: float = 0.0
    crowd: float = 1.0
    known: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Decision:
    """The choice of "auto" for arrays of one length, with the reason.

    Attributes:
        chosen: Name of the codec; "dense" for none.
        reason: The reason, in a sentence.
        predicted_us: Time of each candidate, in us.
        sparse_below: Density below which an array is sent as a sparse one, losslessly; 0 for never.
        sent_nbytes: Bytes that a rank sends with each candidate; those of sparse arrays depend on the data.
    """

    chosen: str
    reason: str
    predicted_us: Mapping[str, float] = field(default_factory=dict)
    sparse_below: float = 0.0
    sent_nbytes: Mapping[str, int] = field(default_factory=dict)

    def report(self) -> Report:
        """The candidates as a table, the fastest first."""
        rows = [
            (name, f"{time_us:,.0f}", f"{self.sent_nbytes[name]:,}" if name in self.sent_nbytes else "")
            for name, time_us in sorted(self.predicted_us.items(), key=lambda pair: pair[1])
        ]
        bold = [place for place, row in enumerate(rows) if row[0] == self.chosen]
        columns = ("codec", "predicted us", "bytes a rank sends")
        return Report(f"compression: {self.chosen}", columns, rows, (0,), (self.reason,), bold)

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def __str__(self) -> str:
        return self.reason

    __repr__ = __str__


def decide(
    count: int,
    link: LinkProfile,
    codecs: Mapping[str, Any],
    speeds_gb_per_s: Mapping[str, float],
    itemsize: int = 4,
) -> Decision:
    """Chooses the codec with the least predicted time; of equally fast ones that which sends least.

    A codec with which trainings diverge at the step size that they have is left out (``is_steady``).

    Args:
        count: Elements.
        link: The link between the ranks.
        codecs: The lossy codecs that are allowed, by name.
        speeds_gb_per_s: For each of them, the bytes of float32 in a second that the device where the arrays
            are codes and decodes, with error feedback if there is any.
        itemsize: Bytes of an element.

    Example:
        >>> slow = LinkProfile(ranks=4, bandwidth_gb_per_s=0.0125, latency_us=100)
        >>> decide(1 << 24, slow, {}, {}).chosen
        'dense'
    """
    n = link.ranks
    times, sent = {DENSE: dense_us(itemsize * count, link)}, {DENSE: dense_nbytes(itemsize * count, n)}
    steady = {name: codec for name, codec in codecs.items() if is_steady(codec)}
    for name, codec in steady.items():  # which code float32, whatever the array has
        ratio = codec.ratio(count, n)
        times[name] = coded_us(4 * count, link, ratio, speeds_gb_per_s[name])
        sent[name] = round(ratio * dense_nbytes(4 * count, n))
    best = min(times, key=lambda name: (times[name], sent[name], name))
    chosen = best if times[best] < _GAIN * times[DENSE] else DENSE
    below = _sparse_below(itemsize * count, link, times[chosen])
    reason = _reason(chosen, times, link, itemsize * count, steady, below)
    if n > 1:
        reason += f"; {_sends(sent[chosen], sent[DENSE])}"
    for name in sorted(codecs.keys() - steady.keys()):
        reason += f"; {name} is left out, since trainings diverge with it at the step size of dense gradients"
    return Decision(chosen, reason, times, below, sent)


def named(codec: Any, count: int, ranks: int, itemsize: int, last_nbytes: int = 0) -> Decision:
    """The decision of a caller who names a codec.

    Args:
        codec: The codec.
        count: Elements.
        ranks: Number of ranks.
        itemsize: Bytes of an element.
        last_nbytes: Bytes that this rank sent in the last call, if there was one.
    """
    dense = dense_nbytes(itemsize * count, ranks)
    wide = itemsize if codec.lossless else 4
    nbytes = round(codec.ratio(count, ranks) * dense_nbytes(wide * count, ranks))
    reason = f"{codec.name}: named by the caller; {'at most, ' * codec.lossless}{_sends(nbytes, dense)}"
    if last_nbytes:
        reason += f"; in the last call it sent {format_nbytes(last_nbytes)}"
    return Decision(codec.name, reason, sent_nbytes={DENSE: dense, codec.name: nbytes})


def _sends(nbytes: int, dense: int) -> str:
    share = "" if nbytes == dense else f", {nbytes / max(dense, 1):.1%} of the dense {format_nbytes(dense)}"
    return f"a rank sends {format_nbytes(nbytes)}{share}"


def dense_nbytes(nbytes: int, ranks: int) -> int:
    """Bytes that a rank sends in the dense all-reduce of a message."""
    return 2 * (ranks - 1) * nbytes // ranks


def dense_us(nbytes: int, link: LinkProfile) -> float:
    """Predicted time of the dense all-reduce, in us."""
    n = link.ranks
    if n == 1:
        return 0.0
    return 2 * link.latency_us + 2 * (n - 1) / n * nbytes / link.bandwidth_gb_per_s / 1e3


def coded_us(nbytes: int, link: LinkProfile, ratio: float, speed_gb_per_s: float) -> float:
    """Predicted time of a compressed all-reduce, in us: coding overlaps with sending where no core sends."""
    n = link.ranks
    sending = 2 * (n - 1) / n * nbytes * ratio / link.bandwidth_gb_per_s / 1e3
    coding = nbytes / speed_gb_per_s / 1e3 * link.crowd
    return 4 * link.latency_us + max(sending, coding) + link.busy * min(sending, coding)


def _sparse_below(nbytes: int, link: LinkProfile, rival_us: float) -> float:
    """The density at which a sparse all-reduce takes as long as its rival: both are linear in it."""
    n = link.ranks
    if n == 1 or not nbytes:
        return 0.0
    fixed = SPARSE_STEPS * link.latency_us + nbytes / _SCAN_GB_PER_S / 1e3 * link.crowd
    # Each element that isn't zero to its owner; and at worst those of all ranks back.
    full = ELEMENT_WORDS * (1 + n) * (n - 1) / n * nbytes / link.bandwidth_gb_per_s / 1e3
    gather_us = nbytes / 1e3 * link.crowd  # placing elements one by one: about 1 GB/s
    below = (_GAIN * rival_us - fixed) / (full + gather_us)
    looks = rival_us >= _WORTH_SAMPLING * link.latency_us
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


class AutoReduce(CodecReduce[Auto]):
    """An all-reduce that compresses where it pays.

    Args:
        peers, codec, count, op, slot: As ``CodecReduce`` takes them.
        codecs: The lossy codecs that are allowed, by name.
        link: Measures the link; called at the first run, by all ranks together.
        speed: ``speed(codec)``: GB/s of float32 that a core or the GPU here codes and decodes.
        make: ``make(codec)``: the all-reduce of a codec over the same slot.
    """

    def __init__(
        self,
        peers: Peers,
        codec: Auto,
        count: int,
        op: ReduceOp,
        slot: Slot,
        codecs: Mapping[str, Any],
        link: Callable[[], LinkProfile],
        speed: Callable[[Any], float],
        make: Callable[[Any], CodecReduce],
    ) -> None:
        super().__init__(peers, codec, count, op, slot)
        self._codecs, self._link, self._speed, self._make = codecs, link, speed, make
        self._reduces: dict[str, CodecReduce] = {}
        self.decision: Decision | None = None

    def settle(self, itemsize: int = 4) -> Decision:
        """Decides, once, or anew as a checkpoint says that was loaded since; all ranks must call it.

        Raises:
            ArgumentError: The checkpoint's choice is none.
        """
        memory = self._slot.memory
        if "loaded" in memory:
            chosen, below = memory.pop("loaded")
            known = DENSE, Sparse.name, *self._codecs
            if chosen not in known:
                raise ArgumentError(
                    f"the slot {self._slot.key!r} has loaded the choice {chosen!r}; expected one of "
                    f"{', '.join(known)}"
                )
            self.decision = Decision(chosen, f"{chosen}: as in the checkpoint", sparse_below=below)
        if self.decision is None:
            link = self._link()
            own = [int(1e6 * self._speed(codec)) for codec in self._codecs.values()]
            speeds = self._peers.numbers(own).min(axis=0) / 1e6 if own else []
            by_name = dict(zip(self._codecs, (float(s) for s in speeds), strict=True))
            self.decision = decide(self._count, link, self._codecs, by_name, itemsize)
            if self._peers.rank == 0:
                _log.info("compression='auto': %s", self.decision.reason)
        if self._slot.lasting:
            memory |= {"chosen": self.decision.chosen, "sparse_below": self.decision.sparse_below}
        return self.decision

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        decision = self.settle(sendbuf.dtype.itemsize)
        self.waits, self.spoilt = True, None
        chosen = decision.chosen
        residual = self._slot.residual
        if decision.sparse_below and residual is None:
            own = density_of(sendbuf, self._slot.step)
            if self._peers.numbers([int(1e6 * own)]).max() < 1e6 * decision.sparse_below:
                chosen = Sparse.name
        if chosen == DENSE:
            self._run_dense(sendbuf, recvbuf)
            return
        reduce = self._reduces.get(chosen)
        if reduce is None:
            codec = Sparse() if chosen == Sparse.name else self._codecs[chosen]
            reduce = self._reduces[chosen] = self._make(codec)
        reduce.run(sendbuf, recvbuf)
        self.waits, self.spoilt = reduce.waits, reduce.spoilt

    def _run_dense(self, sendbuf: Any, recvbuf: Any) -> None:
        source = self._slot.total(sendbuf, self._peers.scratch, self._peers.size)
        self._peers.allreduce(source, recvbuf, self._op)
        self._slot.sent_all()
        self.waits = not self._peers.on_device
        self._slot.look(recvbuf)
