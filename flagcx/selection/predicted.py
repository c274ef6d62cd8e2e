"""How candidates compare by the model: the best pieces of each, two at once where they gain, and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import numpy as np

from flagcx.algorithms import Algorithm, entry
from flagcx.algorithms.candidate import BOTH_WAYS, MOST_PIECES, Candidate, Order
from flagcx.cost.model import Model, Prediction
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.selection.candidates import Request, candidates, schedules, split_messages
from flagcx.selection.placement import MOST_PLANNED
from flagcx.selection.table import Fit, Point, Table
from flagcx.topology import Topology

PREDICTED = ("allreduce", "reduce", "reduce_scatter")
"""The collectives that reduce: those that NCCL's own may not do, for want of the dtype or operation."""
SIZES = tuple(1 << power for power in range(8, 33, 3))
PIECE_NBYTES = (4 << 20,)
"""The length of piece that is tried on GPUs, besides whole blocks: a step costs a group and a launch."""
_LEAST_PIECE_NBYTES = 4 << 10
"""No piece is cut smaller: its time would be latency alone."""
_HOPELESS = 3.0
_WORTH_SPLITTING = 0.95
_MOST_SPLIT = 6
_SHARES = 16


def predicted_table(topology: Topology, gpus: Sequence[int], order: Order | None, fit: Fit) -> Table | None:
    """The times that the model gives to schedules of sends and receives through NCCL, placed along an order.

    None above ``MOST_PLANNED`` ranks, where it would take long.
    """
    if not 1 < len(gpus) <= MOST_PLANNED:
        return None
    model = Model(topology, gpus)
    return Table(fit, {collective: tuple(_points(model, collective, order)) for collective in PREDICTED})


def _points(model: Model, collective: str, order: Order | None) -> Iterator[Point]:
    for nbytes in SIZES:
        times = {
            one: model.timing(collective, one.at(nbytes).along(order), nbytes).time_us
            for one in on_device(Request(collective, nbytes, model.size))
        }
        yield Point(nbytes, times)


def on_device(request: Request) -> list[Candidate]:
    """The schedules that are worth a look on GPUs: all blocks of a ring are under way at once as it is."""
    found = schedules(request, PIECE_NBYTES)
    whole = [one for one in found if one.algorithm != Algorithm.RING or not one.piece_nbytes]
    return [*whole, *split_messages(request.collective, request.size)]


