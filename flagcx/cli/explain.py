"""``flagcx explain``: which algorithm a call would use on a machine, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flagcx.errors import FlagcxError

if TYPE_CHECKING:
    from rich.table import Table

    from flagcx.selection.explain import Explanation


def explain(
    collective: Annotated[str, typer.Argument(help="allreduce, allgather, broadcast, ...")],
    nbytes: Annotated[
        str,
        typer.Option(
            "--nbytes", "-b", help="Bytes of the message (of one block, where each rank has one): 64MiB, 1e6."
        ),
    ],
    topology: Annotated[
        str, typer.Option("--topology", "-t", help="A preset (dgx-a100, ...) or a topology file.")
    ],
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", min=1, help="How many ranks; one for each GPU by default.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the algorithms for a call on a machine (steps, bytes, busiest link, time) and choose."""
    from flagcx.cli.sizes import machine_for, parse_nbytes
    from flagcx.selection import explain as explaining

    try:
        machine = machine_for(topology, ranks)
        size = len(machine.gpus) if ranks is None else ranks
        found = explaining.explain(collective, parse_nbytes(nbytes), size, machine)
    except FlagcxError as error:
        typer.echo(f"flagcx explain: {error}", err=True)
        raise typer.Exit(2) from None
    if json:
        typer.echo(found.to_json())
        return
    from rich.console import Console

    console = Console()
    console.print(rich_table(found))
    console.print(found.reason, highlight=False, markup=False)


def rich_table(found: Explanation) -> Table:
    """The explanation's candidates as a table for terminals."""
    from rich.markup import escape
    from rich.table import Table

    head, *body = found.cells()
    table = Table(title=escape(found.title), title_justify="left")
    for column, text in enumerate(head):
        left = column in (0, 3, len(head) - 1)
        table.add_column(text, justify="left" if left else "right", no_wrap=not left)
    for number, cells in enumerate(body):
        table.add_row(*map(escape, cells), style="bold" if number == 0 else None)
    return table
