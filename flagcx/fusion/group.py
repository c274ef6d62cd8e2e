"""Several calls put together: all-reduces travel in few messages, transfers all at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flagcx.executor.host import Executor
from flagcx.fusion.fuse import Fusion
from flagcx.fusion.reductions import Like, Reductions, never


@dataclass(frozen=True, slots=True)
class Pending:
    """A call that waits for the end of its group.

    Attributes:
        run: Makes the call alone.
        key: Calls in a row with the same key (not None) may be made together.
        together: Makes calls with the same key together, given what each has as ``item``.
        item: What ``together`` needs of this call.
    """

    run: Callable[[], object]
    key: tuple | None = None
    together: Callable[[list[Any]], object] | None = None
    item: Any = None


class Group:
    """The calls of a ``with comm.group():`` block, in order.

    Args:
        fusion_of: Gives the ``Fusion`` of an executor.

    Attributes:
        add_quickly: Adds an all-reduce in place like one that was added before: ``add_quickly(x, op)``
            returns whether it could.
    """

    def __init__(self, fusion_of: Callable[[Executor], Fusion]) -> None:
        self._fusion_of = fusion_of
        self._entries: list[Pending | Reductions] = []
        self._open: Reductions | None = None
        self._like = Like()
        self.add_quickly: Callable[[Any, Any], bool] = never

    def append(self, call: Pending | Reductions) -> None:
        """Adds any call, which runs after all that were added before."""
        self.close()
        self._entries.append(call)

    def close(self) -> None:
        """Ends the all-reduces at the end, so that the next one begins new ones."""
        self._open, self.add_quickly, self._like.kind = None, never, None

    def reductions(self) -> Reductions:
        """The all-reduces at the end, to which one more can be added."""
        if self._open is None:
            self._open = Reductions(self._fusion_of, self._like)
            self._entries.append(self._open)
            self.add_quickly = self._open.add_quickly
        return self._open

    def run(self) -> None:
        """Makes the calls in order; neighbours that belong together become one."""
        batch: list[Pending] = []
        for entry in self._entries:
            if isinstance(entry, Reductions):
                _run_batch(batch)
                batch = []
                entry.run()
                continue
            if batch and (entry.key is None or entry.key != batch[0].key):
                _run_batch(batch)
                batch = []
            batch.append(entry)
        _run_batch(batch)


def _run_batch(batch: list[Pending]) -> None:
    if len(batch) > 1 and batch[0].together is not None:
        batch[0].together([call.item for call in batch])
        return
    for call in batch:
        call.run()
