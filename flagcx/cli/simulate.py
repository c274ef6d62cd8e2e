"""``flagcx simulate``: the time of one algorithm on a machine, and the load of its links."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flagcx.errors import ArgumentError, FlagcxError

if TYPE_CHECKING:
    from flagcx.algorithms.candidate import Candidate
    from flagcx.cost.model import Model
    from flagcx.cost.simulate import Timing

_MOST_LINKS = 32
_MOST_LISTED = 4096
_MOST_DRAWN = 4000
_PICTURES = (".png", ".svg", ".pdf")


def simulate(
    topology: Annotated[
        str, typer.Option("--topology", "-t", help="A preset (dgx-a100, ...) or a topology file.")
    ],
    algorithm: Annotated[
        str,
        typer.Option("--algorithm", "-a", help="ring, double_binary_tree, ..., or two at once: 'ring|ring'."),
    ],
    nbytes: Annotated[
        str,
        typer.Option(
            "--nbytes", "-b", help="Bytes of the message (of one block, where each rank has one): 64MiB, 1e6."
        ),
    ],
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", min=1, help="How many ranks; one for each GPU by default.")
    ] = None,
    collective: Annotated[str, typer.Option("--collective", "-c")] = "allreduce",
    pieces: Annotated[
        int | None, typer.Option("--pieces", "-k", min=1, help="Pieces that follow each other; by the model.")
    ] = None,
    network_only: Annotated[
        bool, typer.Option("--network-only", help="Leave out the costs of a call at its ranks.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the messages over time, to a .png, .svg or .pdf file.")
    ] = None,
) -> None:
    """Time an algorithm on a machine that you need not have: time, bandwidth, load of the links."""
    from flagcx.cli.sizes import machine_for, parse_nbytes
    from flagcx.cost.model import DEVICE_COSTS, model_of
    from flagcx.cost.simulate import Costs

    try:
        count = parse_nbytes(nbytes)
        _check_names(collective, algorithm)
        _check_picture(plot)
        machine = machine_for(topology, ranks)
        costs = Costs() if network_only else DEVICE_COSTS
        model = model_of(machine, ranks or len(machine.gpus), None, costs)
        candidate = _candidate(model, collective, algorithm, count, pieces)
        timing = model.timing(collective, candidate, count)
        report = _report(model, collective, algorithm, candidate, timing)
        if plot is not None:
            _draw(model, collective, candidate, count, plot)
    except FlagcxError as error:
        typer.echo(f"flagcx simulate: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(json_format.dumps(report, allow_nan=False) if json else _text(report))
    if plot is not None:
        typer.echo(f"drawn to {plot}", err=True)


def _check_names(collective: str, algorithm: str) -> None:
    """Refuses an algorithm, or one of a pair, that does not serve the collective."""
    from flagcx.algorithms.candidate import Candidate

    Candidate.parse(algorithm).entries(collective)


def _candidate(model: Model, collective: str, algorithm: str, nbytes: int, pieces: int | None) -> Candidate:
    from dataclasses import replace

    from flagcx.algorithms.candidate import Candidate
    from flagcx.selection.candidates import candidates
    from flagcx.selection.predicted import in_pieces

    known = candidates(collective, model.size, model.topology, model.gpus)
    asked = Candidate.parse(algorithm)
    first, *others = asked.entries(collective)
    if pieces is not None and pieces > 1 and (others or not first.pipelined):
        raise ArgumentError(
            f"algorithm={algorithm!r} of {collective} is not pipelined, got --pieces {pieces}"
        )

    def plain(one: Candidate) -> Candidate:
        """The algorithm with its ranks as they are, in the groups that the machine has."""
        return next((found for found in known if found.algorithm == one.algorithm), Candidate(one.algorithm))

    if asked.other is not None:
        return replace(plain(asked), other=plain(asked.other), share=asked.share)
    if pieces is not None:
        return replace(plain(asked), pieces=pieces)
    return in_pieces(model, collective, plain(asked), nbytes).candidate


def _report(
    model: Model, collective: str, algorithm: str, candidate: Candidate, timing: Timing
) -> dict[str, Any]:
    from flagcx.schedule.collectives import COLLECTIVES

    size = model.size
    kind = COLLECTIVES[collective]
    share = (size - 1) / size if kind.blocks else 1.0
    share = 2 * (size - 1) / size if collective == "allreduce" else share
    busiest = sorted(range(len(timing.link_busy)), key=lambda link: -timing.link_busy[link])
    network = model.network
    speeds = network.bandwidth_gb_per_s
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
        "busbw_gb_per_s": timing.algbw_gb_per_s * share,
        "sent_nbytes": float(timing.sent_nbytes.max(initial=0)),
        "links_used": int((timing.link_nbytes > 0).sum()),
        "links": [
            {
                "link": list(network.names[link]),
                "kind": network.kinds[link],
                "bandwidth_gb_per_s": float(speeds[link]),
                "nbytes": float(timing.link_nbytes[link]),
                "busy": float(timing.link_busy[link]),
            }
            for link in busiest[:_MOST_LISTED]
            if timing.link_nbytes[link] > 0
        ],
    }


def _text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['collective']}, {report['candidate']}: {report['ranks']} ranks on {report['topology']}",
        f"time {report['time_us']:.1f} us   algbw {report['algbw_gb_per_s']:.2f} GB/s   "
        f"busbw {report['busbw_gb_per_s']:.2f} GB/s   steps {report['steps']}",
    ]
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


def _check_picture(path: Path | None) -> None:
    """Refuses a file that cannot be drawn to, before the simulation."""
    if path is not None and path.suffix.lower() not in _PICTURES:
        raise ArgumentError(f"{path}: cannot draw to {path.suffix or 'no ending'!r}; use .png, .svg or .pdf")


def _draw(model: Model, collective: str, candidate: Candidate, nbytes: int, path: Path) -> None:
    from flagcx.schedule.draw import draw_times

    laid = model.laid(collective, candidate)
    messages = sum(
        count * sum(len(laid.rounds.kinds[b].source) for b in key) for key, count in laid.rounds.runs
    )
    if messages > _MOST_DRAWN:
        raise ArgumentError(
            f"--plot would draw {messages} messages; expected at most {_MOST_DRAWN}: fewer ranks"
        )
    title = f"{collective}, {candidate.name}: {nbytes} B, {model.size} ranks"
    try:
        draw_times(title, model.size, laid.moments(nbytes, model.costs), path)
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be written: {error.strerror or error}") from None
