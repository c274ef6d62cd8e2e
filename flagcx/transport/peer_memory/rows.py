"""All-reduces of rows with an epilogue in one kernel, through packets in the peers' memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flagcx.kernels.peer import PeerLayout
from flagcx.kernels.rows import MOST_COLUMNS, RowShape
from flagcx.transport.base import Call
from flagcx.transport.device import address, check_alignment
from flagcx.transport.rows import RowArrays, RowLaunch, Rows
from flagcx.transport.stream_order import StreamOrder

_AHEAD_PACKS = 1024
"""Packs that a block sends before it waits for those of the first row, at least."""
_LARGEST_CLUSTER, _MOST_IN_CLUSTERS = 8, 48
"""Most blocks of a cluster, and of all clusters of a launch."""
_LEAST_PACKS, _SHORT_PACKS = 256, 512
"""Least packs of a row for each block of a cluster; and most packs for which one block is faster (H200)."""


@dataclass(frozen=True, slots=True)
class RowGrid:
    """The shape of a launch.

    Attributes:
        form: "one_shot" or "two_shot".
        blocks: Blocks of threads.
        shape: How they share a row.
        ahead: Rows that a block sends before it finishes one.
    """

    form: str
    blocks: int
    shape: RowShape
    ahead: int


def row_grid(form: str, rows: Rows, layout: PeerLayout) -> RowGrid | None:
    """The grid for a form, the same on every rank; None where the rows are too many or too long for it.

    Example:
        >>> from flagcx.dtypes import dtype_of
        >>> from flagcx.kernels.epilogue import Epilogue
        >>> kind = dtype_of("float16")
        >>> rows = Rows(64, 4096, kind, Epilogue((), (), (), kind))
        >>> grid = row_grid("one_shot", rows, PeerLayout(2, 48, True))
        >>> grid.blocks, grid.shape.threads
        (48, 512)
    """
    if form not in ("one_shot", "two_shot") or rows.columns > MOST_COLUMNS:
        return None
    itemsize = rows.dtype.numpy.itemsize
    shape = RowShape.of(rows.columns, itemsize)
    while layout.clusters and _may_double(shape, rows.rows, layout):
        shape = RowShape.of(rows.columns, itemsize, 2 * shape.cluster)
    groups = min(rows.rows, layout.blocks // shape.cluster)
    most = -(-rows.rows // groups) if groups else 0
    if form == "one_shot":
        fits = most * shape.places <= layout.most_bare
    else:
        fits = most * shape.share(layout.ranks) <= layout.most_bare // 2
    ahead = max(_AHEAD_PACKS // shape.places, 1)
    return RowGrid(form, groups * shape.cluster, shape, ahead) if fits else None


def _may_double(shape: RowShape, rows: int, layout: PeerLayout) -> bool:
    """Whether twice as many blocks may share a row: all clusters must find their place on the GPU at once."""
    cluster = 2 * shape.cluster
    fits = rows * cluster <= min(layout.blocks, _MOST_IN_CLUSTERS) and cluster <= _LARGEST_CLUSTER
    return fits and shape.packs > _SHORT_PACKS and shape.packs >= cluster * _LEAST_PACKS


class PeerRows:
    """One launch of the kernel for rows.

    Args:
        call: The all-reduce, with the epilogue in its words.
        rows: The operation.
        launch: The kernel.
        order: The communicator's order.
        check: Raises an error if a wait on the GPU has timed out.
    """

    __slots__ = ("__weakref__", "_check", "_launch", "_odd", "_order", "_signature", "call", "rows")

    def __init__(
        self, call: Call, rows: Rows, launch: RowLaunch, order: StreamOrder, check: Callable[[], None]
    ) -> None:
        self.call, self.rows, self._launch, self._order, self._check = call, rows, launch, order, check
        self._signature = call.signature()
        self._odd = [
            1 if dtype is None else dtype.numpy.alignment
            for dtype in (rows.dtype, rows.epilogue.out, *rows.epilogue.dtypes)
        ]

    def run(self, sendbuf: RowArrays, recvbuf: Any) -> None:
        """Enqueues the call on the current stream."""
        order = self._order
        places = [address(array, order) for array in (sendbuf.x, recvbuf, *sendbuf.operands)]
        for alignment, at in zip(self._odd, places, strict=True):
            if at % alignment:
                check_alignment(alignment, at)
        stream = order.enter(self.call, self._signature)
        self._check()
        self._launch(places, stream)
        order.leave(stream)

    def __repr__(self) -> str:
        return f"<PeerRows {self.call}>"
