"""A compiled call through the peers' memory: one launch with prepared arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from flagcx.transport.base import Call
from flagcx.transport.device import address, check_alignment
from flagcx.transport.peer_memory.grids import Grid
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
    """

    __slots__ = (
        "__weakref__", "_blocks", "_check", "_function", "_handle_of", "_keep", "_launch", "_nbytes", "_odd",
        "_order", "_params", "_signature", "_threads", "args", "call", "grid", "kernel",
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
    ) -> None:
        self._order, self._check, self._handle_of = order, check, handle_of
        self.call, self.kernel, self.grid = call, kernel, grid
        self._launch, self.args, self._nbytes = launch, args, nbytes
        self._function, self._blocks, self._threads = function, grid.blocks, grid.threads
        self._signature = call.signature()
        self._odd = call.dtype.numpy.alignment - 1
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        self._keep, self._params = pointers, ctypes.addressof(pointers)

    def run(self, sendbuf: Any, recvbuf: Any) -> None:
        """Enqueues the call on the current stream."""
        order, args = self._order, self.args
        source = address(sendbuf, order)
        target = source if recvbuf is sendbuf else address(recvbuf, order)
        if (source | target) & self._odd:
            check_alignment(self._odd + 1, source, target)
        stream = order.enter(self.call, self._signature)
        if self._blocks:
            self._check()
            args.sendbuf, args.recvbuf = source, target
            if self._nbytes:
                handle = args.sendbuf_handle = self._handle_of(source, self._nbytes)
                args.recvbuf_handle = handle if target == source else self._handle_of(target, self._nbytes)
            self._launch(
                self._function.ptr, self._blocks, 1, 1, self._threads, 1, 1, 0, stream.ptr, self._params, 0
            )
        order.leave(stream)

    def __repr__(self) -> str:
        return f"<PeerPlan {self.call}, {self.kernel}>"
