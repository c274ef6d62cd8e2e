"""What the ranks of the tests do. Each check returns the list of what went wrong on its rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import flagcx as fc
from flagcx.config import environment
from flagcx.interop.torch import FlagcxProcessGroup
from tests.interop import training
from tests.interop.calls import CALLS, data, differences
from tests.interop.layouts import layouts

Faults = list[str]


def start(backend: str, path: str, **options: Any) -> tuple[int, int]:
    """Joins the default process group through a file. Returns rank and size."""
    torch.set_num_threads(1)
    environ = environment()
    rank, size = int(environ["FLAGCX_RANK"]), int(environ["FLAGCX_SIZE"])
    store = dist.FileStore(path, size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60), **options
    )
    return rank, size


def enhanced(path: str) -> dict[str, Faults]:
    """All checks of an enhanced gloo group."""
    rank, size = start("gloo", path)
    before = _registered()
    group = fc.enhance_process_group()
    found = {}
    for name, call in CALLS.items():
        ours = call(group, rank, size)
        found[name] = differences(name, ours, call(group.original, rank, size))
    for check in CHECKS:
        found[check.__name__] = check(group, rank, size)
    assert dist.group.WORLD is group
    fc.restore_process_group()
    after = _registered()
    found["restored"] = [] if after == before else [f"after restore: {after}, before: {before}"]
    found["restored"] += differences("restored", *(_sum(g, rank) for g in (None, group)))
    dist.destroy_process_group()
    return found


def backend(path: str) -> dict[str, Faults]:
    """All checks of backend="flagcx"; then it ends, and begins again."""
    rank, size = start("flagcx", path)
    group = dist.group.WORLD
    assert isinstance(group, FlagcxProcessGroup)
    found = {"name": [] if dist.get_backend() == "flagcx" else [f"the backend is {dist.get_backend()}"]}
    for name, call in CALLS.items():
        ours = call(group, rank, size)
        c10d._world.pg_group_ranks[group.original] = c10d._world.pg_group_ranks[group]
        found[name] = differences(name, ours, call(group.original, rank, size))
    for check in CHECKS:
        found[check.__name__] = check(group, rank, size)
    dist.destroy_process_group()
    start("flagcx", path + ".again", pg_options={"cross_memory": False})
    again = dist.group.WORLD
    found["again"] = differences("again", _sum(None, rank), [sum(data(q, 50) for q in range(size))])
    found["options"] = [] if not again.config.cross_memory else ["pg_options were not taken"]
    dist.destroy_process_group()
    return found


def _registered() -> list[Any]:
    """All that torch knows of groups."""
    world, outside = c10d._world, dist.GroupMember.NON_GROUP_MEMBER
    tables = world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag, world.pg_group_ranks
    return [
        [{key: str(value) for key, value in table.items() if key != outside} for table in tables],
        {tag: list(groups) for tag, groups in world.tags_to_pg.items() if groups},
        world.default_pg,
        c10d.P2POp.__init__,
        torch._C._distributed_c10d._resolve_process_group(world.pg_names[world.default_pg]),
    ]


def _sum(group: Any, rank: int) -> list[Any]:
    x = data(rank, 50)
    dist.all_reduce(x, group=group)
    return [x]


# -- checks ---------------------------------------------------------------------------------------------


def average(group: Any, rank: int, size: int) -> Faults:
    """AVG, which gloo may lack."""
    faults = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        x = data(rank, 77, dtype) * size
        dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group)
        faults += differences(f"average {dtype}", [x], [sum(data(q, 77, dtype) for q in range(size))])
    return faults


def uneven(group: Any, rank: int, size: int) -> Faults:
    """Lists of tensors that differ in size, which gloo may lack."""
    outputs = [torch.zeros(3 + q + rank) for q in range(size)]
    dist.all_to_all(outputs, [data(rank, 3 + q + rank, salt=q) for q in range(size)], group=group)
    faults = differences("all_to_all", outputs, [data(q, 3 + q + rank, salt=rank) for q in range(size)])
    gathered = [torch.zeros(q, 2) for q in range(size)]
    dist.all_gather(gathered, data(rank, 2 * rank).view(rank, 2), group=group)
    faults += differences("all_gather", gathered, [data(q, 2 * q).view(q, 2) for q in range(size)])
    output = torch.zeros(rank + 2)
    dist.reduce_scatter(output, [data(rank, q + 2, salt=q) for q in range(size)], group=group)
    want = sum(data(q, rank + 2, salt=rank) for q in range(size))
    return faults + differences("reduce_scatter", [output], [want])


def half_precision(group: Any, rank: int, size: int) -> Faults:
    """Sums of half precision are made in float32 and rounded once."""
    faults = []
    for dtype in (torch.float16, torch.bfloat16):
        torch.manual_seed(5)
        inputs = [torch.randn(3000).to(dtype) for _ in range(size)]
        want = torch.stack([x.float() for x in inputs]).sum(0).to(dtype)
        dist.all_reduce(inputs[rank], group=group)
        worst = ((inputs[rank].float() - want.float()).abs() / want.float().abs().clamp(min=1)).max().item()
        if worst > 2 * torch.finfo(dtype).eps:
            faults.append(f"{dtype}: off by {worst}")
    return faults


def in_flagcx(group: Any, rank: int, size: int) -> Faults:
    """The calls are made by flagcx, not by the original."""
    calls = group.communicator.profiler
    before = len(calls.records())
    tensors = [data(rank, 4000) for _ in range(3)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    found = calls.records()[before:] if before < 1000 else calls.records()[-3:]
    kinds = [record.operation.collective for record in found]
    return [] if kinds == ["allreduce"] * 3 else [f"flagcx recorded {kinds}"]


def callbacks(group: Any, rank: int, size: int) -> Faults:
    """A future's callback may call, and wait for, the same group."""
    x, y = data(rank, 300), data(rank, 300, salt=4)

    def again(done: Any) -> Any:
        (value,) = done.value()
        dist.all_reduce(y, group=group)
        dist.all_reduce(value, group=group, async_op=True).get_future().wait()
        return value + y

    future = dist.all_reduce(x, group=group, async_op=True).get_future().then(again)
    total = sum(data(q, 300) for q in range(size)) * size + sum(data(q, 300, salt=4) for q in range(size))
    return differences("callbacks", [future.wait()], [total])


