"""Advice for a training: algorithm, size of buckets and compression, each with the step that it would give.

Every choice is priced by the models that choose at run time: the algorithm's time by ``flagcx.cost.model``,
codecs by their ratio and speed, and the step by how buckets overlap with the computation
(``flagcx.gradients.overlap``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from flagcx.arguments import format_nbytes
from flagcx.compression.auto import SPARSE_STEPS, LinkProfile, coded_us
from flagcx.compression.catalogue import catalogue
from flagcx.errors import ArgumentError
from flagcx.gradients.overlap import DEVICE_CALL_US, HOST_CALL_US, SIZE_TOLERANCE, best_bucket_nbytes, step_us
from flagcx.report import Report, Reported
from flagcx.topology import Topology, cluster, preset

if TYPE_CHECKING:
    from flagcx.algorithms.candidate import Candidate
    from flagcx.cost.model import Model

#: GB/s of float32 that a GPU codes and decodes: some passes over its memory.
DEVICE_CODEC_GB_PER_S = 200.0
#: Speed at which a core of a host moves and adds data through shared memory, and the time of a step there.
HOST_GB_PER_S, HOST_LATENCY_US = 7.0, 15.0
_PROBED_NBYTES = tuple(1 << power for power in range(12, 34, 3))
_MOST_ALGORITHMS = 3
_GAIN = 0.97
_COLUMNS = ("choice", "buckets", "of", "sent", "communication", "step", "loses", "")

TimeUs = Callable[[float], float]


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


@dataclass(frozen=True, slots=True)
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
                _time(one.communication_us),
                _time(one.step_us),
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
            same.
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
        machine = _hosts(ranks or 2, link_gb_per_s, latency_us)
    else:
        machine = _gpus(model_bytes, topology, ranks)
    size = machine.link.ranks
    compute_us = machine.times[0][1](model_bytes) if step_time is None else step_time * 1e6
    call_us = DEVICE_CALL_US if machine.on_device else HOST_CALL_US
    option = partial(_option, model_bytes, compute_us, call_us)
    options = [option(name, "", time) for name, time in machine.times]
    if size > 1:
        options += _coded(option, machine, density)
    options.sort(key=lambda one: (one.step_us, not one.lossless, one.name))
    chosen = _choose(options, allowed)
    title = (
        f"gradients of {format_nbytes(model_bytes)}, {size} rank{'s' * (size > 1)} {machine.where}, "
        f"{_time(compute_us)} of computation"
    )
    reason = _reason(options, chosen, compute_us, size)
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
        if not isinstance(value, kind) or not fits(value) or not math.isfinite(value):
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


# -- the machine ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Machine:
    """The link between the ranks, the times of algorithms by bytes (the fastest first), and its name."""

    link: LinkProfile
    times: list[tuple[str, TimeUs]]
    on_device: bool
    where: str


def _hosts(size: int, link_gb_per_s: float | None, latency_us: float) -> _Machine:
    if link_gb_per_s is None:
        link = LinkProfile(size, HOST_GB_PER_S, HOST_LATENCY_US, 1.0, 1.0, True)
        where = "of one host, through shared memory"
    else:
        link = LinkProfile(size, link_gb_per_s, latency_us, 0.0, 1.0, True)
        where = f"over a link of {link_gb_per_s:g} GB/s"
    speed, latency, share = link.bandwidth_gb_per_s, link.latency_us, 2 * (size - 1) / size
    times: list[tuple[str, TimeUs]] = [
        ("two_shot", lambda n: 2 * latency * (size > 1) + share * n / speed / 1e3)
    ]
    return _Machine(link, times, False, where)


def _gpus(model_bytes: int, topology: Topology | str, ranks: int | None) -> _Machine:
    from flagcx.cost.model import model_of

    machine = preset(topology) if isinstance(topology, str) else topology
    width = len(machine.gpus)
    size = ranks or width
    if size > width:
        machine = cluster(machine, -(-size // max(width, 1)))
    times = _algorithms(model_of(machine, size), model_bytes)
    best = times[0][1]
    share = 2 * (size - 1) / size
    slope = (best(model_bytes) - best(1)) / 1e-3
    bandwidth = share * model_bytes / slope if slope > 0 else 1e6
    link = LinkProfile(size, max(bandwidth, 1e-6), best(1) / 2, 0.0, 1.0, True)
    return _Machine(link, times, True, f"on {machine.name}")


def _algorithms(model: Model, model_bytes: int) -> list[tuple[str, TimeUs]]:
    """The best algorithms for buckets and for the whole, with NCCL's own."""
    from flagcx.cost import nccl as native
    from flagcx.selection.predicted import compare

    if model.size == 1:
        return [("none", lambda nbytes: 0.0)]
    sizes = [nbytes for nbytes in _PROBED_NBYTES if nbytes < model_bytes] + [model_bytes]
    middle = sizes[len(sizes) // 2]
    found: dict[str, Candidate] = {}
    for nbytes in (model_bytes, middle):
        for one in compare(model, "allreduce", nbytes)[:_MOST_ALGORITHMS]:
            found.setdefault(one.candidate.name, one.candidate)
    times = []
    for name, candidate in found.items():
        predicted = [model.timing("allreduce", candidate, n).time_us for n in sizes]
        times.append((name, _between(sizes, predicted)))
    own = native.nccl_algorithms(model.topology, model.gpus)
    by_nccl = native.predict_us(own, np.array(sizes, float), native.FITTED, replayed=True)
    times.append(("native", _between(sizes, list(by_nccl))))
    return sorted(times, key=lambda one: one[1](model_bytes))


def _between(sizes: Sequence[int], times: Sequence[float]) -> TimeUs:
    """Times on straight lines between those at some sizes."""
    return lambda nbytes: float(np.interp(nbytes, sizes, times))


# -- options --------------------------------------------------------------------------------------------


def _option(
    model_bytes: int,
    compute_us: float,
    call_us: float,
    algorithm: str,
    compression: str,
    time_us: TimeUs,
    ratio: float = 1.0,
    lossless: bool = True,
    feedback: bool = False,
) -> Option:
    def called_us(nbytes: float) -> float:
        return time_us(nbytes) + call_us

    bucket = best_bucket_nbytes(model_bytes, called_us, compute_us)
    buckets = max(round(model_bytes / bucket), 1)
    communication = buckets * time_us(model_bytes / buckets)
    step = step_us(model_bytes, bucket, called_us, compute_us)
    return Option(algorithm, compression, bucket, buckets, communication, step, ratio, lossless, feedback)


def _coded(option: Callable[..., Option], machine: _Machine, density: float) -> Iterator[Option]:
    """An option for each codec; the sparse one where there are zeros to leave out."""
    link = machine.link
    for name, info in catalogue().items():
        speed = DEVICE_CODEC_GB_PER_S if machine.on_device else info.host_gb_per_s
        if name != "sparse":
            time_us = partial(_coded_us, link, info.ratio, speed)
            yield option("compressed", name, time_us, info.ratio, info.lossless, info.needs_feedback)
        elif density < 1:
            # An element with its index goes to its owner, and at worst those of all ranks come back.
            ratio = min(density * (1 + link.ranks), 2.0)
            yield option("compressed", name, partial(_sparse_us, link, ratio, density, speed), ratio)


def _coded_us(link: LinkProfile, ratio: float, speed_gb_per_s: float, nbytes: float) -> float:
    return coded_us(int(nbytes), link, ratio, speed_gb_per_s)


def _sparse_us(
    link: LinkProfile, ratio: float, density: float, speed_gb_per_s: float, nbytes: float
) -> float:
    """Time of the lossless sparse all-reduce."""
    sending = 2 * (link.ranks - 1) / link.ranks * nbytes * ratio / link.bandwidth_gb_per_s / 1e3
    coding = nbytes * (1 / speed_gb_per_s + density) / 1e3
    return SPARSE_STEPS * link.latency_us + sending + coding


def _choose(options: Sequence[Option], allowed: frozenset[str]) -> Option:
    """The least lossy of the fastest that are allowed; one without compression if it is hardly slower."""
    usable = [one for one in options if one.lossless or one.compression in allowed]
    best, plain = _least_lossy(usable), next(one for one in usable if not one.compression)
    return best if best.step_us < _GAIN * plain.step_us else plain


def _least_lossy(options: Sequence[Option]) -> Option:
    """Of the choices that are as fast as the first, the one that loses least."""
    near = [one for one in options if one.step_us <= SIZE_TOLERANCE * options[0].step_us]
    return max(near, key=lambda one: (one.lossless, not one.feedback, one.sent_share))


def _reason(options: Sequence[Option], chosen: Option, compute_us: float, ranks: int) -> str:
    if ranks == 1:
        return "One rank: there is nothing to send."
    plain = next(one for one in options if not one.compression)
    hidden = chosen.step_us <= 1.05 * compute_us
    text = f"{chosen.name} in buckets of {format_nbytes(chosen.bucket_nbytes)}: "
    text += f"a step takes {_time(chosen.step_us)}"
    if hidden:
        text += ", nearly all of it computation: the all-reduces hide behind it"
    else:
        rest, whole = _time(chosen.step_us - compute_us), _time(chosen.communication_us)
        text += f"; {rest} of the {whole} of communication do not hide behind the computation"
    if chosen.compression:
        text += f"; without compression it would take {_time(plain.step_us)}"
    better = [one for one in options if one.step_us < _GAIN * chosen.step_us]
    return f"{text}. {_lossy(better)}." if better else f"{text}."


def _lossy(better: Sequence[Option]) -> str:
    """The faster lossy choices: the fastest, and the least lossy of those as fast."""
    first, gentle = better[0], _least_lossy(better)
    text = f"{first.name} would take {_time(first.step_us)}"
    if gentle == first:
        return f"{text}, but loses something; allow it by lossy=({first.compression!r},)"
    return (
        f"{text}, and {gentle.name}, which takes less from the data, {_time(gentle.step_us)}, but they lose "
        f"something; allow the latter by lossy=({gentle.compression!r},)"
    )


def _time(time_us: float) -> str:
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if time_us >= factor:
            return f"{time_us / factor:.3g} {unit}"
    return f"{time_us:.3g} us"
