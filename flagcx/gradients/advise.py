"""Advice for a training: algorithm, size of buckets and compression, each with the step that it would give.

Every choice is priced by the models that choose at run time: the algorithm's time by ``flagcx.cost.model``,
codecs by the bytes that so many ranks send and by the speed of the device that codes, and the step by how
buckets overlap with the computation (``flagcx.gradients.overlap``). On hosts a thread codes beside the
computation; a GPU that codes does not compute meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any

from flagcx.arguments import format_nbytes
from flagcx.compression.auto import ELEMENT_WORDS, SPARSE_STEPS, coded_us
from flagcx.compression.catalogue import CodecInfo, catalogue
from flagcx.compression.powersgd import PowerSGD
from flagcx.errors import ArgumentError
from flagcx.gradients.machine import Machine, TimeUs, gpus, hosts
from flagcx.gradients.overlap import DEVICE_CALL_US, HOST_CALL_US, SIZE_TOLERANCE, best_bucket_nbytes, step_us
from flagcx.report import Report, Reported, duration
from flagcx.topology import Topology

_GAIN = 0.97
#: From the least lossy on: bf16 keeps the range that fp16 lacks, and what needs no feedback comes first.
_GENTLE = ("", "sparse", "bf16", "fp16", "int8", "fp8", "fp8_e5m2", "int4", "powersgd", "topk")
_GATHERS_GB_PER_S = 1.0  # at which a core places elements one by one
_COLUMNS = ("choice", "buckets", "of", "sent", "communication", "step", "loses", "")


@dataclass(frozen=True, slots=True)
class Option:
    """One choice.

    Attributes:
        algorithm: Name of the algorithm; "compressed" where a codec has its own.
        compression: Name of the codec; "" for none.
        bucket_nbytes: The best size of buckets.
        buckets: Number of buckets.
        communication_us: Time of all all-reduces, one after the other.
        step_us: Time of a step that overlaps them with the computation.
        sent_share: Bytes sent, over those sent without compression.
        lossless: Whether nothing is lost.
        feedback: Whether it needs error feedback.
    """

    algorithm: str
    compression: str
    bucket_nbytes: int
    buckets: int
    communication_us: float
    step_us: float
    sent_share: float
    lossless: bool
    feedback: bool

    @property
    def name(self) -> str:
        """The choice in a word or two."""
        return f"{self.compression} + feedback" if self.feedback else self.compression or self.algorithm


@dataclass(frozen=True, slots=True, repr=False)
class Advice(Reported):
    """Choices with the steps that they would give. Prints as a table; rich and notebooks show it as one.

    Attributes:
        title: The training that the advice is for.
        model_nbytes: Bytes of all gradients.
        ranks: Number of ranks.
        compute_us: Time of the computation of a step.
        options: All choices, the fastest first; lossy ones among them.
        chosen: The one to use.
        reason: The reason, in a sentence or two.
    """

    title: str
    model_nbytes: int
    ranks: int
    compute_us: float
    options: tuple[Option, ...]
    chosen: Option
    reason: str

    def report(self) -> Report:
        """The choices as a table."""
        rows = [
            (
                one.name,
                str(one.buckets),
                format_nbytes(one.bucket_nbytes),
                f"{one.sent_share:.1%}",
                duration(one.communication_us),
                duration(one.step_us),
                "nothing" if one.lossless else "something",
                "<- use this" if one == self.chosen else "",
            )
            for one in self.options
        ]
        bold = (self.options.index(self.chosen),)
        return Report(self.title, _COLUMNS, rows, (0, 6, 7), (self.reason,), bold)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "options": [asdict(one) for one in self.options]}


def advise(
    model_bytes: int,
    topology: Topology | str | None = None,
    ranks: int | None = None,
    step_time: float | None = None,
    density: float = 1.0,
    *,
    lossy: bool | Sequence[str] = False,
    link_gb_per_s: float | None = None,
    latency_us: float = 50.0,
) -> Advice:
    """Compares the ways to reduce the gradients of a training, and says which to use.

    Args:
        model_bytes: Bytes of all gradients, as float32.
        topology: The machine or cluster: a ``Topology`` or the name of a preset, as many of it as the ranks
            need. Processes of one host with NumPy arrays if None.
        ranks: Number of ranks; all GPUs of the topology by default, else 2.
        step_time: Seconds that a step computes; as long as it communicates if None.
        density: The share of the gradients that isn't zero.
        lossy: Whether the advice may be a lossy codec: True, or the names of codecs. The table lists all the
            same, but for those with which trainings diverge at the step size that they have ("randomk").
        link_gb_per_s: Bandwidth of a rank in each direction, in 10^9 bytes per second, where a network is
            between hosts with NumPy arrays, in place of ``topology``.
        latency_us: Latency of that link.

    Raises:
        ArgumentError: A number is none or out of range, there is no such codec, ``topology`` is neither a
            topology nor a name, or both a topology and a link are given.
        TopologyError: There is no such preset, or it has no GPU.

    Example:
        >>> advise(100 << 20, ranks=4, link_gb_per_s=0.125, step_time=1.0).chosen.lossless
        True
        >>> advise(100 << 20, ranks=4, link_gb_per_s=0.125, step_time=1.0, lossy=("int8",)).chosen.compression
        'int8'
    """
    _check(model_bytes, ranks, step_time, density, link_gb_per_s, latency_us, topology)
    allowed = _allowed(lossy)
    if topology is None:
        machine = hosts(ranks or 2, link_gb_per_s, latency_us)
    else:
        machine = gpus(model_bytes, topology, ranks)
    size = machine.link.ranks
    compute_us = machine.times[0][1](model_bytes) if step_time is None else step_time * 1e6
    call_us = DEVICE_CALL_US if machine.on_device else HOST_CALL_US
    option = partial(_option, model_bytes, compute_us, call_us)
    options = [option(name, time) for name, time in machine.times]
    if size > 1:
        options += _coded(option, machine, model_bytes, density)
    options.sort(key=lambda one: (one.step_us, not one.lossless, one.name))
    chosen = _choose(options, allowed)
    title = (
        f"gradients of {format_nbytes(model_bytes)}, {size} rank{'s' * (size > 1)} {machine.where}, "
        f"{duration(compute_us)} of computation"
    )
    reason = _reason(options, chosen, compute_us, size)
    for name in sorted(allowed - _steady().keys()) if lossy is not True else ():
        reason += f" {name} is left out: trainings diverge with it at the step size of dense gradients."
    return Advice(title, model_bytes, size, compute_us, tuple(options), chosen, reason)


def _check(model_bytes, ranks, step_time, density, link_gb_per_s, latency_us, topology) -> None:
    for name, value, kind, fits, wanted in (
        (
            "model_bytes",
            model_bytes,
            Real,
            lambda n: n >= 1,
            "at least 1: a number of bytes, such as 20 * 10**9",
        ),
        ("ranks", ranks, Integral, lambda n: n >= 1, "at least 1, a whole number, or None"),
        ("step_time", step_time, Real, lambda s: s >= 0, "seconds from 0, or None"),
        ("density", density, Real, lambda share: 0 <= share <= 1, "from 0 to 1"),
        ("link_gb_per_s", link_gb_per_s, Real, lambda speed: speed > 0, "above 0, or None"),
        ("latency_us", latency_us, Real, lambda time: time >= 0, "from 0"),
    ):
        if value is None and wanted.endswith("None"):
            continue
        if (
            not isinstance(value, kind)
            or isinstance(value, bool)
            or not fits(value)
            or not math.isfinite(value)
        ):
            raise ArgumentError(f"{name}={value!r} must be {wanted}")
    if not isinstance(topology, (Topology, str, type(None))):
        raise ArgumentError(f"topology={topology!r} must be a Topology, the name of a preset, or None")
    if topology is not None and link_gb_per_s is not None:
        raise ArgumentError(
            f"topology={topology!r} and link_gb_per_s={link_gb_per_s!r} exclude each other; a topology has "
            f"the speeds of its links"
        )


def _allowed(lossy: bool | Sequence[str]) -> frozenset[str]:
    known = {name for name, entry in catalogue().items() if not entry.lossless}
    if isinstance(lossy, bool):
        return frozenset(known if lossy else ())
    named = isinstance(lossy, Collection) and not isinstance(lossy, str)
    if not named or not all(isinstance(name, str) and name in known for name in lossy):
        raise ArgumentError(
            f"lossy={lossy!r} must be True, False, or a list of names out of {', '.join(sorted(known))}"
        )
    return frozenset(lossy)


def _steady() -> dict[str, CodecInfo]:
    """The codecs that a training can take without another step size."""
    return {name: info for name, info in catalogue().items() if info.steady}


# -- options --------------------------------------------------------------------------------------------


def _option(
    model_bytes: int,
    compute_us: float,
    call_us: float,
    algorithm: str,
    time_us: TimeUs,
    compression: str = "",
    coding_us: float = 0.0,
    ratio: TimeUs = lambda nbytes: 1.0,
    lossless: bool = True,
    feedback: bool = False,
) -> Option:
    """A choice that keeps the GPU from computing for ``coding_us``."""

    def called_us(nbytes: float) -> float:
        return time_us(nbytes) + call_us

    bucket = best_bucket_nbytes(model_bytes, called_us, compute_us + coding_us)
    buckets = max(round(model_bytes / bucket), 1)
    communication = buckets * time_us(model_bytes / buckets)
    step = step_us(model_bytes, bucket, called_us, compute_us + coding_us * (buckets - 1) / buckets)
    sent = ratio(model_bytes / buckets)
    return Option(algorithm, compression, bucket, buckets, communication, step, sent, lossless, feedback)


def _coded(
    option: Callable[..., Option], machine: Machine, model_bytes: int, density: float
) -> Iterator[Option]:
    """An option for each codec; the sparse one where there are zeros to leave out."""
    ranks = machine.link.ranks
    for name, info in _steady().items():
        coding = _coding(machine, info)
        facts = name, coding(model_bytes) if machine.on_device else 0.0
        if name != "sparse":
            sent, time_us = partial(_ratio, info, ranks), partial(_coded_us, machine, info, coding)
            yield option("compressed", time_us, *facts, sent, info.lossless, info.needs_feedback)
        elif density < 1:
            # An element goes to its owner, and at worst those of all ranks come back.
            share = min(ELEMENT_WORDS / 2 * (density + min(ranks * density, 1)), 1.0)
            time_us = partial(_sparse_us, machine, coding, share, density)
            yield option("compressed", time_us, *facts, lambda nbytes, share=share: share)


def _ratio(info: CodecInfo, ranks: int, nbytes: float) -> float:
    """Bytes that a rank sends, over those of the dense all-reduce."""
    return info.codec.ratio(max(int(nbytes) // 4, 1), ranks)


def _coding(machine: Machine, info: CodecInfo) -> TimeUs:
    """The time that a rank's core or GPU codes and decodes."""
    if machine.on_device:
        speed, once = info.device_gb_per_s(machine.memory_gb_per_s), info.device_call_us
    else:
        speed, once = info.host_gb_per_s, 0.0
    return lambda nbytes: once + nbytes / speed / 1e3


