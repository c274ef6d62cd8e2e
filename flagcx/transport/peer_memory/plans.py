"""A compiled call over peer memory: one launch with arguments that are ready."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from flagcx.kernels.peer import PeerArgs
from flagcx.transport.base import Call
from flagcx.transport.nccl.plans import Description, address, check_alignment
from flagcx.transport.peer_memory.grids import Grid
from flagcx.transport.stream_order import StreamOrder


class Names(Protocol):
    """What a plan asks of the memory."""

    def name_of(self, at: int, nbytes: int) -> int:
        """What the peers call the array of ``nbytes`` bytes at an address; 0 if they do not see it."""

    def check(self) -> None:
        """Raises if a wait on the GPU was given up."""


class PeerPlan:
    """One launch of a peer kernel.

    Args:
        call: The call.
        way: "bare packets", "flagged packets" or "chunks", for people.
        launch: The driver's ``launchKernel``.
        function: Address of the compiled kernel.
        grid: The shape of the launch; without blocks where there is nothing to do.
        args: The kernel's argument, but for the arrays.
        order: The communicator's order.
        names: Tells which arrays the peers see; None if the kernel does not ask.
        nbytes: Bytes of the arrays.

    Attributes:
        call: See above.
        way: See above.
        grid: See above.
        args: See above.
    """

    __slots__ = (
        "__weakref__",
        "_blocks",
        "_function",
        "_keep",
        "_launch",
        "_names",
        "_nbytes",
        "_odd",
        "_order",
        "_params",
        "_threads",
        "_what",
        "args",
        "call",
        "grid",
        "way",
    )

    def __init__(
        self,
        call: Call,
        way: str,
        launch: Any,
        function: Any,
        grid: Grid,
        args: PeerArgs,
        order: StreamOrder,
        names: Names,
        nbytes: int,
    ) -> None:
        self._what, self._order, self._names = Description(call), order, names
        self.call, self.way, self.grid = call, way, grid
        self._launch, self.args, self._nbytes = launch, args, nbytes
        self._function, self._blocks, self._threads = function, grid.blocks, grid.threads
        self._odd = call.dtype.numpy.alignment - 1
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        self._keep, self._params = pointers, ctypes.addressof(pointers)

    def run(self, given: Any, result: Any) -> None:
        """Enqueues the call on the current stream; see ``Plan.run``."""
        order, args = self._order, self.args
        source = address(given, order)
        target = source if result is given else address(result, order)
        if (source | target) & self._odd:
            check_alignment(self._odd + 1, source, target)
        stream = order.enter(self._what)
        if self._blocks:
            self._names.check()
            args.sendbuf, args.recvbuf = source, target
            if self._nbytes:
                name_of = self._names.name_of
                args.sendbuf_handle = name_of(source, self._nbytes)
                args.recvbuf_handle = args.sendbuf_handle if target == source else name_of(target, self._nbytes)
            self._launch(
                self._function.ptr, self._blocks, 1, 1, self._threads, 1, 1, 0, stream.ptr, self._params, 0
            )
        order.leave(stream)

    def close(self) -> None:
        """Nothing to give back."""

    def __repr__(self) -> str:
        return f"<PeerPlan {self._what}, {self.way}>"
