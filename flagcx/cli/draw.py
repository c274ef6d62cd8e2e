"""``flagcx draw``: the schedule of an algorithm, as a table of steps or as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flagcx.cli.own_algorithms import Load, load_algorithms
from flagcx.cli.start_ranks import reporting_errors


def draw(
    collective: Annotated[str, typer.Argument(help="allreduce, allgather, broadcast, ...")],
    algorithm: Annotated[
        str, typer.Argument(help="ring, double_binary_tree, ..., two at once: 'ring|ring', or one of --load.")
    ],
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, help="How many ranks.")] = 4,
    root: Annotated[int, typer.Option("--root", "-r", help="The root, of a rooted collective.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw to that .png, .svg or .pdf file instead.")
    ] = None,
    load: Load = None,
) -> None:
    """Show which rank sends which part of the message to which other rank in each step of an algorithm."""
    from flagcx.algorithms.candidate import Candidate
    from flagcx.schedule.collectives import COLLECTIVES
    from flagcx.schedule.draw import draw as draw_schedule
    from flagcx.schedule.draw import text

    with reporting_errors("draw"):
        load_algorithms(load)
        candidate = Candidate.parse(algorithm)
        candidate.entries(collective)  # refuses names that are not known
        schedule = candidate.build(collective, ranks, root if COLLECTIVES[collective].rooted else None)
        if output is None:
            typer.echo(text(schedule))
        else:
            draw_schedule(schedule, output)
            typer.echo(f"drawn to {output}", err=True)
