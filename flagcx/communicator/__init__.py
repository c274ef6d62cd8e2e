"""The communicator: the facade over all that ranks can do together.

What holds for all calls:

- Arrays may have any strides: they are packed before a call and unpacked after it. Shapes may differ
  between ranks where counts are equal.
- Sums have the same bits on every rank. Half precision is summed in float32 and rounded once wherever one
  rank adds up all contributions (small and large all-reduces by default). Averages of half precision, fp8
  and integers don't overflow: every algorithm but NCCL's own adds them up in a wider dtype, divides and
  rounds once (integers toward zero). Overflows end no call; the warning names the caller's line.
- Sends and receives that were started (``async_op=True``) move together, beside collectives, and may be
  waited for in any order, as MPI's rules have it; on GPUs too, through the peers' memory. Without
  ``async_op`` a call on a GPU keeps to the order of its stream, and NCCL keeps messages in the order of all
  calls: there, put those that must move together into one ``comm.group()``. Calls of several communicators
  must be enqueued in the same order on all ranks.
- Calls on CuPy arrays are enqueued on the current stream, or ``stream=``; nothing waits on the host.
  ``async_op=True`` runs on a stream of the communicator's own; ``comm.barrier(stream=s)`` lets streams wait
  for each other. A call that comes again with the same arrays is replayed as a CUDA graph. A
  graph of the program's own that is replayed on one stream while calls of the same communicator run on
  another raises an error.
- What a communicator keeps is bounded by bytes, whatever sizes it is called with, so a job may live for
  weeks. A split that is dropped gives it back (one that has used GPUs: when it is closed).
- A forked child (a ``DataLoader``'s worker, a daemon) does its parent, the rank, no harm, whatever it does;
  only the communicator and ``fc.init()`` are refused there.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from flagcx.arguments import check_shape
from flagcx.communicator import allreduce as reductions
from flagcx.communicator import objects, operations, recovery, rows, transfers, v_operations
from flagcx.communicator import split as splitting
from flagcx.communicator.caller import Caller, Lineage
from flagcx.config import Config
from flagcx.dtypes import dtype_of
from flagcx.errors import ArgumentError, CommunicationError, FlagcxError, MismatchError
from flagcx.executor.open import open_host_executor
from flagcx.fusion.fuse import Fusion
from flagcx.fusion.group import Group
from flagcx.migration import ForeignNames
from flagcx.profiler import Profiler
from flagcx.report import Report
from flagcx.selection.online_tuning import findings_of, write_back
from flagcx.transport.base import TransportContext
from flagcx.transport.waits import Waits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from flagcx.bootstrap.store import Store
    from flagcx.communicator.options import S
    from flagcx.compression.allreduce import Compressor
    from flagcx.executor.device import DeviceExecutor
    from flagcx.selection.explain import Explanation

Exchange = Callable[[bytes], list[bytes]]


class Communicator(Caller, ForeignNames):
    """Ranks that call the same operations in the same order.

    Made by ``fc.init()`` and ``split``. A context manager; ``close`` may be called again. One thread at a
    time may use it. Operations take:

    * ``algorithm``: a member of ``fc.Algorithm`` or its name, or two at once on parts of the message, such as
      "ring|double_binary_tree" or "ring 3/4|two_shot"; chosen by size where it is not given.
    * ``async_op``: True returns a ``Work`` at once; its ``wait`` returns what the call would. A program that
      never waits for them is held up: where 1,024 collectives are under way, or 16 with a GiB of NumPy
      arrays, one more first waits for the oldest to end. (Sends and receives do not.)
    * ``stream``: for arrays on a GPU, the CuPy stream to enqueue on; the current one by default.

    They raise ``ArgumentError`` for a wrong call, ``CommunicatorError`` for a communicator that cannot be
    used, and ``CommunicationError`` when a peer died, came late or called something else. After the last,
    the communicator cannot be used any more, on any rank; ``shrink`` makes one of the ranks that are left.

    Args:
        rank: This rank.
        size: Number of ranks.
        exchange: Sends bytes to all ranks and returns every rank's, in rank order.
        hosts: The host of each rank.
        config: Settings.
        store: The ranks' part of the store, with which those join that have arrays on GPUs.
        name: What the communicator is called in messages.
        after_loss: See ``TransportContext``.

    Attributes:
        rank: This rank, from 0.
        size: Number of ranks.
        hosts: The host of each rank.
        config: Settings.
        profiler: The records of what the ranks did together; see ``flagcx.profiler.Profiler``.
        lost: The ranks that the communicator of which ``shrink`` made this one had lost.
        on_shrink: Called with the communicator that ``shrink`` makes of this one.
    """

    allreduce = reductions.allreduce
    explain_compression = reductions.explain_compression
    allreduce_rmsnorm = rows.allreduce_rmsnorm
    allreduce_layernorm = rows.allreduce_layernorm
    allreduce_then = rows.allreduce_then

    reduce = operations.reduce
    broadcast = operations.broadcast
    allgather = operations.allgather
    reduce_scatter = operations.reduce_scatter
    gather = operations.gather
    scatter = operations.scatter
    alltoall = operations.alltoall
    barrier = operations.barrier

    allgatherv = v_operations.allgatherv
    reduce_scatterv = v_operations.reduce_scatterv
    gatherv = v_operations.gatherv
    scatterv = v_operations.scatterv
    alltoallv = v_operations.alltoallv

    send = transfers.send
    recv = transfers.recv
    sendrecv = transfers.sendrecv

    broadcast_object = objects.broadcast_object
    allgather_object = objects.allgather_object
    gather_object = objects.gather_object
    scatter_object = objects.scatter_object

    split = splitting.split
    abort = recovery.abort
    shrink = recovery.shrink

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Exchange,
        hosts: Sequence[str],
        config: Config,
        store: Store | None = None,
        name: str = "world",
        after_loss: str = "",
    ) -> None:
        self.rank, self.size, self.hosts, self.config = rank, size, tuple(hosts), config
        self.profiler = Profiler(rank, size, self.allgather_object, self.barrier, self._hints)
        self._ring = self.profiler.ring if config.profile else None
        self._name = name
        waits = None if store is None else Waits(store, name, config.explain_wait_s, config.timeout_s)
        self._context = TransportContext(rank, size, self.hosts, exchange, store, config, waits, after_loss)
        self._host = open_host_executor(self._context, self._ring)
        self._device: DeviceExecutor | None = None
        if waits is not None:
            waits.offer("records", self.profiler.last_as_values)
        self._store, self._splits = store, 0
        self._group: Group | None = None
        self._fusions: dict[int, Fusion] = {}
        self._compressors: dict[int, Compressor] = {}
        self._children: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._at_close: list[Callable[[], object]] = []
        self._lineage = None if store is None else Lineage(store, self.hosts, name, tuple(range(size)))
        self.lost: tuple[int, ...] = ()
        self._shut, self._closing = False, threading.RLock()
        self.on_shrink: Callable[[Communicator], object] = lambda made: None

    @overload
    def empty(self, shape: tuple[int, ...] | int) -> NDArray[np.float32]: ...
    @overload
    def empty(
        self, shape: tuple[int, ...] | int, dtype: type[S], device: Literal["cpu"] = ...
    ) -> NDArray[S]: ...
    @overload
    def empty(self, shape: tuple[int, ...] | int, dtype: Any = ..., device: str = ...) -> Any: ...
    def empty(self, shape: tuple[int, ...] | int, dtype: Any = np.float32, device: str = "cpu") -> Any:
        """Makes an uninitialised array that the peers reach without a copy.

        Every operation takes it like any other array; all-reduces of it are the fastest there are, if
        the arrays of all ranks are of this kind.

        Args:
            shape: Shape, or number of elements.
            dtype: Element type.
            device: "cpu" for a NumPy array, "gpu" for a CuPy array on this rank's GPU. All ranks must make
                arrays on GPUs together, of as many bytes.

        Raises:
            ArgumentError: ``shape`` is no shape, or there is no such ``device``.
            ResourceError: The machine has no memory left.
            MissingDependencyError: There is no GPU, or no CuPy.
        """
        shape = check_shape(shape)
        if device not in ("cpu", "gpu"):
            raise ArgumentError(f'device must be "cpu" or "gpu", got {device!r}')
        executor = self._host if device == "cpu" else self.device_executor()
        executor.check()
        return executor.transport.empty(shape, dtype_of(dtype).numpy)

    def _hints(self) -> list[str]:
        return self._host.transport.hints()

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Puts the calls of a ``with`` block off to its end, where they run together.

        All-reduces travel in few messages, one for each dtype and operation where they are small, which is
        far faster for many small arrays; sends and receives all run at once, so that their order doesn't
        matter.
        Results are in their arrays when the block ends. A block that raises makes none of its calls.

        Example:
            >>> with comm.group():                # doctest: +SKIP
            ...     for gradient in gradients:
            ...         comm.allreduce(gradient)
        """
        if self._group is not None:
            raise ArgumentError("comm.group() is open already; groups cannot be nested")
        self._group = group = Group(self.fusion_of)
        for executor in self.executors():
            executor.hold()
        try:
            yield
            self._end_group()
            group.run()
        finally:
            self._end_group()
            for executor in self.executors():
                executor.resume()

    def _end_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    # -- choices ----------------------------------------------------------------------------------

    def explain(
        self,
        collective: str,
        nbytes: int,
        dtype: Any = "float32",
        op: Any = "sum",
        *,
        gpu: bool | None = None,
    ) -> Explanation:
        """Says what would carry a call, why, and what each candidate would cost. Nothing is run.

        Times are those that ``flagcx tune`` measured, where there are any, beside those of a model: of the
        machine's links for GPUs, of cores and memory for NumPy arrays on one host.

        Args:
            collective: Its name, such as "allreduce".
            nbytes: Bytes of the message; of one block, where the collective has one a rank.
            dtype: The element type; on GPUs it decides what can carry the call.
            op: The operation; likewise.
            gpu: Whether arrays are on GPUs; by default if this communicator has had one.

        Returns:
            A table where it is shown, in a terminal and in a notebook, with ``chosen``, ``reason``, ``rows``
            and ``to_json()``. Each candidate has its steps, bytes sent by a rank, busiest link, predicted and
            measured time, or why it is not possible.

        Raises:
            ArgumentError: There is no such collective, dtype or operation.
            CommunicatorError: ``gpu=True``, and no array on a GPU was used yet.

        Example:
            >>> print(comm.explain("allreduce", 64 << 20))  # doctest: +SKIP
        """
        from flagcx.communicator.explain import explain

        return explain(self, collective, nbytes, dtype, op, gpu)

    # -- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the communicator and those split from it. The peers need not close together.

        A second call does nothing.

        Raises:
            CommunicationError: Operations on GPUs that were enqueued last may not have been done, or an
                operation that was started failed, and no call or ``wait`` has said so yet.
        """
        if self.forked:
            return  # what is open belongs to the parent
        self._shut = True
        with contextlib.ExitStack() as last:
            while self._at_close:
                last.callback(self._at_close.pop(0))
            last.callback(self._give_back)
            for child in self._children:
                last.callback(child.close)

    def _give_back(self) -> None:
        """Closes all but the ranks' store, and the communicators that were split from this one."""
        with self._closing, contextlib.ExitStack() as last:  # whatever fails, the rest is closed
            last.callback(self._host.close)
            for fusion in self._fusions.values():
                last.callback(fusion.close)
            if self._device is not None:
                last.callback(self._device.close)
            last.callback(self._keep_learned)
            if self._context.waits is not None:
                last.callback(self._context.waits.close)

    def _keep_learned(self) -> None:
        """On rank 0: corrects the user's table by what the trials of this job found."""
        selector = self._host.selector
        if self.rank or not selector.path or selector.table is None or self.closed:
            return
        write_back(Path(selector.path), selector.table, findings_of(self._host.explorations))

    def at_close(self, call: Callable[[], object]) -> None:
        """Makes a call when the communicator is closed; the last one added comes first."""
        self._at_close.append(call)

    @property
    def closed(self) -> bool:
        """Whether no further call can be made: closed, or broken by an error."""
        return any(executor.over for executor in self.executors())

    def is_lost(self) -> bool:
        """Whether it is closed, or a rank has died or given up, of which this one may not have been told."""
        return self.closed or self._host.transport.has_lost()

    @property
    def blames(self) -> str:
        """The failure of a peer that ended this communicator, or a split of it; "" where none did."""
        for kind, text in self.broken_by().items():
            if issubclass(kind, CommunicationError) and not issubclass(kind, MismatchError):
                return text or kind.__name__
        return ""

    def broken_by(self) -> dict[type[BaseException], str]:
        """The errors that ended this communicator, or splits of it: what one of each kind says."""
        found = dict(one.broken_by for one in self.executors() if one.broken_by is not None)
        for child in self._children:
            found |= child.broken_by()
        return found

    @property
    def forked(self) -> bool:
        """Whether this is a copy in a child that was forked, where no call can be made."""
        return self._host.forked

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        waits = self._context.waits
        if waits is not None and isinstance(error, Exception):
            waits.record(error)
        try:
            self.close()
        except FlagcxError:
            if error is None:
                raise  # else what came first tells more

    def _repr_html_(self) -> str:
        many = Counter(self.hosts)
        rows = [
            (host, str(ranks), "this rank's" if host == self.hosts[self.rank] else "")
            for host, ranks in many.items()
        ]
        return Report(repr(self)[1:-1], ("host", "ranks", ""), rows, words=(0, 2))._repr_html_()

    def __repr__(self) -> str:
        state = f", {self._host.over}" if self._host.over else ""
        return f"<flagcx.Communicator rank {self.rank} of {self.size} on {self.hosts[self.rank]}{state}>"
