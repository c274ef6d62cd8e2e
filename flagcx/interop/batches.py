"""Batches of sends and receives (``dist.batch_isend_irecv``) on a group whose collectives are flagcx's.

torch joins them to one batch only for its own class of groups. Without the batch NCCL's sends and receives
may wait for each other for ever, so each operation is given the original group instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.distributed import distributed_c10d as c10d


def route_batches() -> None:
    """Gives operations on flagcx's groups the original one, until ``unroute_batches`` is called as often."""
    init = c10d.P2POp.__init__
    routes = getattr(init, "routes", None)
    if routes is not None:
        routes.append(None)
        return
    c10d.P2POp.__init__ = _routed(init)  # type: ignore[method-assign]


def unroute_batches() -> None:
    """Undoes one ``route_batches``."""
    init: Any = c10d.P2POp.__init__
    routes = getattr(init, "routes", None)
    if routes:
        routes.pop()
        if not routes:
            c10d.P2POp.__init__ = init.__wrapped__  # type: ignore[method-assign]


def _routed(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def routed(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        original = getattr(self.group, "original", None)
        if original is not None:
            ranks = c10d._world.pg_group_ranks
            ranks.setdefault(original, ranks[self.group])
            self.group = original

    routed.routes = [None]  # type: ignore[attr-defined]
    return routed
