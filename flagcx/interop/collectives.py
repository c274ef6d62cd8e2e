"""torch's collectives on tensors and lists of tensors, as flagcx's on one array for each buffer.

Each function returns what a queue is to run. It runs on the queue's thread or stream, where tensors that are
not plain are copied, and lists are laid end to end unless they lie so already. What is only moved travels
as bytes, so that every dtype does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from flagcx.dtypes import ReduceOp
from flagcx.interop.call_queue import CallQueue, HostQueue
from flagcx.interop.tensors import are_adjacent, is_plain, plain

Call = Callable[[], object]
Op = str | ReduceOp


def allreduce(queue: CallQueue, tensor: Any, op: Op) -> Call:
    """Combines the tensors of all ranks, in place."""
    if is_plain(tensor):
        return partial(queue.comm.allreduce, queue.views.elements(tensor), op)

    def call() -> None:
        with _written(tensor) as work:
            queue.comm.allreduce(queue.views.elements(work), op)

    return call


def allreduce_all(queue: CallQueue, tensors: Sequence[Any], op: Op) -> Call:
    """Combines each of several tensors, in place; small ones of one dtype travel together."""

    def call() -> None:
        works = [plain(t) for t in tensors]
        arrays = [queue.views.elements(work) for work in works]
        if isinstance(queue, HostQueue) or not torch.cuda.is_current_stream_capturing():
            queue.comm.allreduce(arrays, op)
        else:  # The memory in which they would travel together is not a graph's to keep.
            for array in arrays:
                queue.comm.allreduce(array, op)
        for tensor, work in zip(tensors, works, strict=True):
            _bring(work, tensor)

    return call


def reduce(queue: CallQueue, tensor: Any, op: Op, root: int) -> Call:
    """Combines the tensors of all ranks at the root."""

    def call() -> None:
        work = plain(tensor)
        queue.comm.reduce(queue.views.elements(work), op, root)
        if queue.comm.rank == root:
            _bring(work, tensor)

    return call


def broadcast(queue: CallQueue, tensor: Any, root: int) -> Call:
    """Gives every rank the root's tensor."""

    def call() -> None:
        with _written(tensor) as work:
            queue.comm.broadcast(queue.views.bytes(work), root)

    return call


def allgather(queue: CallQueue, outputs: Sequence[Any], given: Any) -> Call:
    """Gives every rank the tensors of all, which may differ in size."""
    counts = [t.numel() * t.element_size() for t in outputs]
    even = len(set(counts)) == 1

    def call() -> None:
        with _spread(queue, outputs) as out:
            x = queue.views.bytes(plain(given))
            if even:
                queue.comm.allgather(x, out=out)
            else:
                queue.comm.allgatherv(x, counts, out=out)

    return call


def allgather_single(queue: CallQueue, output: Any, given: Any) -> Call:
    """Gives every rank the tensors of all, one after the other in one tensor."""

    def call() -> None:
        with _written(output) as out:
            queue.comm.allgather(queue.views.bytes(plain(given)), out=queue.views.bytes(out))

    return call


def reduce_scatter(queue: CallQueue, output: Any, inputs: Sequence[Any], op: Op) -> Call:
    """Combines lists of tensors; each rank gets its entry. Entries may differ in size."""
    counts = [t.numel() for t in inputs]
    even = len(set(counts)) == 1

    def call() -> None:
        x = _joined(queue, inputs, queue.views.elements)
        with _written(output) as out:
            if even:
                queue.comm.reduce_scatter(x, op, out=queue.views.elements(out))
            else:
                queue.comm.reduce_scatterv(x, counts, op, out=queue.views.elements(out))

    return call


def reduce_scatter_single(queue: CallQueue, output: Any, given: Any, op: Op) -> Call:
    """Combines the tensors of all ranks; each rank gets its block."""

    def call() -> None:
        x = queue.views.elements(plain(given))
        with _written(output) as out:
            queue.comm.reduce_scatter(x, op, out=queue.views.elements(out))

    return call


def alltoall(queue: CallQueue, outputs: Sequence[Any], inputs: Sequence[Any]) -> Call:
    """Sends entry q of the inputs to rank q, and gets entry q of the outputs from it."""
    sent = [t.numel() * t.element_size() for t in inputs]
    received = [t.numel() * t.element_size() for t in outputs]

    def call() -> None:
        x = _joined(queue, inputs, queue.views.bytes)
        with _spread(queue, outputs) as out:
            queue.comm.alltoallv(x, sent, received, out=out)

    return call


def alltoall_single(
    queue: CallQueue, output: Any, given: Any, received: Sequence[int], sent: Sequence[int]
) -> Call:
    """Sends parts of a tensor to each rank. The counts are in bytes.

    Blocks of one size take the same way as others: one rank may say that they are, where another lists them.
    """

    def call() -> None:
        x = queue.views.bytes(plain(given))
        with _written(output) as out:
            queue.comm.alltoallv(x, sent, received, out=queue.views.bytes(out))

    return call


def gather(queue: CallQueue, outputs: Sequence[Any], given: Any, root: int) -> Call:
    """Gives the root the tensors of all ranks."""

    def call() -> None:
        x = queue.views.bytes(plain(given))
        if queue.comm.rank != root:
            queue.comm.gather(x, root)
            return
        with _spread(queue, outputs) as out:
            queue.comm.gather(x, root, out=out)

    return call


def scatter(queue: CallQueue, output: Any, inputs: Sequence[Any], root: int) -> Call:
    """Gives every rank its entry of the root's list."""

    def call() -> None:
        x = _joined(queue, inputs, queue.views.bytes) if queue.comm.rank == root else None
        with _written(output) as out:
            queue.comm.scatter(x, root, out=queue.views.bytes(out))

    return call


def in_turn(calls: Sequence[Call]) -> Call:
    """Makes several calls, one after the other."""

    def call() -> None:
        for each in calls:
            each()

    return call


# -- tensors that are not plain, and lists ------------------------------------------------------------


def _bring(work: Any, tensor: Any) -> None:
    if work is not tensor:
        tensor.detach().copy_(work)


@contextmanager
def _written(tensor: Any) -> Iterator[Any]:
    """A plain tensor in place of one that is to be written, and perhaps read."""
    work = plain(tensor)
    yield work
    _bring(work, tensor)


def _joined(queue: CallQueue, tensors: Sequence[Any], view: Callable[[Any, int], Any]) -> Any:
    """An array over all tensors end to end: over their own memory where they lie so."""
    count = sum(t.numel() for t in tensors)
    if are_adjacent(tensors):
        return view(tensors[0], count)
    flat = queue.scratch("joined", tensors[0], count)
    torch.cat([t.detach().reshape(-1) for t in tensors], out=flat)
    return view(flat, count)


@contextmanager
def _spread(queue: CallQueue, tensors: Sequence[Any]) -> Iterator[Any]:
    """Bytes for a result that belongs into all tensors, end to end; it is there when the block ends."""
    count = sum(t.numel() for t in tensors)
    if are_adjacent(tensors):
        yield queue.views.bytes(tensors[0], count)
        return
    flat = queue.scratch("spread", tensors[0], count)
    yield queue.views.bytes(flat)
    parts = flat.split([t.numel() for t in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
