"""All-reduces of rows with an epilogue in one kernel, through packets in the peers' memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flagcx.kernels.peer import PeerLayout
from flagcx.kernels.rows import MOST_COLUMNS
from flagcx.transport.base import Call
from flagcx.transport.device import address, check_alignment
from flagcx.transport.rows import RowArrays, RowLaunch, Rows, RowShape
from flagcx.transport.stream_order import StreamOrder

_AHEAD_PACKS = 1024
"""Packs that a block sends before it waits for those of the first row, at least."""


@dataclass(frozen=True, slots=True)
class RowGrid:
    """The shape of a launch.

    Attributes:
        form: "one_shot" or "two_shot".
        blocks: Blocks of threads.
        share: Packs of a row that each rank adds up, in two-shot.
        ahead: Rows that a block sends before it finishes one.
    """

    form: str
    blocks: int
    share: int
    ahead: int


def row_grid(form: str, rows: Rows, layout: PeerLayout) -> RowGrid | None:
    """The grid for a form, the same on every rank; None where the rows are too many or too long for it.

    Example:
        >>> from flagcx.dtypes import dtype_of
        >>> from flagcx.kernels.epilogue import Epilogue
        >>> kind = dtype_of("float16")
        >>> row_grid("one_shot", Rows(64, 4096, kind, Epilogue((), (), (), kind)), PeerLayout(2, 48, True))
        RowGrid(form='one_shot', blocks=48, share=256, ahead=2)
    """
    if form not in ("one_shot", "two_shot") or rows.columns > MOST_COLUMNS:
        return None
    packs = RowShape.of(rows.columns, rows.dtype.numpy.itemsize).packs
    blocks = min(rows.rows, layout.blocks)
    most = -(-rows.rows // blocks) if blocks else 0
    share = -(-packs // layout.ranks)
    fits = most * packs <= layout.most_bare if form == "one_shot" else most * share <= layout.most_bare // 2
    return RowGrid(form, blocks, share, max(_AHEAD_PACKS // max(packs, 1), 1)) if fits else None


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
        self._launch(places[0], places[1], places[2:], stream)
        order.leave(stream)

    def __repr__(self) -> str:
        return f"<PeerRows {self.call}>"
