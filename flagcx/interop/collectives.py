"""torch's collectives on tensors and lists of tensors, as flagcx's on one array for each buffer.

Each function returns what a lane is to run. It runs on the lane's thread or stream, where tensors that are
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
from flagcx.interop.lanes import HostLane, Lane
from flagcx.interop.tensors import are_adjacent, is_plain, plain

Call = Callable[[], object]
Op = str | ReduceOp


def allreduce(lane: Lane, tensor: Any, op: Op) -> Call:
    """Combines the tensors of all ranks, in place."""
    if is_plain(tensor):
        return partial(lane.comm.allreduce, lane.views.elements(tensor), op)

    def call() -> None:
        with _written(tensor) as work:
            lane.comm.allreduce(lane.views.elements(work), op)

    return call


def allreduce_all(lane: Lane, tensors: Sequence[Any], op: Op) -> Call:
    """Combines each of several tensors, in place; small ones of one dtype travel together."""

    def call() -> None:
        works = [plain(t) for t in tensors]
        arrays = [lane.views.elements(work) for work in works]
        if isinstance(lane, HostLane) or not torch.cuda.is_current_stream_capturing():
            lane.comm.allreduce(arrays, op)
        else:  # The memory in which they would travel together is not a graph's to keep.
            for array in arrays:
                lane.comm.allreduce(array, op)
        for tensor, work in zip(tensors, works, strict=True):
            _bring(work, tensor)

    return call


def reduce(lane: Lane, tensor: Any, op: Op, root: int) -> Call:
    """Combines the tensors of all ranks at the root."""

    def call() -> None:
        work = plain(tensor)
        lane.comm.reduce(lane.views.elements(work), op, root)
        if lane.comm.rank == root:
            _bring(work, tensor)

    return call


def broadcast(lane: Lane, tensor: Any, root: int) -> Call:
    """Gives every rank the root's tensor."""

    def call() -> None:
        with _written(tensor) as work:
            lane.comm.broadcast(lane.views.bytes(work), root)

    return call


def allgather(lane: Lane, outputs: Sequence[Any], given: Any) -> Call:
    """Gives every rank the tensors of all, which may differ in size."""
    counts = [t.numel() * t.element_size() for t in outputs]
    even = len(set(counts)) == 1

    def call() -> None:
        with _spread(lane, outputs) as out:
            x = lane.views.bytes(plain(given))
            if even:
                lane.comm.allgather(x, out=out)
            else:
                lane.comm.allgatherv(x, counts, out=out)

    return call


def allgather_single(lane: Lane, output: Any, given: Any) -> Call:
    """Gives every rank the tensors of all, one after the other in one tensor."""

    def call() -> None:
        with _written(output) as out:
            lane.comm.allgather(lane.views.bytes(plain(given)), out=lane.views.bytes(out))

    return call


def reduce_scatter(lane: Lane, output: Any, inputs: Sequence[Any], op: Op) -> Call:
    """Combines lists of tensors; each rank gets its entry. Entries may differ in size."""
    counts = [t.numel() for t in inputs]
    even = len(set(counts)) == 1

    def call() -> None:
        x = _joined(lane, inputs, lane.views.elements)
        with _written(output) as out:
            if even:
                lane.comm.reduce_scatter(x, op, out=lane.views.elements(out))
            else:
                lane.comm.reduce_scatterv(x, counts, op, out=lane.views.elements(out))

    return call


def reduce_scatter_single(lane: Lane, output: Any, given: Any, op: Op) -> Call:
    """Combines the tensors of all ranks; each rank gets its block."""

    def call() -> None:
        x = lane.views.elements(plain(given))
        with _written(output) as out:
            lane.comm.reduce_scatter(x, op, out=lane.views.elements(out))

    return call


def alltoall(lane: Lane, outputs: Sequence[Any], inputs: Sequence[Any]) -> Call:
    """Sends entry q of the inputs to rank q, and gets entry q of the outputs from it."""
    sent = [t.numel() * t.element_size() for t in inputs]
    received = [t.numel() * t.element_size() for t in outputs]

    def call() -> None:
        x = _joined(lane, inputs, lane.views.bytes)
        with _spread(lane, outputs) as out:
            lane.comm.alltoallv(x, sent, received, out=out)

    return call


def alltoall_single(
    lane: Lane, output: Any, given: Any, received: Sequence[int], sent: Sequence[int]
) -> Call:
    """Sends parts of a tensor to each rank. The counts are in bytes.

    Blocks of one size take the same way as others: one rank may say that they are, where another lists them.
    """

    def call() -> None:
        x = lane.views.bytes(plain(given))
        with _written(output) as out:
            lane.comm.alltoallv(x, sent, received, out=lane.views.bytes(out))

    return call


def gather(lane: Lane, outputs: Sequence[Any], given: Any, root: int) -> Call:
    """Gives the root the tensors of all ranks."""

    def call() -> None:
        x = lane.views.bytes(plain(given))
        if lane.comm.rank != root:
            lane.comm.gather(x, root)
            return
        with _spread(lane, outputs) as out:
            lane.comm.gather(x, root, out=out)

    return call


def scatter(lane: Lane, output: Any, inputs: Sequence[Any], root: int) -> Call:
    """Gives every rank its entry of the root's list."""

    def call() -> None:
        x = _joined(lane, inputs, lane.views.bytes) if lane.comm.rank == root else None
        with _written(output) as out:
            lane.comm.scatter(x, root, out=lane.views.bytes(out))

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


def _joined(lane: Lane, tensors: Sequence[Any], view: Callable[[Any, int], Any]) -> Any:
    """An array over all tensors end to end: over their own memory where they lie so."""
    count = sum(t.numel() for t in tensors)
    if are_adjacent(tensors):
        return view(tensors[0], count)
    flat = lane.scratch("joined", tensors[0], count)
    torch.cat([t.detach().reshape(-1) for t in tensors], out=flat)
    return view(flat, count)


@contextmanager
def _spread(lane: Lane, tensors: Sequence[Any]) -> Iterator[Any]:
    """Bytes for a result that belongs into all tensors, end to end; it is there when the block ends."""
    count = sum(t.numel() for t in tensors)
    if are_adjacent(tensors):
        yield lane.views.bytes(tensors[0], count)
        return
    flat = lane.scratch("spread", tensors[0], count)
    yield lane.views.bytes(flat)
    parts = flat.split([t.numel() for t in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
