"""What the model says of schedules on GPUs, as a table like those that are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flagcx.algorithms import Algorithm, entries
from flagcx.cost.model import Model
from flagcx.schedule.collectives import COLLECTIVES
from flagcx.selection.candidates import MOST_PLANNED
from flagcx.selection.candidates import Candidate as Modelled
from flagcx.selection.placement import FOLLOWS_ORDER, Order
from flagcx.selection.split_message import mix_of
from flagcx.selection.table import Candidate, Fit, Point, Table
from flagcx.topology.graph import Topology

MODELLED = ("allreduce", "reduce", "reduce_scatter")
"""The collectives that reduce: those that NCCL's own may not do, for want of the dtype or operation."""
SIZES = tuple(1 << power for power in range(8, 33, 3))
PIECES_NBYTES = (0, 4 << 20)
MIXES = ("ring|ring", "ring|double_binary_tree", "ring|two_shot", "ring 3/4|two_shot")
"""The mixes that are candidates on GPUs."""


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
        forms = _forms(model.size, collective, order, nbytes)
        yield Point(nbytes, {form: model.timing(laid, nbytes, root).time_us for form, laid in forms})


def _forms(
    size: int, collective: str, order: Order | None, nbytes: int
) -> Iterator[tuple[Candidate, Modelled]]:
    """Each schedule as a table names it, and as the model takes it."""
    for known in entries(collective):
        if known.grouped or not known.trusted or not known.allows(size):
            continue
        name = str(known.algorithm)
        along = order if known.algorithm in FOLLOWS_ORDER else None
        cut = known.pipelined and known.algorithm != Algorithm.RING
        for piece_nbytes in PIECES_NBYTES if cut else (0,):
            form = Candidate(name, piece_nbytes)
            pieces = form.pieces(nbytes)
            if not piece_nbytes or pieces > 1:
                yield form, Modelled(collective, name, pieces, along)
    for name in mixes_for(collective, size):
        yield Candidate(name), laid_mix(collective, name, size, order)


def mixes_for(collective: str, size: int) -> tuple[str, ...]:
    """The mixes worth a look: where there are two ways round, and where a tree can spare a ring its steps."""
    return MIXES if size > 2 and collective == "allreduce" else ()


def laid_mix(collective: str, name: str, size: int, order: Order | None) -> Modelled:
    """A mix as the model takes it."""
    mix = mix_of(collective, name)
    assert mix is not None
    there = order or tuple(range(size))
    first, second = (
        Modelled(collective, part, 1, way if part in FOLLOWS_ORDER else None)
        for part, way in (
            (mix.first, there),
            (mix.second, there[::-1] if mix.first == mix.second else there),
        )
    )
    return replace(first, other=second, share=mix.share)
