"""Advice for a training: algorithm, size of buckets and compression, each with the step that it would give.

Every choice is priced by the same models that choose at run time: the algorithm's time by
``flagcx.cost.model``, codecs by their ratio and speed, and the step by how buckets overlap with the
computation (``flagcx.gradients.overlap``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from flagcx.arguments import format_nbytes
from flagcx.compression.auto import LinkProfile, coded_us
from flagcx.compression.catalogue import catalogue
from flagcx.errors import ArgumentError
from flagcx.gradients.overlap import DEVICE_CALL_US, HOST_CALL_US, NEAR, best_bucket_nbytes, step_us
from flagcx.topology import Topology, cluster, preset

if TYPE_CHECKING:
    from rich.table import Table

    from flagcx.algorithms.candidate import Candidate
    from flagcx.cost.model import Model

#: GB/s of float32 that a GPU takes through a codec's coding and decoding: some passes over its memory.
DEVICE_CODEC_GB_PER_S = 200.0
#: What a core of a host moves and adds through shared memory, and the time of a step there.
HOST_GB_PER_S, HOST_LATENCY_US = 7.0, 15.0
_PROBED_NBYTES = tuple(1 << power for power in range(12, 34, 3))
_MOST_ALGORITHMS = 3
_GAIN = 0.97
_SPARSE_STEPS = 8

_COLUMNS = ("choice", "buckets", "of", "sent", "communication", "step", "loses", "")

TimeUs = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Option:
    """One choice.

    Attributes:
        algorithm: Name of the algorithm; "compressed" where a codec has its own.
        compression: Name of the codec; "" for none.
        bucket_nbytes: The size of buckets that serves it best.
        buckets: How many there are.
        communication_us: Time of all all-reduces, one after the other.
        step_us: Time of a step that overlaps them with the computation.
        sent_share: What is sent, over what is sent without compression.
        lossless: Whether nothing is lost.
        feedback: Whether it wants error feedback.
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
class Advice:
    """Choices with the steps that they would give. Prints as a table; rich and notebooks show it as one.

    Attributes:
        title: What the advice is for.
        model_nbytes: Bytes of all gradients.
        ranks: Number of ranks.
        compute_us: Time of the computation of a step.
        options: All choices, the fastest first; those that lose something among them.
        chosen: The one to use.
        reason: Why, in a sentence or two.
    """

    title: str
    model_nbytes: int
    ranks: int
    compute_us: float
    options: tuple[Option, ...]
    chosen: Option
    reason: str

    def cells(self) -> list[tuple[str, ...]]:
        """The table as text: a row of headings, then one a choice."""
        table: list[tuple[str, ...]] = [
            ("choice", "buckets", "of", "sent", "communication", "step", "loses", "")
        ]
        for one in self.options:
            table.append(
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
            )
        return table

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**asdict(self), "options": [asdict(one) for one in self.options]}

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def __str__(self) -> str:
        rows = self.cells()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                text.ljust(width) if i in (0, 6, 7) else text.rjust(width)
                for i, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([self.title, *lines, self.reason])

    def __rich__(self) -> Table:
        from rich.markup import escape
        from rich.table import Table

        head, *body = self.cells()
        left: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
        table = Table(title=escape(self.title), caption=escape(self.reason), **left)
        for i, text in enumerate(head):
            table.add_column(text, justify="left" if i in (0, 6, 7) else "right", no_wrap=True)
        for cells in body:
            table.add_row(*map(escape, cells), style="bold" if cells[-1] else None)
        return table

    def _repr_html_(self) -> str:
        from html import escape

        row = "<tr>{}</tr>".format
        head, *body = self.cells()
        titles = "".join(f"<th>{escape(text)}</th>" for text in head)
        lines = "".join(row("".join(f"<td>{escape(text)}</td>" for text in cells)) for cells in body)
        return (
            f"<p><b>{escape(self.title)}</b></p><table><thead>{row(titles)}</thead><tbody>{lines}</tbody>"
            f"</table><p>{escape(self.reason)}</p>"
        )


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
    """Says how the gradients of a training are best reduced, and what each choice would give.

    Args:
        model_bytes: Bytes of all gradients, as float32.
        topology: The machine or cluster: a ``Topology`` or the name of a preset, as many of it as the ranks
            need. Processes of one host with NumPy arrays if None.
        ranks: Number of ranks; all GPUs of the topology by default, else 2.
        step_time: Seconds that a step computes; as long as it communicates if None.
        density: The share of the gradients that isn't zero.
        lossy: Whether the advice may lose something: True, or the names of codecs. They are listed all the
            same.
        link_gb_per_s: What a rank sends in each direction, in 10^9 bytes per second, where a network is
            between hosts with NumPy arrays, in place of ``topology``.
        latency_us: Of that link.

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
    link, plain, on_device, where = _look(model_bytes, topology, ranks, link_gb_per_s, latency_us)
    compute_us = plain[0][1](model_bytes) if step_time is None else step_time * 1e6
    call_us = DEVICE_CALL_US if on_device else HOST_CALL_US
    options = [_option(name, "", time, model_bytes, compute_us, call_us) for name, time in plain]
    if link.ranks > 1:
        options += _coded(link, model_bytes, compute_us, density, on_device)
    options.sort(key=lambda one: (one.step_us, not one.lossless, one.name))
    chosen = _choose(options, allowed)
    title = (
        f"gradients of {format_nbytes(model_bytes)}, {link.ranks} rank{'s' * (link.ranks > 1)} {where}, "
        f"{_time(compute_us)} of computation"
    )
    reason = _reason(options, chosen, compute_us, link.ranks)
    return Advice(title, model_bytes, link.ranks, compute_us, tuple(options), chosen, reason)


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


# -- what is there --------------------------------------------------------------------------------------


def _look(
    model_bytes: int,
    topology: Topology | str | None,
    ranks: int | None,
    link_gb_per_s: float | None,
    latency_us: float,
) -> tuple[LinkProfile, list[tuple[str, TimeUs]], bool, str]:
    """The link, the algorithms with their times (the fastest first), whether on GPUs, and where in words."""
    if topology is not None:
        return _on_device(model_bytes, topology, ranks)
    size = ranks or 2
    busy = 0.0 if link_gb_per_s is not None else 1.0
    speed = HOST_GB_PER_S if link_gb_per_s is None else link_gb_per_s
    latency = HOST_LATENCY_US if link_gb_per_s is None else latency_us
    link = LinkProfile(size, speed, latency, busy, 1.0, True)
    where = f"over a link of {speed:g} GB/s"
    if link_gb_per_s is None:
        where = "of one host, through shared memory"
    share = 2 * (size - 1) / size
    times: list[tuple[str, TimeUs]] = [
        ("two_shot", lambda n: 2 * latency * (size > 1) + share * n / speed / 1e3)
    ]
    return link, times, False, where


def _on_device(
    model_bytes: int, topology: Topology | str, ranks: int | None
) -> tuple[LinkProfile, list[tuple[str, TimeUs]], bool, str]:
    from flagcx.cost.model import model_of

    machine = preset(topology) if isinstance(topology, str) else topology
    width = len(machine.gpus)
    size = ranks or width
    if size > width:
        machine = cluster(machine, -(-size // max(width, 1)))
    model = model_of(machine, size)
    times = _algorithms(model, model_bytes)
    best = times[0][1]
    share = 2 * (size - 1) / size
    slope = (best(model_bytes) - best(1)) / 1e-3
    bandwidth = share * model_bytes / slope if slope > 0 else 1e6
    link = LinkProfile(size, max(bandwidth, 1e-6), best(1) / 2, 0.0, 1.0, True)
    return link, times, True, f"on {machine.name}"


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
        times.append(
            (name, _between(sizes, [model.timing("allreduce", candidate, n).time_us for n in sizes]))
        )
    own = native.nccl_algorithms(model.topology, model.gpus)
    predicted = native.predict_us(own, np.array(sizes, float), native.FITTED, replayed=True)
    times.append(("native", _between(sizes, list(predicted))))
    return sorted(times, key=lambda one: one[1](model_bytes))


def _between(sizes: Sequence[int], times: Sequence[float]) -> TimeUs:
    """Times on straight lines between those at some sizes."""
    return lambda nbytes: float(np.interp(nbytes, sizes, times))


# -- options --------------------------------------------------------------------------------------------


def _option(
    algorithm: str,
    compression: str,
    time_us: TimeUs,
    model_bytes: int,
    compute_us: float,
    call_us: float,
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
    facts = (bucket, buckets, communication, step, ratio, lossless, feedback)
    return Option(algorithm, compression, *facts)


def _coded(
    link: LinkProfile, model_bytes: int, compute_us: float, density: float, on_device: bool
) -> Iterator[Option]:
    """An option for each codec; the sparse one where there are zeros to leave out."""
    call_us = DEVICE_CALL_US if on_device else HOST_CALL_US
    for name, entry in catalogue().items():
        speed = DEVICE_CODEC_GB_PER_S if on_device else entry.host_gb_per_s
        if name == "sparse":
            if density < 1:
                time_us, ratio = _sparse(link, density, speed)
                yield _option("compressed", name, time_us, model_bytes, compute_us, call_us, ratio)
            continue
        ratio = entry.ratio

        def time_us(nbytes: float, ratio: float = ratio, speed: float = speed) -> float:
            return coded_us(int(nbytes), link, ratio, speed)

        feedback = entry.needs_feedback
        yield _option(
            "compressed", name, time_us, model_bytes, compute_us, call_us, ratio, entry.lossless, feedback
        )


def _sparse(link: LinkProfile, density: float, speed_gb_per_s: float) -> tuple[TimeUs, float]:
    """Time of the lossless sparse all-reduce, and what it sends over the dense one.

    An element that isn't zero goes with its index to its owner, and at worst those of all ranks come back.
    """
    n = link.ranks
    ratio = min(2 * density * (1 + n) / 2, 2.0)

    def time_us(nbytes: float) -> float:
        sending = 2 * (n - 1) / n * nbytes * ratio / link.bandwidth_gb_per_s / 1e3
        coding = nbytes * (1 / speed_gb_per_s + density) / 1e3
        return _SPARSE_STEPS * link.latency_us + sending + coding

    return time_us, ratio


def _choose(options: Sequence[Option], allowed: frozenset[str]) -> Option:
    """The gentlest of the fastest that may be used; one without compression where that is hardly slower."""
    usable = [one for one in options if one.lossless or one.compression in allowed]
    best, plain = _gentlest(usable), next(one for one in usable if not one.compression)
    return best if best.step_us < _GAIN * plain.step_us else plain


def _gentlest(options: Sequence[Option]) -> Option:
    """Of the choices that are as good as the fastest, the first, the one that takes least from the data."""
    near = [one for one in options if one.step_us <= NEAR * options[0].step_us]
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
    """What would be faster if something may be lost: the fastest, and the gentlest of those as good."""
    first, gentle = better[0], _gentlest(better)
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