def _coded_us(machine: Machine, info: CodecInfo, coding: TimeUs, nbytes: float) -> float:
    """Time of a compressed all-reduce: pieces overlap on hosts; a GPU codes and sends in turn."""
    ratio = _ratio(info, machine.link.ranks, nbytes)
    if not machine.on_device:
        return coded_us(int(nbytes), machine.link, ratio, info.host_gb_per_s)
    if isinstance(info.codec, PowerSGD):  # two dense all-reduces
        return coding(nbytes) + 2 * machine.times[0][1](nbytes * ratio / 2)
    return coding(nbytes) + machine.exchange(nbytes * ratio)


def _sparse_us(machine: Machine, coding: TimeUs, ratio: float, density: float, nbytes: float) -> float:
    """Time of the lossless sparse all-reduce."""
    sending = machine.exchange(nbytes * ratio) + (SPARSE_STEPS - 4) * machine.link.latency_us
    gathering = 0.0 if machine.on_device else density * nbytes / _GATHERS_GB_PER_S / 1e3
    return sending + coding(nbytes) + gathering


def _choose(options: Sequence[Option], allowed: frozenset[str]) -> Option:
    """The least lossy of the fastest that are allowed; one without compression if it is hardly slower."""
    usable = [one for one in options if one.lossless or one.compression in allowed]
    best, plain = _least_lossy(usable), _plain(usable)
    return best if best.step_us < _GAIN * plain.step_us else plain