def dropped(group: Any, rank: int, size: int) -> Faults:
    """A tensor that its caller drops at once lives on while its call runs."""
    kept = []
    for _ in range(40):
        dist.all_reduce(torch.ones(30_000), group=group, async_op=True)
        kept.append(torch.zeros(30_000))
    dist.barrier(group=group)
    touched = [i for i, tensor in enumerate(kept) if tensor.any()]
    return [f"calls wrote into other tensors' memory: {touched}"] if touched else []


def errors_of_works(group: Any, rank: int, size: int) -> Faults:
    """An error of an asynchronous call comes out of ``wait`` and out of the future."""
    half = dist.new_group(list(range(size)))
    half = fc.enhance_process_group(half)
    half.communicator.close()
    faults = []
    work = dist.all_reduce(torch.ones(3), group=half, async_op=True)
    for wait in (work.wait, work.get_future().wait):
        try:
            wait()
            faults.append("no error")
        except Exception as error:
            faults += [] if "closed" in str(error) else [f"{error!r}"]
    faults += [] if work.exception() is not None and not work.is_success() else ["the work has no error"]
    dist.destroy_process_group(half)
    return faults


def subgroups(group: Any, rank: int, size: int) -> Faults:
    """Groups of some ranks, enhanced or not, several at once, with calls in between on all."""
    faults = []
    everybodys = [dist.new_group([q, (q + 1) % size]) for q in range(size)] if size > 2 else []
    pairs = [fc.enhance_process_group(g) for g in everybodys]
    for q, pair in enumerate(pairs):
        members = sorted((q, (q + 1) % size))
        if rank not in members:
            faults += [] if pair is dist.GroupMember.NON_GROUP_MEMBER else [f"rank {rank} is in pair {q}"]
            continue
        x, whole = data(rank, 2000, salt=q), data(rank, 20)
        work = dist.all_reduce(x, group=pair, async_op=True)
        dist.broadcast(whole, src=members[1], group=pair)
        work.wait()
        want = [sum(data(r, 2000, salt=q) for r in members), data(members[1], 20)]
        faults += differences(f"pair {q}", [x, whole], want)
    dist.barrier(group=group)
    same = fc.enhance_process_group(dist.new_group(list(range(size))))
    faults += differences("same ranks", _sum(same, rank), _sum(group, rank))
    for pair in [*pairs, same]:
        if pair is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(pair)
    return faults


