"""torch's collectives on tensors and lists of tensors, as flagcx's on one array for each buffer.

Each function returns the task of a call queue, for the queue's thread or stream. The task copies tensors that
are not plain, and lays lists end to end unless their memory is so already. Collectives that only move data
send bytes, so that they serve every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flagcx.dtypes import Op
from flagcx.interop.call_queue import CallQueue, HostQueue, PlainCall, Task
from flagcx.interop.tensors import are_adjacent, is_plain, plain


def allreduce(queue: CallQueue, tensor: Any, op: Op) -> Task:
    """Combines the tensors of all ranks, in place."""
    if is_plain(tensor):
        return PlainCall(queue.comm.allreduce, queue.views.elements(tensor), op)

    def task() -> None:
        copy = plain(tensor)
        queue.comm.allreduce(queue.views.elements(copy), op)
        _copy_back(copy, tensor)

    return task


def allreduce_all(queue: CallQueue, tensors: Sequence[Any], op: Op) -> Task:
    """Combines each of several tensors, in place; small ones of one dtype travel together."""

    def task() -> None:
        copies = [plain(t) for t in tensors]
        arrays = [queue.views.elements(copy) for copy in copies]
        if isinstance(queue, HostQueue) or not torch.cuda.is_current_stream_capturing():
            queue.comm.allreduce(arrays, op)
        else:  # A graph cannot keep the memory in which they would travel together.
            for array in arrays:
                queue.comm.allreduce(array, op)
        for tensor, copy in zip(tensors, copies, strict=True):
            _copy_back(copy, tensor)

    return task


def reduce(queue: CallQueue, tensor: Any, op: Op, root: int) -> Task:
    """Combines the tensors of all ranks at the root."""

    def task() -> None:
        copy = plain(tensor)
        queue.comm.reduce(queue.views.elements(copy), op, root)
        if queue.comm.rank == root:
            _copy_back(copy, tensor)

    return task


def broadcast(queue: CallQueue, tensor: Any, root: int) -> Task:
    """Gives every rank the root's tensor."""

    def task() -> None:
        copy = plain(tensor)
        queue.comm.broadcast(queue.views.bytes(copy), root)
        _copy_back(copy, tensor)

    return task


def allgather(queue: CallQueue, outputs: Sequence[Any], x: Any) -> Task:
    """Gives every rank the tensors of all: one for each rank, which may differ in size, or one for all."""
    counts = [t.numel() * t.element_size() for t in outputs]
    even = len(set(counts)) == 1

    def task() -> None:
        out, flat = _target(queue, outputs)
        sendbuf = _joined(queue, [x], queue.views.bytes)
        if even:
            queue.comm.allgather(sendbuf, out=out)
        else:
            queue.comm.allgatherv(sendbuf, counts, out=out)
        _distribute(flat, outputs)

    return task


def reduce_scatter(queue: CallQueue, output: Any, inputs: Sequence[Any], op: Op) -> Task:
    """Combines tensors, one for each rank (of any sizes) or one for all; each rank gets its part."""
    counts = [t.numel() for t in inputs]
    even = len(set(counts)) == 1

    def task() -> None:
        sendbuf, copy = _joined(queue, inputs, queue.views.elements), plain(output)
        if even:
            queue.comm.reduce_scatter(sendbuf, op, out=queue.views.elements(copy))
        else:
            queue.comm.reduce_scatterv(sendbuf, counts, op, out=queue.views.elements(copy))
        _copy_back(copy, output)

    return task


def alltoall(
    queue: CallQueue,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    sent: Sequence[int],
    received: Sequence[int],
) -> Task:
    """Sends part q of the inputs, end to end, to rank q, and gets part q of the outputs from it.

    ``sent`` and ``received`` are the bytes of the parts. Parts of one size are no case of their own: one rank
    may leave the sizes out where another lists them.
    """

    def task() -> None:
        sendbuf = _joined(queue, inputs, queue.views.bytes)
        out, flat = _target(queue, outputs)
        queue.comm.alltoallv(sendbuf, sent, received, out=out)
        _distribute(flat, outputs)

    return task


def gather(queue: CallQueue, outputs: Sequence[Any], x: Any, root: int) -> Task:
    """Gives the root the tensors of all ranks."""

    def task() -> None:
        sendbuf = _joined(queue, [x], queue.views.bytes)
        if queue.comm.rank != root:
            queue.comm.gather(sendbuf, root)
            return
        out, flat = _target(queue, outputs)
        queue.comm.gather(sendbuf, root, out=out)
        _distribute(flat, outputs)

    return task


def scatter(queue: CallQueue, output: Any, inputs: Sequence[Any], root: int) -> Task:
    """Gives every rank its entry of the root's list."""

    def task() -> None:
        sendbuf = _joined(queue, inputs, queue.views.bytes) if queue.comm.rank == root else None
        copy = plain(output)
        queue.comm.scatter(sendbuf, root, out=queue.views.bytes(copy))
        _copy_back(copy, output)

    return task


def in_turn(tasks: Sequence[Task]) -> Task:
    """Runs several tasks, one after the other."""

    def task() -> None:
        for each in tasks:
            each()

    return task


# -- tensors that are not plain, and lists ------------------------------------------------------------


def _copy_back(copy: Any, tensor: Any) -> None:
    if copy is not tensor:
        tensor.detach().copy_(copy)


def _joined(queue: CallQueue, tensors: Sequence[Any], view: Callable[..., Any]) -> Any:
    """An array over all tensors end to end: over their own memory where they lie so, else over a copy."""
    count = sum(t.numel() for t in tensors)
    if are_adjacent(tensors):
        return view(tensors[0], count)
    flat = queue.scratch("joined", tensors[0], count)
    torch.cat([t.detach().reshape(-1) for t in tensors], out=flat)
    return view(flat, count, flat)


def _target(queue: CallQueue, tensors: Sequence[Any]) -> tuple[Any, Any]:
    """Bytes for all tensors end to end, and the tensor that has them, if they are not the tensors' memory."""
    count = sum(t.numel() for t in tensors)
    if are_adjacent(tensors):
        return queue.views.bytes(tensors[0], count), None
    flat = queue.scratch("spread", tensors[0], count)
    return queue.views.bytes(flat), flat


def _distribute(flat: Any, tensors: Sequence[Any]) -> None:
    """Copies the parts of a tensor of ``_target`` into the tensors."""
    if flat is not None:
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