def best_pieces(
    collective: str, candidate: Candidate, steps: int, latency_us: float, time_us: float, nbytes: float
) -> int:
    """How many pieces a pipelined algorithm does best with, a power of two.

    With s steps of a us and b us of bytes each, k pieces take (s + k - 1)(a + b / k), which is least for
    k = sqrt((s - 1) b / a).

    Args:
        collective: Name of the collective.
        candidate: With one piece.
        steps: Its steps.
        latency_us: Its time for no bytes.
        time_us: Its time for the message.
        nbytes: Bytes of the message.

    Example:
        >>> best_pieces("broadcast", Candidate("chain"), 7, 7.0, 1007.0, 1 << 20)
        32
    """
    if not entry(collective, candidate.algorithm).pipelined or candidate.algorithm == "ring":
        return 1
    most = min(MOST_PIECES, int(nbytes // _LEAST_PIECE_NBYTES))
    if steps < 2 or most < 2 or latency_us <= 0:
        return 1 if steps < 2 or most < 2 else 1 << (most.bit_length() - 1)
    wanted = ((steps - 1) * (time_us - latency_us) / latency_us) ** 0.5
    pieces = 1
    while pieces * 2 <= most and pieces * 2**0.5 < wanted:
        pieces *= 2
    return pieces


def in_pieces(
    model: Model, collective: str, candidate: Candidate, nbytes: float, root: int | None = None
) -> Prediction:
    """What the model says of a candidate with the pieces that serve it best."""
    return _in_pieces(model, collective, model.predict(collective, candidate, nbytes, root), nbytes, root)


def _in_pieces(model: Model, collective: str, one: Prediction, nbytes: float, root: int | None) -> Prediction:
    """The better of a prediction for one piece and that for as many as serve the candidate best."""
    pieces = best_pieces(collective, one.candidate, one.steps, one.latency_us, one.time_us, nbytes)
    if pieces == 1:
        return one
    cut = model.predict(collective, replace(one.candidate, pieces=pieces), nbytes, root)
    return min(one, cut, key=lambda prediction: prediction.time_us)


def compare(
    model: Model,
    collective: str,
    nbytes: float,
    root: int | None = None,
    report: Callable[[int, int, str], object] = lambda done, total, what: None,
) -> tuple[Prediction, ...]:
    """All candidates, two at once included where they gain, the fastest first.

    A candidate is not tried in pieces where its steps alone take ``_HOPELESS`` times the fastest's time.
    Ties keep the order of the catalogue, so that all ranks find the same.

    Args:
        collective: Name of the collective.
        nbytes: Bytes of the message; of one block, where the collective has one a rank.
        root: The root of a rooted collective; 0 by default.
        report: ``report(done, total, what)`` is called before each candidate, and at the end.

    Raises:
        ArgumentError: There is no such collective.
    """
    found = candidates(collective, model.size, model.topology, model.gpus)
    nbytes = 0 if collective == "barrier" else nbytes
    whole = []
    for number, candidate in enumerate(found):
        report(number, len(found), candidate.name)
        whole.append(model.predict(collective, candidate, nbytes, root))
    report(len(found), len(found), "pieces and pairs")
    limit = _HOPELESS * min(one.time_us for one in whole)
    ranked = sorted(
        (
            _in_pieces(model, collective, one, nbytes, root) if one.latency_us < limit else one
            for one in whole
        ),
        key=lambda prediction: prediction.time_us,
    )
    paired = [one for one in ranked if entry(collective, one.candidate.algorithm).trusted]
    pairs = list(_pairs(model, collective, paired, nbytes, root)) if 2 < model.size <= MOST_PLANNED else []
    return tuple(sorted([*ranked, *pairs], key=lambda prediction: prediction.time_us))


def _pairs(
    model: Model, collective: str, ranked: list[Prediction], nbytes: float, root: int | None
) -> Iterator[Prediction]:
    """Two beside each other, where together they would keep every link less busy than either alone."""
    parts = [prediction.candidate for prediction in ranked[:_MOST_SPLIT]]
    for part in list(parts):
        if part.algorithm in BOTH_WAYS and not COLLECTIVES[collective].rooted:
            order = part.order or tuple(range(model.size))
            parts.append(replace(part, order=order[::-1]))
    best = ranked[0].time_us
    loads = [model.timing(collective, part, nbytes, root).link_nbytes for part in parts]
    speed = model.network.bandwidth_gb_per_s * 1000  # of all links that any of them uses
    busy = [np.pad(load, (0, len(speed) - len(load))) / speed for load in loads]
    gains: list[tuple[float, int, Candidate]] = []
    for (a, one), (b, other) in combinations(zip(parts, busy, strict=True), 2):
        share, gain = _share(one, other)
        if gain < _WORTH_SPLITTING:
            gains.append((gain, len(gains), replace(a, other=b, share=share)))
    for _, _, pair in sorted(gains)[:_MOST_SPLIT]:
        prediction = model.predict(collective, pair, nbytes, root)
        if prediction.time_us < best:
            yield prediction


def _share(one: np.ndarray, other: np.ndarray) -> tuple[Fraction, float]:
    """The first one's share with which the busiest link has least to do, and that over the better alone.

    Args:
        one: How long each link is busy if the first has the whole message.
        other: Likewise for the second.
    """
    least = min(one.max(), other.max())
    if not least:
        return Fraction(1, 2), 1.0
    parts = np.arange(1, _SHARES)[:, None] / _SHARES
    worst = (parts * one + (1 - parts) * other).max(axis=1)
    chosen = int(worst.argmin())
    return Fraction(chosen + 1, _SHARES), float(worst[chosen] / least)