def sparse(group: Any, rank: int, size: int) -> Faults:
    """Sparse tensors are the original's."""
    x = torch.sparse_coo_tensor(torch.tensor([[rank, 4]]), torch.tensor([1.0, 2.0]), (6,))
    dist.all_reduce(x, group=group)
    want = torch.zeros(6)
    want[:size] += 1
    want[4] += 2 * size
    return differences("sparse", [x.to_dense()], [want])


def unjoined(group: Any, rank: int, size: int) -> Faults:
    """Where flagcx cannot join the ranks, or one of them, torch's backend makes the calls of all.

    Those of several hosts it cannot join without ucxx.
    """
    from flagcx.interop import joining

    def other_host() -> str:
        return f"host {rank}"

    def full(*_: Any) -> Any:
        raise fc.ResourceError("there is no room")

    faults = []
    for name, value in (("host_name", other_host), ("Communicator", full)):
        before = getattr(joining, name)
        if name == "host_name" or rank == size - 1:
            setattr(joining, name, value)
        try:
            with mock.patch("flagcx.transport.ucx.load_ucxx", side_effect=ImportError("it is not installed")):
                other = fc.enhance_process_group(dist.new_group(list(range(size))))
                faults += [] if other.communicator is None else [f"{name}: joined"]
        finally:
            setattr(joining, name, before)
        faults += differences(name, _sum(other, rank), _sum(group, rank))
        dist.destroy_process_group(other)
    return faults


def functional(group: Any, rank: int, size: int) -> Faults:
    """The functional collectives, which compiled models use."""
    from torch.distributed import _functional_collectives as functions

    x = data(rank, size * 6)
    total = sum(data(q, size * 6) for q in range(size))
    summed = functions.all_reduce(x, "sum", group)
    gathered = functions.all_gather_tensor(x[:3], 0, group)
    scattered = functions.reduce_scatter_tensor(x, "sum", 0, group)
    sent = functions.all_to_all_single(x, None, None, group)
    want = [
        total,
        torch.cat([data(q, size * 6)[:3] for q in range(size)]),
        total[rank * 6 : rank * 6 + 6],
        torch.cat([data(q, size * 6)[rank * 6 : rank * 6 + 6] for q in range(size)]),
    ]
    return differences("functional", [t + 0 for t in (summed, gathered, scattered, sent)], want)


def compiled(group: Any, rank: int, size: int) -> Faults:
    """A compiled function with a collective in it."""

    def step(x: Any) -> Any:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    want = sum(data(q, 30) for q in range(size)) * 2 + 1
    return differences("compiled", [torch.compile(step, backend="eager")(data(rank, 30))], [want])


def zero_loop(group: Any, rank: int, size: int) -> Faults:
    """Sharded training as ZeRO does it: reduce-scatter gradients, step on a shard, gather parameters."""
    count = 40 * size
    parameters, shard = torch.ones(count), torch.ones(40)
    want = torch.ones(count)
    for step in range(5):
        gradient = data(rank, count, salt=step) * parameters
        mine = torch.empty(40)
        dist.reduce_scatter_tensor(mine, gradient, group=group)
        shard -= mine / 1024
        dist.all_gather_into_tensor(parameters, shard, group=group)
        want -= sum(data(q, count, salt=step) * want for q in range(size)) / 1024
    return differences("zero", [parameters], [want]) if not torch.allclose(parameters, want) else []


def logged(group: Any, rank: int, size: int) -> Faults:
    """What the original serves is said once, at level debug."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("flagcx")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        group._told.clear()
        for _ in range(2):
            sparse(group, rank, size)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    named = [m for m in messages if "torch's own backend serves allreduce" in m]
    return [] if len(named) == 1 else [f"said {messages}"]


CHECKS: tuple[Callable[[Any, int, int], Faults], ...] = (
    average,
    uneven,
    half_precision,
    in_flagcx,
    callbacks,
    dropped,
    layouts,
    errors_of_works,
    subgroups,
    sparse,
    unjoined,
    functional,
    compiled,
    zero_loop,
    logged,
    training.ddp,
    training.hooks,
    training.scaled,
    training.continued,
    training.fsdp,
)
