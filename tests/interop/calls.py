"""Every call of torch.distributed, as one function each that returns the tensors it has written.

Data differs in every (rank, index), and sums are small integers: exact in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Result = list[Any]

GLOO_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)
GLOO_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
BIT_OPS = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
COUNTS = (0, 1, 5, 1000, 70_001)


def data(rank: int, count: int, dtype: Any = torch.float32, salt: int = 0) -> Any:
    """Numbers from 1 to 13, of which each place has its own on each rank."""
    return ((torch.arange(count) * 7 + rank * 5 + salt) % 13 + 1).to(dtype)


def all_reduce(group: Any, rank: int, size: int) -> Result:
    results = []
    for dtype in GLOO_DTYPES:
        floating = dtype.is_floating_point
        for op in GLOO_OPS if floating else (*GLOO_OPS, *BIT_OPS):
            x = data(rank, 130, dtype)
            if op == dist.ReduceOp.PRODUCT:
                x = (x % 2 + 1).to(dtype)
            dist.all_reduce(x, op=op, group=group)
            results.append(x)
    for count in COUNTS:
        x = data(rank, count)
        dist.all_reduce(x, group=group)
        results.append(x)
    return results


def all_reduce_complex(group: Any, rank: int, size: int) -> Result:
    x = torch.complex(data(rank, 33), data(rank, 33, salt=3))
    dist.all_reduce(x, group=group)
    return [x]


def reduce(group: Any, rank: int, size: int) -> Result:
    results = []
    for root in range(size):
        for op in GLOO_OPS[:1] + GLOO_OPS[2:]:
            x = data(rank, 700, torch.int64, salt=root)
            dist.reduce(x, dst=root, op=op, group=group)
            results += [x] if rank == root else []
    return results


def broadcast(group: Any, rank: int, size: int) -> Result:
    results = []
    for root in range(size):
        for dtype in (*GLOO_DTYPES, torch.bool, torch.complex64):
            x = data(rank, 300, dtype, salt=root)
            dist.broadcast(x, src=root, group=group)
            results.append(x)
    return results


def all_gather(group: Any, rank: int, size: int) -> Result:
    results = []
    for dtype in GLOO_DTYPES:
        outputs = [torch.zeros(4, 9, dtype=dtype) for _ in range(size)]
        dist.all_gather(outputs, data(rank, 36, dtype).view(4, 9), group=group)
        results += outputs
    whole = torch.zeros(size * 5)
    dist.all_gather(list(whole.chunk(size)), data(rank, 5), group=group)
    return [*results, whole]


def all_gather_single(group: Any, rank: int, size: int) -> Result:
    whole = torch.zeros(size * 50, 3)
    single("all_gather")(whole, data(rank, 150).view(50, 3), group=group)
    own = torch.zeros(size, 7)
    own[rank] = data(rank, 7)
    single("all_gather")(own.view(-1), own[rank], group=group)
    return [whole, own]


def reduce_scatter(group: Any, rank: int, size: int) -> Result:
    results = []
    for op in GLOO_OPS[:1] + GLOO_OPS[2:]:
        output = torch.zeros(21)
        dist.reduce_scatter(output, [data(rank, 21, salt=q) for q in range(size)], op=op, group=group)
        results.append(output)
    return results


def reduce_scatter_single(group: Any, rank: int, size: int) -> Result:
    output = torch.zeros(11, 2)
    single("reduce_scatter")(output, data(rank, size * 22).view(size * 11, 2), group=group)
    return [output]


def all_to_all(group: Any, rank: int, size: int) -> Result:
    outputs = [torch.zeros(4, 2) for q in range(size)]
    inputs = [data(rank, 8, salt=q).view(4, 2) for q in range(size)]
    dist.all_to_all(outputs, inputs, group=group)
    return outputs


def all_to_all_single(group: Any, rank: int, size: int) -> Result:
    even = torch.zeros(size * 2, 5)
    dist.all_to_all_single(even, data(rank, size * 10).view(size * 2, 5), group=group)
    sent, received = [q + 1 + rank for q in range(size)], [rank + 1 + q for q in range(size)]
    uneven = torch.zeros(sum(received), 2)
    x = data(rank, 2 * sum(sent)).view(-1, 2)
    dist.all_to_all_single(uneven, x, received, sent, group=group)
    return [even, uneven]


def gather(group: Any, rank: int, size: int) -> Result:
    results = []
    for root in range(size):
        outputs = [torch.zeros(17) for _ in range(size)] if rank == root else None
        dist.gather(data(rank, 17, salt=root), outputs, dst=root, group=group)
        results += outputs or []
    return results


def scatter(group: Any, rank: int, size: int) -> Result:
    results = []
    for root in range(size):
        output = torch.zeros(19)
        inputs = [data(q, 19, salt=root) for q in range(size)] if rank == root else None
        dist.scatter(output, inputs, src=root, group=group)
        results.append(output)
    return results


def views(group: Any, rank: int, size: int) -> Result:
    """Tensors with an offset, a shape, a gradient; and those that have strides, where gloo takes a copy."""
    base = data(rank, 1001)
    dist.all_reduce(base[1:], group=group)
    scalar = torch.tensor(float(rank + 1))
    dist.all_reduce(scalar, group=group)
    weight = torch.nn.Parameter(data(rank, 12).view(3, 4))
    with torch.no_grad():
        dist.all_reduce(weight, group=group)
    strided = data(rank, 40).view(5, 8)
    for column in (strided.t(), strided[:, 2:5]):
        if isinstance(group, dist.ProcessGroup) and type(group) is dist.ProcessGroup:
            copy = column.contiguous()
            dist.all_reduce(copy, group=group)
            column.copy_(copy)
        else:
            dist.all_reduce(column, group=group)
    return [base, scalar, weight.detach(), strided]


def coalesced(group: Any, rank: int, size: int) -> Result:
    tensors = [data(rank, count, salt=count) for count in (3, 1000, 40_000)]
    with dist.distributed_c10d._coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    many = [data(rank, 6, salt=i) for i in range(20)]
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as works:
        for tensor in many:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    works.wait()
    return tensors + many


def objects(group: Any, rank: int, size: int) -> Result:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (rank + 1)}, group=group)
    told = [("from", rank), rank]
    dist.broadcast_object_list(told, src=size - 1, group=group)
    return [gathered, told]


def asynchronous(group: Any, rank: int, size: int) -> Result:
    tensors = [data(rank, 5000, salt=i) for i in range(10)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    gathered = [torch.zeros(8) for _ in range(size)]
    works.append(dist.all_gather(gathered, data(rank, 8), group=group, async_op=True))
    behind = data(rank, 64)
    dist.all_reduce(behind, group=group)
    for work in works:
        work.wait()
    if behind.is_cuda:  # there a wait holds up the stream, and not the host
        torch.cuda.synchronize()
    assert all(work.is_completed() for work in works)
    future = dist.all_reduce(tensors[0], group=group, async_op=True).get_future()
    (first,) = future.wait()
    return [*tensors, *gathered, behind, first]


def point_to_point(group: Any, rank: int, size: int) -> Result:
    got = torch.zeros(31)
    after, before = (rank + 1) % size, (rank - 1) % size
    work = dist.isend(data(rank, 31), after, group=group, tag=3)
    dist.recv(got, before, group=group, tag=3)
    work.wait()
    batch = torch.zeros(31)
    operations = [
        dist.P2POp(dist.isend, data(rank, 31, salt=1), after, group),
        dist.P2POp(dist.irecv, batch, before, group),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return [got, batch]


CALLS: dict[str, Callable[[Any, int, int], Result]] = {
    function.__name__: function
    for function in (
        all_reduce,
        all_reduce_complex,
        reduce,
        broadcast,
        all_gather,
        all_gather_single,
        reduce_scatter,
        reduce_scatter_single,
        all_to_all,
        all_to_all_single,
        gather,
        scatter,
        views,
        coalesced,
        objects,
        asynchronous,
        point_to_point,
    )
}


def differences(name: str, ours: Result, theirs: Result) -> list[str]:
    """What is not the same in two results."""
    if len(ours) != len(theirs):
        return [f"{name}: {len(ours)} results, expected {len(theirs)}"]
    faults = []
    for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(one, torch.Tensor):
            same = one.dtype == other.dtype and torch.equal(one, other)
        else:
            same = one == other
        if not same:
            faults.append(f"{name}: result {i} is {one}, expected {other}")
    return faults


def single(collective: str) -> Callable[..., Any]:
    """The form on one tensor, by the name that this torch has for it."""
    newer = {"all_gather": "all_gather_single", "reduce_scatter": "reduce_scatter_single"}[collective]
    older = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[collective]
    return getattr(dist, newer, None) or getattr(dist, older)
