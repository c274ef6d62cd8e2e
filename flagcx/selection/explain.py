"""Why a call runs as it does: all candidates, with what the models say and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from flagcx.algorithms import Algorithm, entries, entry
from flagcx.algorithms.candidate import Candidate, Groups, Order
from flagcx.algorithms.packages import load_packages
from flagcx.cost import nccl, peer_memory
from flagcx.cost.model import DEVICE_COSTS, LinkLoad, Prediction, model_of
from flagcx.cost.simulate import Costs, message_nbytes
from flagcx.dtypes import dtype_of, resolve_op
from flagcx.errors import ArgumentError, ScheduleError
from flagcx.kernels.peer import MOST_RANKS, PROTOCOLS, PeerLayout, may_be_bare
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.selection.candidates import Request
from flagcx.selection.explanation import Explanation, Row, in_order
from flagcx.selection.predicted import compare
from flagcx.selection.rules import CLEARLY, Rules
from flagcx.topology import LinkKind, Topology
from flagcx.topology.loads import pair_loads
from flagcx.topology.routes import Routes
from flagcx.transport.peer_memory.resource import protocols_in

BLOCKS = 128
"""Blocks of threads that a communicator has where each rank has a GPU of its own."""
TOO_LONG = "too long for packets"
NO_PACKETS = "no packets carry this"
NOT_KNOWN = "whether these GPUs reach each other's memory is known on the machine alone"
GROUPED = "needs ranks in groups, such as those of several hosts"


def _row(
    request: Request,
    candidate: Candidate,
    found: Prediction | None = None,
    measured_us: float | None = None,
    obstacle: str = "",
    named_only: bool = False,
) -> Row:
    """A candidate's row; without a prediction, its steps and bytes by the catalogue's closed forms."""
    collective, nbytes, size, *_ = request
    pieces, facts = candidate.pieces, {}
    if found is not None:
        names = ("steps", "sent_nbytes", "bottleneck", "latency_us")
        facts = {name: getattr(found, name) for name in names}
        if not obstacle:
            facts |= {"predicted_us": found.time_us, "plain_us": found.plain_us}
            if found.spread is not None:
                facts |= {
                    "low_us": found.time_us * found.spread[0],
                    "high_us": found.time_us * found.spread[1],
                }
    elif size > 1 and candidate.other is None and candidate.algorithm != Algorithm.NATIVE:
        known = entry(collective, candidate.algorithm)
        if known.allows(size):
            sent = float(known.sent(size, pieces)) * message_nbytes(collective, size, nbytes)
            facts = {"steps": known.steps(size, pieces), "sent_nbytes": sent}
    names_of = (candidate.name, candidate.label, pieces)
    facts |= {"protocol": candidate.protocol, "obstacle": obstacle, "named_only": named_only}
    return Row(*names_of, measured_us=measured_us, **facts)


# -- over a topology -------------------------------------------------------------------------------


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
    report: Callable[[int, int, str], object] = lambda done, total, what: None,
) -> Explanation:
    """Compares all candidates of a call on a machine, and says why the best is chosen.

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
        report: ``report(done, total, what)`` hears how far it is.

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
    request, known = Request(collective, nbytes, size), measured or {}
    model = model_of(topology, size, gpus, costs)
    load_packages()
    found = [(one, "") for one in compare(model, collective, nbytes, root, report)]
    found += unscheduled(request, topology, model.gpus)
    own = {str(one.algorithm) for one in entries(collective) if not one.trusted}
    rows = in_order(
        [
            _row(request, one, what, known.get(one.name), why, one.algorithm in own)
            for one, what, why in ((what.candidate, what, why) for what, why in found)
        ]
    )
    return Explanation(collective, nbytes, size, topology.name, tuple(rows), reason_for(rows))


def unscheduled(
    request: Request, topology: Topology, gpus: Sequence[int]
) -> Iterator[tuple[Prediction, str]]:
    """What runs without a schedule for float32 arrays: NCCL's own, and what goes through the peers' memory.

    Args:
        request: What is asked for.
        topology: The machine.
        gpus: The GPU of each rank.

    Yields:
        What the model says, and why it is not possible; empty where it is. Nothing for NCCL's own where the
        model does not know it.
    """
    collective, nbytes, size, *_ = request
    native = nccl.predict(collective, nbytes, size, topology, gpus)
    if native is not None:
        yield native, ""
    dtype = dtype_of("float32")
    one_host = len({topology.gpu(gpu).host for gpu in gpus}) == 1
    if not (1 < size <= MOST_RANKS and one_host and nbytes):
        return
    reduces = COLLECTIVES[collective].reduces
    op = resolve_op("sum", dtype) if reduces else None
    flagged = not (reduces and may_be_bare("one_shot", dtype))
    layout, links = PeerLayout(size, BLOCKS, one_gpu=False), peer_memory.links_over(topology, gpus)
    narrow, by_nvlink = _narrowest(topology, gpus)
    for algorithm in (str(known.algorithm) for known in entries(collective)):
        able = protocols_in(layout, collective, algorithm, nbytes, dtype, op)
        for protocol in PROTOCOLS if able else ():
            candidate = Candidate(algorithm, 1, protocol)
            found = peer_memory.predict(candidate, collective, nbytes, size, links, flagged)
            if not by_nvlink:
                yield found, NOT_KNOWN
            elif protocol not in able:
                small = protocols_in(layout, collective, algorithm, dtype.numpy.itemsize, dtype, op)
                yield found, TOO_LONG if protocol in small else NO_PACKETS
            else:
                # What a rank sends goes to all peers in equal parts.
                sent = found.sent_nbytes / (size - 1) * narrow.nbytes
                busy = sent / narrow.bandwidth_gb_per_s / 1e3 / found.time_us
                yield replace(found, bottleneck=replace(narrow, nbytes=sent, busy=busy)), ""