def _plain(options: Sequence[Option]) -> Option:
    """The best choice without compression."""
    return _least_lossy([one for one in options if not one.compression])


def _least_lossy(options: Sequence[Option]) -> Option:
    """Of the choices with as short a step as the first, the one that loses least, then communicates least."""
    near = [one for one in options if one.step_us <= SIZE_TOLERANCE * options[0].step_us]
    return min(near, key=lambda one: (_GENTLE.index(one.compression), one.communication_us))


def _reason(options: Sequence[Option], chosen: Option, compute_us: float, ranks: int) -> str:
    if ranks == 1:
        return "One rank: there is nothing to send."
    plain = _plain(options)
    hidden = chosen.step_us <= 1.05 * compute_us
    text = f"{chosen.name} in buckets of {format_nbytes(chosen.bucket_nbytes)}: "
    text += f"a step takes {duration(chosen.step_us)}"
    if hidden:
        text += ", nearly all of it computation: the all-reduces hide behind it"
    else:
        rest, whole = duration(chosen.step_us - compute_us), duration(chosen.communication_us)
        text += f"; {rest} of the {whole} of communication do not hide behind the computation"
    if chosen.compression:
        text += f"; without compression it would take {duration(plain.step_us)}"
    better = [one for one in options if one.step_us < _GAIN * chosen.step_us]
    return f"{text}. {_lossy(better)}." if better else f"{text}."


def _lossy(better: Sequence[Option]) -> str:
    """The faster lossy choices: the fastest, and the least lossy of those as fast."""
    first, gentle = better[0], _least_lossy(better)
    text = f"{first.name} would take {duration(first.step_us)}"
    if gentle == first:
        return f"{text}, but loses something; allow it by lossy=({first.compression!r},)"
    return (
        f"{text}, and {gentle.name}, which takes less from the data, {duration(gentle.step_us)}, but they "
        f"lose something; allow the latter by lossy=({gentle.compression!r},)"
    )
