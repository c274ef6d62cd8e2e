"""Every collective of torch on tensors that are not contiguous, while freed memory is overwritten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tests.interop.calls import data, differences, single

_ROWS, _COLUMNS = 6, 4
_POISON = 64


class Poisoning:
    """A communicator that overwrites what was freed before each of its calls.

    Many new tensors of each size in use take the memory of the tensors that are gone.

    Args:
        comm: The communicator.
        nbytes: The sizes.
    """

    def __init__(self, comm: Any, nbytes: tuple[int, ...]) -> None:
        self._comm, self._nbytes = comm, nbytes
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if not callable(found):
            return found

        def call(*args: Any, **named: Any) -> Any:
            self.calls += 1
            poison = [torch.full((n,), 0xEE, dtype=torch.uint8) for n in self._nbytes for _ in range(_POISON)]
            result = found(*args, **named)
            del poison
            return result

        return call


@contextmanager
def poisoned(group: Any, nbytes: tuple[int, ...]) -> Iterator[Poisoning]:
    """A block in which freed memory is overwritten before each call of a group on tensors of the CPU."""
    queue = group.membership.host_queue()
    comm = queue.comm
    queue.comm = Poisoning(comm, nbytes)
    try:
        yield queue.comm
    finally:
        queue.comm = comm


def _transposed(values: Any) -> Any:
    return values.t().contiguous().t()


def _sliced(values: Any) -> Any:
    wide = torch.full((2 * values.shape[0], 3 * values.shape[1] + 1), -1, dtype=values.dtype)
    part = wide[::2, 1::3]
    part.copy_(values)
    return part


def _expanded(values: Any) -> Any:
    """The first column, in the place of every one; only ever read."""
    return values[:, :1].clone().expand(values.shape)


def _negated(values: Any) -> Any:
    return torch._neg_view(-values)


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "transposed": _transposed,
    "sliced": _sliced,
    "expanded": _expanded,
    "negated": _negated,
}


def layouts(group: Any, rank: int, size: int) -> list[str]:
    """Inputs, outputs and lists of every layout, waited for or not, give what contiguous ones give."""
    faults: list[str] = []
    calls = 0
    block = _ROWS * _COLUMNS * 4
    with poisoned(group, (block, block * size, block // 2)) as poisoning:
        for name, layout in LAYOUTS.items():
            for dtype in (torch.float32, torch.int64):
                for is_async in (False, True):
                    what = f"{name} {dtype} {'async' if is_async else 'sync'}"
                    got, want = _all(group, rank, size, layout, name, dtype, is_async)
                    faults += differences(what, got, want)
                    calls += 1
        if poisoning.calls < calls * 8:
            faults.append(f"only {poisoning.calls} calls were poisoned")
    return faults


def _all(
    group: Any, rank: int, size: int, layout: Any, name: str, dtype: Any, is_async: bool
) -> tuple[list[Any], list[Any]]:
    """Results of all collectives, and what they must be."""
    options = {"group": group, "async_op": is_async}

    def block(q: int, salt: int = 0, blocks: int = 1) -> Any:
        """What rank q gives, with its values in the layout."""
        values = data(q, blocks * _ROWS * _COLUMNS, dtype, salt).view(blocks * _ROWS, _COLUMNS)
        return layout(values)

    def space(blocks: int = 1) -> Any:
        """A tensor to write to, not contiguous either where torch allows it."""
        empty = torch.zeros(blocks * _ROWS, _COLUMNS, dtype=dtype)
        return empty if name in ("expanded", "negated") else layout(empty)

    def run(call: Any, *args: Any, **more: Any) -> None:
        work = call(*args, **options, **more)
        del args
        if is_async:
            work.wait()

    ranks = range(size)
    got: list[Any] = []
    want: list[Any] = []

    gathered = [space() for _ in ranks]
    run(dist.all_gather, gathered, block(rank))
    got, want = got + gathered, want + [block(q) for q in ranks]

    whole = torch.zeros(size * _ROWS, _COLUMNS, dtype=dtype)
    run(single("all_gather"), whole, block(rank, 1))
    got, want = [*got, whole], [*want, torch.cat([block(q, 1) for q in ranks])]

    part = space()
    run(single("reduce_scatter"), part, block(rank, 2, size))
    mine = slice(rank * _ROWS, (rank + 1) * _ROWS)
    got, want = [*got, part], [*want, sum(block(q, 2, size)[mine] for q in ranks)]

    part = space()
    run(dist.reduce_scatter, part, [block(rank, 3 + q) for q in ranks])
    got, want = [*got, part], [*want, sum(block(q, 3 + rank) for q in ranks)]

    exchanged = torch.zeros(size * _ROWS, _COLUMNS, dtype=dtype)
    run(dist.all_to_all_single, exchanged, block(rank, 4, size))
    got, want = [*got, exchanged], [*want, torch.cat([block(q, 4, size)[mine] for q in ranks])]

    outputs = [space() for _ in ranks]
    run(dist.all_to_all, outputs, [block(rank, 5 + q) for q in ranks])
    got, want = got + outputs, want + [block(q, 5 + rank) for q in ranks]

    for root in ranks:
        lists = [space() for _ in ranks] if rank == root else None
        run(dist.gather, block(rank, 6), lists, dst=root)
        if lists is not None:
            got, want = got + lists, want + [block(q, 6) for q in ranks]
        part = space()
        run(dist.scatter, part, [block(q, 7) for q in ranks] if rank == root else None, src=root)
        got, want = [*got, part], [*want, block(rank, 7)]
        if name == "expanded":
            continue
        told = block(root, 8) if rank == root else space()
        run(dist.broadcast, told, src=root)
        summed = block(rank, 9)
        run(dist.reduce, summed, dst=root)
        got, want = [*got, told], [*want, block(root, 8)]
        if rank == root:
            got, want = [*got, summed], [*want, sum(block(q, 9) for q in ranks)]
    if name != "expanded":
        total = block(rank, 10)
        run(dist.all_reduce, total)
        got, want = [*got, total], [*want, sum(block(q, 10) for q in ranks)]
    return got, want
