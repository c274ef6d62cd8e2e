"""``flagcx simulate``: the time of one algorithm on a machine, and the load of its links."""

from __future__ import annotations

import json as json_format
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flagcx.cli.machines import GpuModel, NetworkSpeed, Sm, capability, machine_of
from flagcx.cli.over_hosts import LINK, Hosts, Link, simulated_over_hosts
from flagcx.cli.own_algorithms import Load, load_algorithms
from flagcx.errors import ArgumentError, FlagcxError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from flagcx.algorithms.candidate import Candidate
    from flagcx.cost.model import Model
    from flagcx.cost.simulate import Moment, Timing
    from flagcx.topology import Topology

_MOST_LINKS = 32
_MOST_LISTED = 4096
_MOST_DRAWN = 4000
_MOST_TRACED = 200_000


def simulate(
    algorithm: Annotated[
        str,
        typer.Option(
            "--algorithm",
            "-a",
            help="ring, double_binary_tree, ..., two at once: 'ring|ring', or what else explain lists: "
            "native, 'two_shot (peer_memory)'.",
        ),
    ],
    nbytes: Annotated[
        str,
        typer.Option(
            "--nbytes", "-b", help="Bytes of the message (of one block, where each rank has one): 64MiB, 1e6."
        ),
    ],
    topology: Annotated[
        str | None, typer.Option("--topology", "-t", help="A preset (dgx-a100, ...) or a topology file.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", min=1, help="How many ranks; one for each GPU by default.")
    ] = None,
    collective: Annotated[str, typer.Option("--collective", "-c")] = "allreduce",
    network_gb_per_s: NetworkSpeed = None,
    sm: Sm = None,
    gpu_model: GpuModel = None,
    pieces: Annotated[
        int | None,
        typer.Option("--pieces", "-k", min=1, max=8192, help="Pieces that follow each other; by the model."),
    ] = None,
    order: Annotated[
        str,
        typer.Option(
            "--order", "-o", help="Ranks along the ring or chain: plan, index, or a list such as 0,3,2,1."
        ),
    ] = "plan",
    network_only: Annotated[
        bool, typer.Option("--network-only", help="Leave out the costs of a call at its ranks.")
    ] = False,
    hosts: Hosts = None,
    link: Link = LINK,
    load: Load = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the messages over time, to a .png, .svg or .pdf file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the messages over time as a trace for Perfetto, a JSON file.")
    ] = None,
) -> None:
    """Time an algorithm on a machine or hosts that you need not have: time, bandwidth, load of links."""
    from flagcx.cli.sizes import parse_nbytes

    try:
        count = parse_nbytes(nbytes)
        load_algorithms(load)
        chip = capability(sm, gpu_model)
        if topology is not None and hosts is not None:
            raise ArgumentError("--topology and --hosts exclude each other: GPUs, or NumPy arrays over hosts")
        if topology is None:
            _check_over_hosts(hosts, ranks, chip, network_gb_per_s, pieces, order, network_only, plot, trace)
            report = simulated_over_hosts(collective, algorithm, count, str(hosts), link)
        else:
            machine = partial(machine_of, topology, ranks, chip, network_gb_per_s)
            how = (collective, algorithm, count, pieces, order)
            report = _on_machine(machine, ranks, network_only, plot, trace, *how)
    except FlagcxError as error:
        typer.echo(f"flagcx simulate: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(json_format.dumps(report, allow_nan=False) if json else _text(report))
    for path, what in ((plot, "drawn"), (trace, "traced")):
        if path is not None:
            typer.echo(f"{what} to {path}", err=True)


def _on_machine(
    machine: Callable[[], Topology],
    ranks: int | None,
    network_only: bool,
    plot: Path | None,
    trace: Path | None,
    collective: str,
    algorithm: str,
    nbytes: int,
    pieces: int | None,
    order: str,
) -> dict[str, Any]:
    """What the model says of GPUs; draws and traces it."""
    from flagcx.cost.model import DEVICE_COSTS, model_of
    from flagcx.cost.simulate import Costs

    scheduled = not _unscheduled(algorithm)
    if scheduled:
        _check_names(collective, algorithm)
    _check_files(scheduled, algorithm, plot, trace)
    topology = machine()
    costs = Costs() if network_only else DEVICE_COSTS
    model = model_of(topology, ranks or len(topology.gpus), None, costs)
    if not scheduled:
        return _priced(model, collective, algorithm, nbytes)
    candidate = _candidate(model, collective, algorithm, nbytes, pieces, order)
    timing = model.timing(collective, candidate, nbytes)
    for path, write in ((plot, _draw), (trace, _trace)):
        if path is not None:
            write(model, collective, candidate, nbytes, path)
    return _report(model, collective, algorithm, candidate, timing)


def _check_over_hosts(hosts: str | None, *others: Any) -> None:
    """Refuses hosts that are not named, and options that are about GPUs or their schedules."""
    if hosts is None:
        raise ArgumentError("which machine? Name one by --topology, or hosts by --hosts, such as 4,4")
    if any(other not in (None, False, "plan") for other in others):
        raise ArgumentError("with --hosts go --collective, --algorithm, --nbytes, --link, --load and --json")


def _unscheduled(algorithm: str) -> bool:
    """Whether ``flagcx explain`` lists it as something that runs without a schedule."""
    return algorithm == "native" or algorithm.endswith(")")


def _priced(model: Model, collective: str, algorithm: str, nbytes: int) -> dict[str, Any]:
    """What the model says of NCCL's own, or of what goes through the peers' memory."""
    from flagcx.cost.simulate import message_nbytes
    from flagcx.schedule.collectives import bus_share
    from flagcx.selection.candidates import Request
    from flagcx.selection.explain import unscheduled

    found = {
        one.candidate.name: (one, why)
        for one, why in unscheduled(Request(collective, nbytes, model.size), model.topology, model.gpus)
    }
    if algorithm not in found:
        known = ", ".join(found) or "nothing"
        raise ArgumentError(
            f"no model of {algorithm!r} for {collective} on {model.topology.name}; besides schedules, "
            f"there is one of {known} (peers' memory: on one host)"
        )
    one, why = found[algorithm]
    if why:
        raise ArgumentError(f"{algorithm} of {collective} cannot be priced here: {why}")
    total = message_nbytes(collective, model.size, nbytes)
    speed = total / one.time_us / 1000
    low, high = one.spread or (1.0, 1.0)
    return {
        "topology": model.topology.name,
        "collective": collective,
        "algorithm": algorithm,
        "candidate": algorithm,
        "ranks": model.size,
        "pieces": 1,
        "nbytes": total,
        "steps": one.steps,
        "time_us": one.time_us,
        "low_us": one.time_us * low,
        "high_us": one.time_us * high,
        "plain_us": one.plain_us,
        "algbw_gb_per_s": speed,
        "busbw_gb_per_s": speed * bus_share(collective, model.size),
        "sent_nbytes": one.sent_nbytes,
        "links_used": 0,
        "links": [],
    }


def _check_names(collective: str, algorithm: str) -> None:
    """Refuses an algorithm, or one of a pair, that does not serve the collective."""
    from flagcx.algorithms.candidate import Candidate

    Candidate.parse(algorithm).entries(collective)


def _candidate(
    model: Model, collective: str, algorithm: str, nbytes: int, pieces: int | None, order: str
) -> Candidate:
    from dataclasses import replace

    from flagcx.algorithms.candidate import FOLLOWS_ORDER, Candidate
    from flagcx.selection.candidates import candidates
    from flagcx.selection.predicted import in_pieces

    known = candidates(collective, model.size, model.topology, model.gpus)
    asked = Candidate.parse(algorithm)
    first, *others = asked.entries(collective)
    if pieces is not None and pieces > 1 and (others or not first.pipelined):
        raise ArgumentError(
            f"algorithm={algorithm!r} of {collective} is not pipelined, got --pieces {pieces}"
        )

    ranks = None if order in ("plan", "index") else _ranks(order, model.size)

    def plain(one: Candidate) -> Candidate:
        """The algorithm in the order that is asked for, and in the groups that the machine has."""
        named = [found for found in known if found.algorithm == one.algorithm] or [Candidate(one.algorithm)]
        found = named[-1 if order == "plan" else 0]
        return replace(found, order=ranks) if ranks and one.algorithm in FOLLOWS_ORDER else found

    if asked.other is not None:
        return replace(plain(asked), other=plain(asked.other), share=asked.share)
    if pieces is not None:
        return replace(plain(asked), pieces=pieces)
    return in_pieces(model, collective, plain(asked), nbytes).candidate


def _ranks(text: str, size: int) -> tuple[int, ...]:
    """Reads an order of all ranks."""
    try:
        ranks = tuple(int(word) for word in text.split(","))
    except ValueError:
        ranks = ()
    if sorted(ranks) != list(range(size)):
        raise ArgumentError(
            f"--order {text!r} is no order of {size} ranks; expected plan, index, or each of 0 to {size - 1} "
            f"once, such as {','.join(map(str, [0, *range(min(size, 8) - 1, 0, -1)]))}"
        )
    return ranks


def _report(
    model: Model, collective: str, algorithm: str, candidate: Candidate, timing: Timing
) -> dict[str, Any]:
    from flagcx.cost.simulation import loads
    from flagcx.schedule.collectives import bus_share

    size, used = model.size, loads(model.network, timing)
    return {
        "topology": model.topology.name,
        "collective": collective,
        "algorithm": algorithm,
        "candidate": candidate.name,
        "ranks": size,
        "pieces": candidate.pieces,
        "nbytes": timing.nbytes,
        "steps": timing.steps,
        "time_us": timing.time_us,
        "algbw_gb_per_s": timing.algbw_gb_per_s,
        "busbw_gb_per_s": timing.algbw_gb_per_s * bus_share(collective, size),
        "sent_nbytes": float(timing.sent_nbytes.max(initial=0)),
        "links_used": len(used),
        "links": [
            {
                "link": [link.a, link.b],
                "kind": link.kind,
                "bandwidth_gb_per_s": link.bandwidth_gb_per_s,
                "nbytes": link.nbytes,
                "busy": link.busy,
            }
            for link in used[:_MOST_LISTED]
        ],
    }


def _text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['collective']}, {report['candidate']}: {report['ranks']} ranks on {report['topology']}",
        f"time {report['time_us']:.1f} us{_likely(report)}   algbw {report['algbw_gb_per_s']:.2f} GB/s   "
        f"busbw {report['busbw_gb_per_s']:.2f} GB/s   steps {report['steps']}",
    ]
    if report.get("plain_us"):
        lines.append(f"a plain call, with launch by the host: {report['plain_us']:.1f} us")
    width = max((len(" -> ".join(link["link"])) for link in report["links"][:_MOST_LINKS]), default=0)
    for link in report["links"][:_MOST_LINKS]:
        name = " -> ".join(link["link"]).ljust(width)
        lines.append(
            f"  {name}  {link['kind']:8} {link['bandwidth_gb_per_s']:7.1f} GB/s  "
            f"{link['nbytes']:14.0f} B  busy {link['busy']:6.1%}"
        )
    if report["links_used"] > _MOST_LINKS:
        lines.append(f"  and {report['links_used'] - _MOST_LINKS} less busy links")
    return "\n".join(lines)


