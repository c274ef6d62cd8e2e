"""A compiled call through the peers' memory: one launch with prepared arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from flagcx.transport.base import Call
from flagcx.transport.device import address, check_alignment
from flagcx.transport.peer_memory.grids import Grid
from flagcx.transport.peer_memory.replays import Graphs, Replays
from flagcx.transport.stream_order import StreamOrder


class PeerPlan:
    """One launch of a peer kernel.

    Args:
        call: The call.
        kernel: "bare packets", "flagged packets", "chunks" or "blocks", for people.
        launch: The driver's ``launchKernel``.
        function: The compiled kernel.
        grid: The shape of the launch; without blocks where there is nothing to do.
        args: The kernel's argument, a ``PeerArgs`` or ``MoveArgs``, without the arrays.
        order: The communicator's order.
        check: Raises an error if a wait on the GPU has timed out.
        handle_of: (address, bytes) -> the peers' handle of an array; 0 if they do not see it.
        nbytes: Bytes of the arrays; 0 if the kernel needs no handles.
        graphs: What makes graphs of launches that come back; None for none.
    """

    __slots__ = (
        "__weakref__", "_blocks", "_check", "_function", "_handle_of", "_keep", "_launch", "_nbytes", "_odd",
        "_order", "_params", "_replays", "_signature", "_threads", "args", "call", "grid", "kernel",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        kernel: str,
        launch: Any,
        function: Any,
        grid: Grid,
        args: Any,
        order: StreamOrder,
        check: Callable[[], None],
        handle_of: Callable[[int, int], int],
        nbytes: int,
        graphs: Graphs | None = None,
    ) -> None:
        self._order, self._check, self._handle_of = order, check, handle_of
        self.call, self.kernel, self.grid = call, kernel, grid
        self._launch, self.args, self._nbytes = launch, args, nbytes
        self._function, self._blocks, self._threads = function, grid.blocks, grid.threads
        self._signature = call.signature()
        self._odd = call.dtype.numpy.alignment - 1
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        self._replays = None if graphs is None else Replays(graphs)
        self._keep, self._params = pointers, ctypes.addressof(pointers)

    def run(self, sendbuf: Any, recvbuf: Any, others: tuple[int, ...] = ()) -> None:
        """Enqueues the call on the current stream; ``others`` are further addresses that it depends on."""
        order = self._order
        source = address(sendbuf, order)
        target = source if recvbuf is sendbuf else address(recvbuf, order)
        if (source | target) & self._odd:
            check_alignment(self._odd + 1, source, target)
        stream = order.enter(self.call, self._signature)
        if self._blocks:
            self._check()
            self._launch_on(stream, source, target, others)
        order.leave(stream)

    def _launch_on(self, stream: Any, source: int, target: int, others: tuple[int, ...]) -> None:
        args = self.args
        args.sendbuf, args.recvbuf = source, target
        if self._nbytes:
            handle = args.sendbuf_handle = self._handle_of(source, self._nbytes)
            other = args.recvbuf_handle = (
                handle if target == source else self._handle_of(target, self._nbytes)
            )
            if handle or other:  # another array may come to lie there
                self._enqueue(stream)
                return
        graph = None
        if self._replays is not None and not self._order.is_capturing(stream):
            graph = self._replays.find((source, target, *others), self._enqueue)
        if graph is None:
            self._enqueue(stream)
        else:
            graph.launch(stream)

    def _enqueue(self, stream: Any) -> None:
        self._launch(
            self._function.ptr, self._blocks, 1, 1, self._threads, 1, 1, 0, stream.ptr, self._params, 0
        )

    def __repr__(self) -> str:
        return f"<PeerPlan {self.call}, {self.kernel}>"
