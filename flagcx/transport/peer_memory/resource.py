"""Compiles the calls of one communicator through the peers' memory, and says which ones it can carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from flagcx.bootstrap.store import Store
from flagcx.config import Config
from flagcx.dtypes import OPS, DType, ReduceOp
from flagcx.errors import ArgumentError, CommunicationError, MismatchError, PeerTimeoutError
from flagcx.kernels.compile import load_kernel
from flagcx.kernels.fuse import Finish
from flagcx.kernels.peer import (
    PEER_MEMORY,
    PEER_PACKETS,
    PROTOCOLS,
    REDUCING,
    TWO_AT_ONCE,
    BlockArgs,
    PeerArgs,
    PeerKernel,
    PeerLayout,
    has_peer_kernel,
    may_be_bare,
)
from flagcx.kernels.peer_move import TOO_MANY, WRONG_SIZE
from flagcx.kernels.rows import RowKernel
from flagcx.kernels.source import base_name
from flagcx.schedule.collectives import largest_block
from flagcx.transport.base import Call
from flagcx.transport.device import DeviceIdentity
from flagcx.transport.peer_memory.grids import (
    Grid,
    blocks_beside,
    chunk_grid,
    packet_grid,
)
from flagcx.transport.peer_memory.messages import PeerMessages
from flagcx.transport.peer_memory.moves import (
    ALWAYS_MOVED,
    CountedPlan,
    counted_on_gpu,
    is_moved,
    jobs_of,
)
from flagcx.transport.peer_memory.plans import PeerPlan
from flagcx.transport.peer_memory.region import PeerRegion, Unavailable
from flagcx.transport.peer_memory.replays import Graphs
from flagcx.transport.peer_memory.rows import PeerRows, row_grid
from flagcx.transport.peer_memory.segments import Segments
from flagcx.transport.rows import RowLaunch, Rows
from flagcx.transport.stream_order import StreamOrder

_DIRECT, _DISSEMINATION = "direct", "dissemination"
# Bytes that a rank may push as packets to all peers together in one hop; beyond, chunks are faster.
_FLAGGED_NBYTES = 1 << 20
_BARE_NBYTES = 16 << 20


def connect(
    cupy: Any,
    store: Store,
    identities: Sequence[DeviceIdentity],
    order: StreamOrder,
    config: Config,
) -> tuple[PeerMemory | None, str]:
    """Gives the ranks access to each other's memory, where that is possible; all ranks call it together.

    Args:
        cupy: The CuPy module.
        store: The communicator's part of the store.
        identities: Every rank's process and GPU.
        order: The communicator's order.
        config: The settings; this uses ``peer_memory``, ``timeout_s`` and ``init_timeout_s``.

    Returns:
        The resource, or None; and the reason for None, in the same words on every rank.
    """
    if store.size == 1:
        return None, "there is one rank"
    try:
        region = PeerRegion(cupy, store, identities, config.init_timeout_s, config.peer_memory)
    except Unavailable as reason:
        return None, str(reason)
    return PeerMemory(cupy, store, region, order, config.timeout_s, config.init_timeout_s), ""


class PeerMemory:
    """Carries calls by kernels that access the peers' memory.

    Args:
        cupy: The CuPy module.
        store: The communicator's part of the store.
        region: The shared memory.
        order: The communicator's order.
        timeout_s: How long a kernel waits for a peer, in seconds.
        limit_s: How long to wait for the other ranks when an array is made, in seconds.

    Attributes:
        layout: The layout of the shared memory.
        segments: The arrays that peers see.
        blocks: Blocks of threads that a launch may have.
        messages: Sends and receives, and the kernel that they share with calls that move blocks.
        blamed: Finds the rank to blame for an error of a wait, before a caller gets it.
    """

    def __init__(
        self,
        cupy: Any,
        store: Store,
        region: PeerRegion,
        order: StreamOrder,
        timeout_s: float,
        limit_s: float,
    ) -> None:
        self._cupy, self._region, self._order = cupy, region, order
        self.layout, self.blocks = region.layout, region.layout.blocks
        self._limit_ns = int(min(timeout_s, 1e9) * 1e9)
        self._launch = cupy.cuda.driver.launchKernel
        self.segments = Segments(cupy, store, limit_s, region.table)
        self.rank, self.size = region.rank, region.size
        self._graphs = Graphs(cupy)
        self.messages = PeerMessages(cupy, region, order, self._graphs, self.check, self._limit_ns)
        self.blamed: Callable[[CommunicationError], CommunicationError] = lambda error: error
        self._closed = False

    def carries(self, call: Call) -> bool:
        """Whether there is a kernel for the call's protocol, algorithm, dtype and operation."""
        form = form_of(call.schedule.collective, call.schedule.algorithm)
        fits = form is not None and has_peer_kernel(form, call.dtype, call.op)
        serves = isinstance(call.counts, int) or is_moved(call) or form == "reduce_scatter"
        return fits and call.protocol in PROTOCOLS and serves

    def beside(self, plan: PeerPlan) -> PeerPlan:
        """A plan of the same call to run while a computation does too, to which it leaves most of the GPU.

        It has fewer blocks, and reads arrays in place where all ranks see them.
        """
        most = blocks_beside(self.layout)
        if plan.grid.blocks <= most or is_moved(plan.call):
            return plan
        roomy = self.compile(plan.call, most, pull=True)
        assert isinstance(roomy, PeerPlan)
        return roomy

    def compile(
        self, call: Call, blocks: int = 0, chunk: int = 0, pull: bool = False
    ) -> PeerPlan | CountedPlan:
        """Compiles a call that this ``carries``; a message that is too large for packets moves in chunks.

        Args:
            call: The call.
            blocks: Overrides the rule's blocks of threads if not 0.
            chunk: Overrides the rule's packs of a chunk if not 0.
            pull: Whether to read arrays in place where all ranks see them, even where pushing is faster.

        Raises:
            ArgumentError: There is no kernel for the call.
        """
        form = form_of(call.schedule.collective, call.schedule.algorithm)
        if form is None or not self.carries(call):
            raise ArgumentError(f"peer memory does not carry {call.describe()}; leave its protocol empty")
        if is_moved(call):
            return self._compile_moved(call)
        count, itemsize, layout = largest_block(call.counts), call.dtype.numpy.itemsize, self.layout
        bare = may_be_bare(form, call.dtype)
        grid = None
        if call.protocol == PEER_PACKETS:
            grid = packet_grid(form, count, itemsize, layout, bare, blocks)
        packets = grid is not None
        name = "chunks" if not packets else "bare packets" if bare else "flagged packets"
        kernel = PeerKernel(
            form, packets, call.dtype, _reduction(form, call.op, call.dtype), layout, bare and packets
        )
        grid = grid or chunk_grid(form, count, itemsize, layout, blocks, chunk)
        function = None
        if grid.blocks:
            function = load_kernel(self._cupy, self._region.device, kernel.source(), kernel.name)
        args = self._args(call, grid)
        args.pull = pull
        return PeerPlan(
            call, name, self._launch, function, grid, args, self._order, self.check, self.segments.handle_of,
            count * itemsize if form == "two_shot" and not packets else 0, self._graphs,
        )  # fmt: skip

    def compile_rows(self, call: Call, rows: Rows) -> PeerRows | None:
        """Compiles an all-reduce of rows with an epilogue into one kernel; None where the rows do not fit.

        Args:
            call: The all-reduce, with the epilogue in its words.
            rows: The operation.
        """
        forms = call.schedule.algorithm, "two_shot"
        grid = next((grid for form in forms if (grid := row_grid(form, rows, self.layout))), None)
        if grid is None or call.protocol != PEER_PACKETS or not may_be_bare(grid.form, rows.dtype):
            return None
        kernel = RowKernel(grid.form, rows.dtype, rows.epilogue, self.layout, grid.shape, True, grid.ahead)
        launch = RowLaunch(self._cupy, self._region.device, kernel, rows, grid.blocks, self._places())
        return PeerRows(call, rows, launch, self._order, self.check)

    def _places(self, args: Any = None) -> Any:
        """The arguments of a kernel, with what all kernels have in common."""
        args = args or PeerArgs()
        for q, at in enumerate(self._region.at):
            args.peer[q] = at
        args.segments, args.control = self._region.table, self._region.control_at
        args.limit_ns, args.rank = self._limit_ns, self.rank
        return args

    def _args(self, call: Call, grid: Grid) -> PeerArgs:
        counts = call.counts
        if call.schedule.collective == "reduce_scatter":
            args = self._places(BlockArgs())
            blocks = (counts,) * self.size if isinstance(counts, int) else counts
            args.starts[: self.size + 1] = [0, *accumulate(blocks)]
            counts = blocks[self.rank]
        else:
            args = self._places()
        args.count, args.part, args.chunk, args.steps = counts, grid.part, grid.chunk, grid.steps
        args.root = call.schedule.root or 0
        args.finish, args.factor = int(Finish.NONE), 1.0
        if call.op is not None and call.op.average:
            args.finish, args.factor = int(Finish.DIVIDE), float(self.size)
        return args

    def _compile_moved(self, call: Call) -> PeerPlan | CountedPlan:
        """Compiles a call that moves blocks of any size."""
        jobs, on_gpu = jobs_of(call), counted_on_gpu(call)
        args, grid = self.messages.arguments(jobs, on_gpu=on_gpu)
        args.itemsize = call.dtype.numpy.itemsize
        plan = PeerPlan(
            call, "blocks", self._launch, self.messages.kernel(), grid, args, self._order, self.check,
            self.segments.handle_of, 0, self._graphs,
        )  # fmt: skip
        return CountedPlan(plan) if on_gpu else plan

    def check(self) -> None:
        """Raises an error if a kernel has found one: a wait has timed out, or a message has a wrong size."""
        if self._region.control[1]:
            error = self.fault()
            if error is not None:
                raise self.blamed(error)

    def fault(self) -> CommunicationError | None:
        """The error that a kernel has found, or None."""
        control = self._region.control
        if not control[1]:
            return None
        peer = int(control[2])
        if control[1] == WRONG_SIZE:
            return MismatchError(
                f"rank {self.rank}: a message of rank {peer} has another size than this rank expects, in or "
                f"before {self._order.what} (seen on the GPU); both ranks must give the same count and dtype",
                peer=peer,
            )
        if control[1] == TWO_AT_ONCE:
            return CommunicationError(
                f"rank {self.rank}: two calls of this communicator ran on the GPU at once, in or before "
                f"{self._order.what} (seen on the GPU), and their results are wrong: a graph in which calls "
                f"were captured was replayed on one stream while calls were made, or another graph was "
                f"replayed, on another; let one stream wait for the other, or capture the calls of a "
                f"communicator of their own, from comm.split()"
            )
        if control[1] == TOO_MANY:
            return CommunicationError(
                f"rank {self.rank}: counts on the GPU are negative, or more than the arrays hold, in "
                f"or before {self._order.what}; sum(send_counts) must fit x, and sum(receive_counts) out"
            )
        return PeerTimeoutError(
            f"rank {self.rank}: rank {peer} did not come to {self._order.what} within "
            f"{self._limit_ns / 1e9:g} s (seen on the GPU); every rank must make the same calls, and "
            f"FLAGCX_TIMEOUT_S sets the time-out",
            peer=peer,
        )

    def stop(self) -> None:
        """Makes all kernels that wait for a peer end. May be called from any thread."""
        self._region.control[0] = 1

    def close(self, together: bool = True) -> None:
        """Gives everything back, after all operations have ended.

        Args:
            together: Whether all ranks close at the same time and wait for each other, so that none frees
                memory that another still sees.
        """
        if self._closed:
            return
        self._closed = True
        self._graphs.close()
        self.segments.detach()
        self._region.detach()
        if together:
            self._region.part()
        self.segments.close()
        self._region.close()