def _likely(report: dict[str, Any]) -> str:
    if "low_us" not in report:
        return ""
    return f" (p10-p90 {report['low_us']:.1f}-{report['high_us']:.1f})"


def _check_files(scheduled: bool, algorithm: str, path: Path | None, trace: Path | None) -> None:
    """Refuses a file that cannot be written to, before the simulation."""
    from flagcx.figure import check_picture

    if not scheduled and (path or trace):
        raise ArgumentError(f"--plot and --trace show the messages of a schedule; {algorithm} has none")
    if path is not None:
        check_picture(path)


def _draw(model: Model, collective: str, candidate: Candidate, nbytes: int, path: Path) -> None:
    from flagcx.schedule.draw import draw_times

    moments = _moments(model, collective, candidate, nbytes, "--plot would draw", _MOST_DRAWN)
    title = f"{collective}, {candidate.name}: {nbytes} B, {model.size} ranks"
    draw_times(title, model.size, moments, path)


def _trace(model: Model, collective: str, candidate: Candidate, nbytes: int, path: Path) -> None:
    from flagcx.cli.simulated_trace import simulated_trace
    from flagcx.profiler.trace import write_trace

    moments = _moments(model, collective, candidate, nbytes, "--trace would write", _MOST_TRACED)
    write_trace(path, simulated_trace(model.size, moments))


def _moments(
    model: Model, collective: str, candidate: Candidate, nbytes: int, what: str, most: int
) -> Iterator[Moment]:
    """The messages of a schedule with their times, where they are not too many."""
    laid = model.laid(collective, candidate)
    messages = sum(
        count * sum(len(laid.rounds.kinds[b].source) for b in key) for key, count in laid.rounds.runs
    )
    if messages > most:
        raise ArgumentError(f"{what} {messages} messages; expected at most {most}: fewer ranks")
    return laid.moments(nbytes, model.costs)
