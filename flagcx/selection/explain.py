"""Why an algorithm is chosen: all candidates side by side, with what the model says and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flagcx.algorithms import Algorithm
from flagcx.cost import nccl as native
from flagcx.cost.model import DEVICE_COSTS, Prediction, model_of
from flagcx.cost.simulate import Costs
from flagcx.errors import ArgumentError
from flagcx.selection.candidates import MOST_PLANNED
from flagcx.selection.explain_peers import MOST_RANKS, peer_rows
from flagcx.selection.explanation import Explanation, Row, in_order
from flagcx.selection.predicted import compare
from flagcx.topology.graph import Topology


def explain(
    collective: str,
    nbytes: int,
    size: int,
    topology: Topology,
    gpus: Sequence[int] | None = None,
    *,
    root: int | None = None,
    costs: Costs = DEVICE_COSTS,
    measured: Mapping[str, float] | None = None,
) -> Explanation:
    """Compares all candidates of a call and says why the best is chosen.

    Args:
        collective: Name of the collective.
        nbytes: Bytes of the message; of one block, where the collective has one a rank.
        size: Number of ranks.
        topology: The machine or cluster that they run on.
        gpus: The GPU of each rank; the first ``size`` by index by default.
        root: The root of a rooted collective; 0 by default.
        costs: What a call costs at its ranks.
        measured: Times in us that were measured, by the candidates' names. A candidate that was measured
            goes before all that were not.

    Raises:
        ArgumentError: There is no such collective, or ``size`` or ``nbytes`` is out of range.
        TopologyError: There are fewer GPUs than ranks, or a GPU is unknown.

    Example:
        >>> from flagcx.topology import preset
        >>> explain("allreduce", 4096, 8, preset("dgx-a100")).chosen.algorithm
        'one_shot'
    """
    if size < 1 or nbytes < 0:
        raise ArgumentError(
            f"size={size!r} ranks and nbytes={nbytes!r}; expected at least 1 rank and 0 bytes"
        )
    known = measured or {}
    found = compare(model_of(topology, size, gpus, costs), collective, nbytes, root)
    rows = [_row(one, known.get(one.candidate.name)) for one in found]
    if 1 < size <= MOST_RANKS:
        chosen = [gpu.index for gpu in topology.gpus[:size]] if gpus is None else list(gpus)
        rows += peer_rows(collective, nbytes, topology, chosen, known)
    if collective == "allreduce" and 1 < size <= MOST_PLANNED:
        rows.append(native_row(nbytes, topology, size, gpus, known.get(str(Algorithm.NATIVE))))
    rows = in_order(rows)
    return Explanation(collective, nbytes, size, topology.name, tuple(rows), reason_for(rows))


def _row(one: Prediction, measured_us: float | None) -> Row:
    facts = one.candidate
    return Row(
        facts.name,
        facts.label,
        facts.pieces,
        one.steps,
        one.sent_nbytes,
        one.bottleneck,
        one.time_us,
        one.latency_us,
        measured_us,
    )


def native_row(
    nbytes: int, topology: Topology, size: int, gpus: Sequence[int] | None, measured_us: float | None
) -> Row:
    """NCCL's own all-reduce, which is no schedule: its time by closed forms, replayed as schedules are."""
    chosen = [gpu.index for gpu in topology.gpus[:size]] if gpus is None else gpus
    found = native.ways(topology, chosen)
    at = np.array([0.0, nbytes])
    latency, time = native.predict_us(found, at, native.FITTED, replayed=True).tolist()
    best = min(found, key=lambda way: float(way.time_us(at, native.FITTED, True)[1]))
    steps = int(sum(count for _, count in best.steps))
    sent = 2 * (size - 1) / size * nbytes if best.name == "ring" else float(nbytes)
    return Row("native", str(Algorithm.NATIVE), 1, steps, sent, None, time, latency, measured_us)


def reason_for(rows: Sequence[Row]) -> str:
    """Why the first row is chosen, in a sentence."""
    best = rows[0]
    if not best.steps:
        return f"{best.name}: there is nothing to send."
    others = [row for row in rows[1:] if (row.measured_us is None) == (best.measured_us is None)]
    if not others or not best.time_us or not others[0].time_us:
        return f"{_strength(best)}."
    return (
        f"{_strength(best)}; next comes {others[0].name} at "
        f"{others[0].time_us / best.time_us:.2f} times that."
    )


def _strength(best: Row) -> str:
    """What makes a row the best."""
    if best.measured_us is not None:
        return f"{best.name} was measured to be the fastest, {best.measured_us:.1f} us"
    predicted_us = best.predicted_us or 0.0
    if best.latency_us > 0.5 * predicted_us:
        steps = "1 step" if best.steps == 1 else f"{best.steps} steps"
        return f"{best.name}: latency decides, and its {steps} take {best.latency_us:.1f} us of it"
    if best.bottleneck is None:
        return f"{best.name}: bandwidth decides, and it comes nearest to what the links allow"
    return (
        f"{best.name}: bandwidth decides, and its busiest link, {best.bottleneck}, is at work for "
        f"{best.bottleneck.busy * predicted_us:.1f} of {predicted_us:.1f} us"
    )