def protocols_in(
    layout: PeerLayout, collective: str, algorithm: str, nbytes: int, dtype: DType, op: ReduceOp | None
) -> frozenset[str]:
    """The protocols that can carry a call in memory of this layout; see ``Transport.protocols``.

    Example:
        >>> from flagcx.dtypes import dtype_of
        >>> layout = PeerLayout(4, 128, one_gpu=False)
        >>> sorted(protocols_in(layout, "alltoall", "direct", 1 << 20, dtype_of("int8"), None))
        ['peer_memory']
    """
    form = form_of(collective, algorithm)
    if form == "barrier":
        return frozenset((PEER_PACKETS,))
    if form is None or nbytes == 0 or not has_peer_kernel(form, dtype, op):
        return frozenset()
    if form in ALWAYS_MOVED:
        return frozenset((PEER_MEMORY,))
    bare = may_be_bare(form, dtype)
    hops, messages = (2, 2 / layout.ranks) if form == "two_shot" else (1, 1)
    pays = messages * (layout.ranks - 1) * nbytes <= (_BARE_NBYTES if bare else _FLAGGED_NBYTES) * hops
    count = max(nbytes // dtype.numpy.itemsize, 1)
    small = pays and packet_grid(form, count, dtype.numpy.itemsize, layout, bare) is not None
    return frozenset(PROTOCOLS if small else (PEER_MEMORY,))


def form_of(collective: str, algorithm: str) -> str | None:
    """The kernels' form for a collective and algorithm, or None."""
    if collective == "allreduce":
        return algorithm if algorithm in ("one_shot", "two_shot") else None
    if collective == "barrier":  # It carries nothing, so the kernel may tell all ranks at once.
        return collective if algorithm == _DISSEMINATION else None
    return collective if algorithm == _DIRECT else None


def _reduction(form: str, op: ReduceOp | None, dtype: DType) -> ReduceOp | None:
    """The operation of the kernel, which operations that differ only in the last step share."""
    if form not in REDUCING or op is None:
        return None
    return OPS[base_name(op, dtype)]
