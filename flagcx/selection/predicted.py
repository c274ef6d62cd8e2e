"""What the model says of schedules on GPUs, as a table like those that are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import numpy as np

from flagcx.algorithms import Algorithm, entries
from flagcx.algorithms.candidate import Candidate, Order
from flagcx.cost.model import Model, Prediction
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.selection.candidates import MOST_PLANNED, best_pieces, candidates
from flagcx.selection.table import Fit, Point, Table
from flagcx.topology.graph import Topology

MODELLED = ("allreduce", "reduce", "reduce_scatter")
"""The collectives that reduce: those that NCCL's own may not do, for want of the dtype or operation."""
SIZES = tuple(1 << power for power in range(8, 33, 3))
PIECE_NBYTES = 4 << 20
MIXES = ("ring|ring", "ring|double_binary_tree", "ring|two_shot", "ring 3/4|two_shot")
"""The mixes that are candidates on GPUs."""
_WORTH_A_MIX = 0.95
_MOST_MIXED = 6
_SHARES = 16


def modelled_table(topology: Topology, gpus: Sequence[int], order: Order | None, fit: Fit) -> Table | None:
    """The times that the model gives to schedules of sends and receives through NCCL.

    Args:
        topology: The machine.
        gpus: The GPU of each rank.
        order: The ranks along the machine's links, as schedules are laid; None for rank order.
        fit: Where it holds.

    Returns:
        None above ``MOST_PLANNED`` ranks, where it would take long.
    """
    if not 1 < len(gpus) <= MOST_PLANNED:
        return None
    model = Model(topology, gpus)
    measured = {collective: tuple(_points(model, collective, order)) for collective in MODELLED}
    return Table(fit, measured)


def _points(model: Model, collective: str, order: Order | None) -> Iterator[Point]:
    root = 0 if COLLECTIVES[collective].rooted else None
    for nbytes in SIZES:
        found = list(_forms(model.size, collective, nbytes))
        yield Point(
            nbytes,
            {c: model.timing(collective, c.at(nbytes).along(order), nbytes, root).time_us for c in found},
        )


def _forms(size: int, collective: str, nbytes: int) -> Iterator[Candidate]:
    """The schedules, as a table names them."""
    for known in entries(collective):
        if known.grouped or not known.trusted or not known.allows(size):
            continue
        plain = Candidate(known.algorithm)
        yield plain
        if known.pipelined and known.algorithm != Algorithm.RING:
            cut = replace(plain, piece_nbytes=PIECE_NBYTES)
            if cut.pieces_at(nbytes) > 1:
                yield cut
    yield from mixes_for(collective, size)


def mixes_for(collective: str, size: int) -> tuple[Candidate, ...]:
    """Two at once, worth a look where there are two ways round, or a tree can spare a ring its steps."""
    names = MIXES if size > 2 and collective == "allreduce" else ()
    return tuple(Candidate.parse(collective, name) for name in names)


def in_pieces(
    model: Model, collective: str, candidate: Candidate, nbytes: float, root: int | None = None
) -> Prediction:
    """What the model says of a candidate with the pieces that serve it best."""
    one = model.predict(collective, candidate, nbytes, root)
    pieces = best_pieces(collective, candidate, one.steps, one.latency_us, one.time_us, nbytes)
    if pieces == 1:
        return one
    cut = model.predict(collective, replace(candidate, pieces=pieces), nbytes, root)
    return min(one, cut, key=lambda prediction: prediction.time_us)


def compare(model: Model, collective: str, nbytes: float, root: int | None = None) -> tuple[Prediction, ...]:
    """All candidates, mixes included where they gain, the fastest first.

    Ties keep the order of the catalogue, so that all ranks find the same.

    Args:
        collective: Name of the collective.
        nbytes: Bytes of the message; of one block, where the collective has one a rank.
        root: The root of a rooted collective; 0 by default.

    Raises:
        ArgumentError: There is no such collective.
    """
    found = candidates(collective, model.size, model.topology, model.gpus)
    root = 0 if COLLECTIVES[collective].rooted and root is None else root
    nbytes = 0 if collective == "barrier" else nbytes
    simple = [in_pieces(model, collective, candidate, nbytes, root) for candidate in found]
    ranked = sorted(simple, key=lambda prediction: prediction.time_us)
    mixes = list(_mixes(model, collective, ranked, nbytes, root)) if 2 < model.size <= MOST_PLANNED else []
    return tuple(sorted([*ranked, *mixes], key=lambda prediction: prediction.time_us))


def _mixes(
    model: Model, collective: str, ranked: list[Prediction], nbytes: float, root: int | None
) -> Iterator[Prediction]:
    """Two beside each other, where together they would keep every link less busy than either alone."""
    parts = [prediction.candidate for prediction in ranked[:_MOST_MIXED]]
    for part in list(parts):
        if part.algorithm in ("ring", "chain") and root is None:
            order = part.order or tuple(range(model.size))
            parts.append(replace(part, order=order[::-1]))
    best = ranked[0].time_us
    gains: list[tuple[float, int, Candidate]] = []
    for a, b in combinations(parts, 2):
        share, gain = _share(model, collective, a, b, nbytes, root)
        if gain < _WORTH_A_MIX:
            gains.append((gain, len(gains), replace(a, other=b, share=share)))
    for _, _, mix in sorted(gains)[:_MOST_MIXED]:
        prediction = model.predict(collective, mix, nbytes, root)
        if prediction.time_us < best:
            yield prediction


def _share(
    model: Model, collective: str, a: Candidate, b: Candidate, nbytes: float, root: int | None
) -> tuple[Fraction, float]:
    """The share of ``a`` with which the busiest link has least to do, and that over the better alone."""
    speed = model.network.bandwidth_gb_per_s * 1000
    alone = [model.timing(collective, candidate, nbytes, root).link_nbytes for candidate in (a, b)]
    busy = [np.pad(load, (0, len(speed) - len(load))) / speed for load in alone]
    least = min(load.max() for load in busy)
    if not least:
        return Fraction(1, 2), 1.0
    shares = [Fraction(part, _SHARES) for part in range(1, _SHARES)]
    worst = [float((busy[0] * float(x) + busy[1] * float(1 - x)).max()) for x in shares]
    chosen = int(np.argmin(worst))
    return shares[chosen], worst[chosen] / float(least)
