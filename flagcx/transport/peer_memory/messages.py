"""Sends and receives through the peers' memory: launched at once, or posted first and launched later."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flagcx.kernels.compile import load_kernel
from flagcx.kernels.peer import WARP
from flagcx.kernels.peer_move import POST, Job, MoveArgs, MoveKernel
from flagcx.transport.device_messages import Message
from flagcx.transport.peer_memory.grids import Grid, started_grid, started_work
from flagcx.transport.peer_memory.moves import fill_jobs, rounds_of
from flagcx.transport.peer_memory.posted import PostedCounts
from flagcx.transport.peer_memory.region import PeerRegion
from flagcx.transport.peer_memory.replays import Graphs, Replays
from flagcx.transport.stream_order import StreamOrder


class PeerMessages:
    """The messages of one rank of a communicator.

    Args:
        cupy: The CuPy module.
        region: The shared memory.
        order: The communicator's order.
        graphs: What makes graphs of launches that come back.
        check: Raises an error if a kernel has found one.
        limit_ns: How long a kernel waits for a peer.
    """

    def __init__(
        self,
        cupy: Any,
        region: PeerRegion,
        order: StreamOrder,
        graphs: Graphs,
        check: Callable[[], None],
        limit_ns: int,
    ) -> None:
        self._cupy, self._region, self._order = cupy, region, order
        self._check, self._limit_ns = check, limit_ns
        self.layout, self.rank, self.size = region.layout, region.rank, region.size
        self._launch_kernel = cupy.cuda.driver.launchKernel
        self._kernels: dict[int, Any] = {}
        self._transfers = Replays(graphs)

    def kernel(self, work: int = 0) -> Any:
        """The kernel that moves blocks, with ``work`` threads in a block for it; the layout's if 0."""
        found = self._kernels.get(work)
        if found is None:
            kernel = MoveKernel(self.layout, work)
            found = load_kernel(self._cupy, self._region.device, kernel.source(), kernel.name)
            self._kernels[work] = found
        return found

    def arguments(
        self, jobs: Sequence[Job], pairs: bool = False, on_gpu: bool = False
    ) -> tuple[MoveArgs, Grid]:
        """The argument of a launch, and its grid; see ``fill_jobs``."""
        args = MoveArgs()
        for q, at in enumerate(self._region.at):
            args.peer[q] = at
        args.control, args.limit_ns, args.rank = self._region.control_at, self._limit_ns, self.rank
        return args, fill_jobs(args, self.layout, jobs, pairs, on_gpu)

    def transfer(self, messages: Sequence[Message], stream: Any) -> None:
        """Enqueues sends and receives, all at once, on a stream that the communicator's order has entered."""
        self._check()
        if not messages:
            return
        graph = None
        if not self._order.is_capturing(stream):
            graph = self._transfers.find(tuple(messages), partial(self._enqueue, messages))
        if graph is None:
            self._enqueue(messages, stream)
        else:
            graph.launch(stream)

    def _enqueue(self, messages: Sequence[Message], stream: Any) -> None:
        for jobs in rounds_of(self.rank, self.size, messages):
            args, grid = self.arguments(jobs, pairs=True)
            self._launch(self.kernel(), grid, args, stream)

    def start(self, message: Message, stream: Any) -> None:
        """Enqueues a message by a launch that leaves room for those of other pairs and for collectives."""
        self._check()
        args, grid = self._message_args(message)
        kernel = self.kernel(started_work(self.layout))
        self._launch(kernel, started_grid(self.layout, grid.blocks), args, stream)

    def post(self, message: Message, stream: Any) -> None:
        """Enqueues what tells the peer of a message that this rank is ready for it."""
        args, _ = self._message_args(message)
        self._launch(self._poster(), Grid(1, WARP, 0, 0, 1), args, stream)

    def _message_args(self, message: Message) -> tuple[MoveArgs, Grid]:
        (jobs,) = rounds_of(self.rank, self.size, [message])
        return self.arguments(jobs, pairs=True)

    def prepare_messages(self, stream: Any) -> None:
        """Loads the kernels of messages that are started, by launches that do nothing.

        CUDA waits for all kernels that run before it loads another one, so that later one may wait for ever.
        """
        args = MoveArgs()
        for q, at in enumerate(self._region.at):
            args.peer[q] = at
        args.rank, args.first = self.rank, self.layout.channels
        self._launch(self._poster(), Grid(1, WARP, 0, 0, 1), args, stream)
        work = started_work(self.layout)
        self._launch(self.kernel(work), Grid(1, work + WARP, 0, 0, 1), args, stream)

    def posted(self, stream: Any) -> PostedCounts:
        """What the peers are ready for by now; waits on the host for a copy on a stream."""
        return self._region.posted(stream)

    def _poster(self) -> Any:
        found = self._kernels.get(-1)
        if found is None:
            source = MoveKernel(self.layout, started_work(self.layout)).source()
            found = self._kernels[-1] = load_kernel(self._cupy, self._region.device, source, POST)
        return found

    def _launch(self, kernel: Any, grid: Grid, args: MoveArgs, stream: Any) -> None:
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        at = ctypes.addressof(pointers)
        self._launch_kernel(kernel.ptr, grid.blocks, 1, 1, grid.threads, 1, 1, 0, stream.ptr, at, 0)