def _narrowest(topology: Topology, gpus: Sequence[int]) -> tuple[LinkLoad, bool]:
    """The link that is busy longest if every rank sends a byte to every other, and whether all is NVLink."""
    pairs = pair_loads(topology, gpus, Routes(topology))
    load = pairs.load.sum(axis=(0, 1))
    worst = int((load / pairs.capacity).argmax())
    kinds = [topology.links_of(a)[b].kind for a, b in pairs.edges]
    bandwidth, nbytes = float(pairs.capacity[worst]), float(load[worst])
    narrow = LinkLoad(*pairs.edges[worst], kinds[worst].value, bandwidth, nbytes, 0.0)
    return narrow, set(kinds) == {LinkKind.NVLINK}


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


# -- of a communicator -----------------------------------------------------------------------------


def explain_call(
    request: Request,
    choice: Candidate,
    rules: Rules,
    times_us: Mapping[Candidate, float],
    note: str = "",
    place: tuple[Order | None, Groups | None] = (None, None),
) -> Explanation:
    """Explains the choice for a communicator's call beside all that could be.

    Args:
        request: What is asked for.
        choice: What would run, before it is placed along the machine's links.
        rules: What there is to choose from.
        times_us: The times of the candidates that were measured.
        note: Where these come from, or why there are none.
        place: The order and groups that candidates are placed along.
    """
    collective, nbytes, size, *_ = request
    if nbytes < 0:
        raise ArgumentError(f"nbytes={nbytes!r}; expected 0 or more")
    load_packages()
    measured: dict[Candidate, float] = {}
    for one in sorted(times_us, key=lambda one: (not one.piece_nbytes, one.piece_nbytes)):
        # Of candidates that are cut alike here, the last counts: that with no pieces, or the longest.
        measured[one.at(nbytes)] = times_us[one]

    def row(candidate: Candidate) -> Row:
        obstacle = "" if candidate == choice else rules.obstacle(candidate, request)
        found = None if obstacle else rules.predict(candidate.along(*place), request)
        return _row(request, candidate, found, measured.get(candidate), obstacle)

    serving = (one for one in measured if not rules.obstacle(one, request))
    rows = [row(one) for one in dict.fromkeys([*rules.candidates(request), *serving, choice])]
    rows += _excluded(request, {one.algorithm for one in rows})
    rows += _own(request, rules, measured, place)
    missing = rules.unavailable(choice)
    if missing is not None:
        rows.append(row(missing))
    ordered = in_order(rows)
    first = next(one for one in ordered if one.name == choice.name)
    others = [one for one in ordered if one is not first]
    doubt = _doubt(first, others) if rules.doubts(request) else ""
    reason = f"{first.name}: {choice.reason}{doubt}."
    return Explanation(collective, nbytes, size, rules.where, (first, *others), reason, note)


def _excluded(request: Request, taken: Iterable[str]) -> Iterator[Row]:
    """The algorithms that serve the collective and are not taken at all, with the reason."""
    for known in entries(request.collective):
        name = str(known.algorithm)
        if name in taken or not known.trusted:
            continue
        obstacle = f"it cannot serve {request.size} ranks: {known.refusal(request.size)}"
        if known.allows(request.size):
            obstacle = GROUPED if known.grouped else "it has no use here"
        yield _row(request, Candidate(name), obstacle=obstacle)


def _own(
    request: Request,
    rules: Rules,
    measured: Mapping[Candidate, float],
    place: tuple[Order | None, Groups | None],
) -> Iterator[Row]:
    """The algorithms that the user, or a package, registered, with what the model says of them."""
    for known in entries(request.collective):
        if known.trusted:
            continue
        one = Candidate(known.algorithm)
        try:
            obstacle = known.refusal(request.size)
            found = None if obstacle else rules.predict(one.along(*place), request)
        except ScheduleError as error:  # verified for this number of ranks only now
            obstacle, found = str(error), None
        yield _row(request, one, found, measured.get(one), obstacle, named_only=True)


def _doubt(chosen: Row, others: Sequence[Row]) -> str:
    """What the model would take, where it differs from a choice that no measurement backs."""
    if chosen.measured_us is not None or not chosen.predicted_us:
        return ""
    for row in others:
        if row.predicted_us and not row.obstacle and row.predicted_us < CLEARLY * chosen.predicted_us:
            return f"; the model would take {row.name}, which flagcx tune would settle"
    return ""
