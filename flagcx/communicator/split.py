"""Makes communicators of parts of a communicator's ranks."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

import numpy as np

from flagcx.arguments import as_integer
from flagcx.communicator.caller import Caller
from flagcx.communicator.objects import allgather_object
from flagcx.errors import ArgumentError, ResourceError, text_of

C = TypeVar("C", bound=Caller)


def split(comm: C, color: int | None, key: int | None = None) -> C | None:
    """Makes one communicator for each color. All ranks must call it.

    Args:
        color: An integer from 0 up: ranks with the same color come together. None for a rank that joins none
            (elsewhere MPI.UNDEFINED).
        key: An integer: ranks are numbered by key, then by their rank here; by their rank where it is None.

    Returns:
        The communicator of this rank's color, or None.

    Raises:
        ArgumentError: This rank or another gave another color or key. All ranks raise it.
        ResourceError: This rank or another of its color has no memory or descriptor left. All of them raise
            it, and this communicator can be used as before.
    """
    cards = allgather_object(comm, _card(comm.rank, color, key), part_of="split")
    problem = next((problem for *_, problem in cards if problem), "")
    if problem:
        raise ArgumentError(problem)
    color = cards[comm.rank][0]
    members = sorted((k, q) for q, (c, k, _) in enumerate(cards) if c == color)
    ranks = [q for _, q in members]
    comm._splits += 1

    told = False

    def exchange(mine: bytes, problem: str = "") -> list[bytes]:
        nonlocal told
        told = True
        cards_of_all = allgather_object(comm, (problem, mine), part_of="split")
        for q in ranks:
            if cards_of_all[q][0] and q != comm.rank:
                raise ResourceError(f"split cannot be made, since rank {q} failed: {cards_of_all[q][0]}")
        return [cards_of_all[q][1] for q in ranks]

    if color is None:
        exchange(b"")
        return None
    hosts = [comm.hosts[q] for q in ranks]
    store = None if comm._store is None else comm._store.scoped(f"{comm._splits}.{ranks[0]}/", ranks)
    make: Any = type(comm)
    name = f"split {comm._splits} of {comm._name}"
    try:
        child: C = make(ranks.index(comm.rank), len(ranks), exchange, hosts, comm.config, store, name)
    except Exception as error:
        if not told:  # or this rank's next call would meet the exchange of the others
            with contextlib.suppress(ResourceError):  # of a rank that fails too
                exchange(b"", text_of(error))
        raise
    comm._children.add(child)
    return child


def _card(rank: int, color: Any, key: Any) -> tuple[int | None, int, str]:
    """What a rank tells the others: its color, its key, and what is wrong with them."""
    try:
        if isinstance(color, (bool, np.bool_)):  # as in split(comm.rank < 2)
            color = int(color)
        where = None if color is None else as_integer(color)
        number = rank if key is None else as_integer(key)
    except TypeError:
        where, number = -1, rank
    problem = ""
    if where is not None and where < 0:
        problem = (
            f"rank {rank} called split(color={color!r}, key={key!r}); expected integers, color from 0 up"
        )
        problem += ", or None for a rank that joins no communicator"
    return where, number, problem
