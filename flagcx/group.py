"""Several calls put together: small all-reduces of one kind travel as one, transfers all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

FUSED_NBYTES = 4 << 20
"""An all-reduce larger than this gains nothing from company."""


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


def run_group(pending: Iterable[Pending]) -> None:
    """Makes the calls in order; neighbours that belong together become one."""
    batch: list[Pending] = []
    for call in pending:
        if batch and (call.key is None or call.key != batch[0].key):
            _run_batch(batch)
            batch = []
        batch.append(call)
    if batch:
        _run_batch(batch)


def _run_batch(batch: list[Pending]) -> None:
    first = batch[0]
    if len(batch) == 1 or first.together is None:
        for call in batch:
            call.run()
    else:
        first.together([call.item for call in batch])


def fused(arrays: list[np.ndarray], reduce: Callable[[np.ndarray], object]) -> None:
    """Puts arrays of one dtype end to end, reduces them as one in place, and puts the results back."""
    flat = np.concatenate([a.reshape(-1) for a in arrays])
    reduce(flat)
    start = 0
    for array in arrays:
        array.reshape(-1)[...] = flat[start : start + array.size]
        start += array.size
