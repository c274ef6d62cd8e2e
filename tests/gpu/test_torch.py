"""torch.distributed through flagcx on GPUs: tensors, streams, graphs, DDP and its hook.

The ranks share one GPU, which torch's NCCL refuses; so torch's own backend is gloo here, with tensors on the
CPU, and every result is compared with its.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

Faults = list[str]


def start(backend: str, path: str) -> tuple[int, int]:
    """Joins the default group of the ranks that the test started, and enhances it."""
    import torch
    import torch.distributed as dist

    import flagcx as fc
    import flagcx.interop.torch  # registers backend="flagcx"
    from flagcx.config import environment

    environ = environment()
    rank, size = int(environ["FLAGCX_RANK"]), int(environ["FLAGCX_SIZE"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.FileStore(path, size)
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    if backend != "flagcx":
        fc.enhance_process_group()
    group: Any = dist.group.WORLD
    ranks = dist.distributed_c10d._world.pg_group_ranks
    ranks.setdefault(group.original, ranks[group])  # the checks compare with its calls
    return rank, size


def run_checks(backend: str, path: str, checks: list[Callable[[int, int], Faults]]) -> dict[str, Faults]:
    """Makes the checks on this rank. Returns what went wrong, by check."""
    import torch.distributed as dist

    rank, size = start(backend, path)
    found = {check.__name__: check(rank, size) for check in checks}
    dist.destroy_process_group()
    return found


def calls(rank: int, size: int) -> Faults:
    """Every call with tensors on the GPU, against gloo's on the CPU."""
    import torch
    import torch.distributed as dist

    from tests.interop.calls import CALLS, differences

    group: Any = dist.group.WORLD
    faults = []
    for name, call in CALLS.items():
        if name in ("objects", "point_to_point"):
            continue
        with torch.device("cuda"):
            ours = [tensor.cpu() for tensor in call(group, rank, size)]
        try:
            theirs = call(group.original, rank, size)
        except (RuntimeError, ValueError):  # gloo has grown its calls one by one; older ones lack some
            theirs = call(group, rank, size)  # on the CPU, where tests/interop compares us with a newer gloo
        faults += differences(name, ours, theirs)
    return faults


def by_flagcx(rank: int, size: int) -> Faults:
    """The calls are flagcx's: its executor for GPUs is there, and nothing went to the original."""
    import torch
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    group._told.clear()
    dist.all_reduce(torch.ones(3, device="cuda"))
    faults = [] if group.communicator._device is not None else ["no executor for GPUs was made"]
    return faults + [f"the original serves {what}" for what in group._told]


def streams(rank: int, size: int) -> Faults:
    """A call runs behind what its stream has; an asynchronous one holds up whoever waits for it, alone."""
    import torch
    import torch.distributed as dist

    faults = []
    count = 200_000
    want = float(sum(q + 1 for q in range(size)))
    side = torch.cuda.Stream()
    for wait_elsewhere in (False, True):
        for asynchronous in (False, True):
            x = torch.zeros(count, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                x += rank + 1
                work = dist.all_reduce(x, async_op=asynchronous)
                if work is not None and not wait_elsewhere:
                    work.wait()
                    y = x * 2
            if work is not None and wait_elsewhere:
                work.wait()
                y = x * 2
            elif work is None:
                torch.cuda.current_stream().wait_stream(side)
                y = x * 2
            else:
                torch.cuda.current_stream().wait_stream(side)
            if not bool((y == 2 * want).all()):
                faults.append(f"elsewhere={wait_elsewhere}, async={asynchronous}: got {y[:3].tolist()}")
    return faults


def memory(rank: int, size: int) -> Faults:
    """Memory of a tensor that its caller drops at once is not given to another while it is in use."""
    import torch
    import torch.distributed as dist

    kept, faults = [], []
    for i in range(30):
        x = torch.full((300_000,), float(rank + i), device="cuda")
        future = dist.all_reduce(x, async_op=True).get_future()
        kept.append(future.then(lambda done: done.value()[0].sum()))
        del x, future
        torch.full((300_000,), -1.0, device="cuda")
    for i, future in enumerate(kept):
        want = 300_000.0 * sum(q + i for q in range(size))
        if future.wait().item() != want:
            faults.append(f"call {i}: {future.wait().item()}, expected {want}")
    return faults


def futures(rank: int, size: int) -> Faults:
    """Callbacks of futures work on streams that wait for the call, and may call again."""
    import torch
    import torch.distributed as dist

    x = torch.full((50_000,), float(rank + 1), device="cuda")

    def again(done: Any) -> Any:
        (value,) = done.value()
        dist.all_reduce(value)
        return value + 1

    got = dist.all_reduce(x, async_op=True).get_future().then(again).wait()
    want = size * sum(q + 1 for q in range(size)) + 1
    return [] if bool((got == want).all()) else [f"got {got[:3].tolist()}, expected {want}"]


def graphs(rank: int, size: int) -> Faults:
    """Calls in a graph that torch captures: NCCL's own, ours with scratch memory, and asynchronous ones."""
    import torch
    import torch.distributed as dist

    faults = []
    x = torch.zeros(40_000, device="cuda")
    half = torch.zeros(3001, device="cuda", dtype=torch.bfloat16)
    bits = torch.zeros(77, device="cuda", dtype=torch.int32)
    gathered = torch.zeros(size * 40_000, device="cuda")

    def step() -> None:
        work = dist.all_reduce(x, async_op=True)
        dist.all_reduce(half, op=dist.ReduceOp.MAX)
        dist.all_reduce(bits, op=dist.ReduceOp.BXOR)
        work.wait()
        dist.all_gather(list(gathered.chunk(size)), x)

    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(warm)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for i in range(20):
        x.fill_(rank + i)
        half.fill_(rank + i)
        bits.fill_(1 << rank)
        graph.replay()
        total = float(sum(q + i for q in range(size)))
        got = x[-1].item(), half[-1].item(), bits[-1].item(), gathered[-1].item(), gathered[0].item()
        want = total, float(size - 1 + i), (1 << size) - 1, total, total
        if got != want:
            faults.append(f"replay {i}: {got}, expected {want}")
    return faults


def ddp(rank: int, size: int) -> Faults:
    """DDP on GPUs trains as DDP with gloo on the CPU does, and its hook too."""
    import torch
    import torch.distributed as dist

    from flagcx.interop.torch import ddp_hook
    from tests.interop import training

    group: Any = dist.group.WORLD
    faults = []
    theirs = training.train(group.original, rank)[1]
    for hook in (None, ddp_hook()):
        for options in ({}, {"gradient_as_bucket_view": True}):
            ours = training.train(None, rank, hook, device="cuda", **options)[1].cpu()
            if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4):
                worst = (ours - theirs).abs().max().item()
                faults.append(f"hook={hook}, {options}: parameters differ by {worst}")
    for codec in ("fp16", "int8", "topk", "powersgd"):
        got, states = training.train(
            None, rank, ddp_hook(compression=codec), 4 * training.STEPS, device="cuda"
        )
        everybodys = [torch.empty_like(states[-1]) for _ in range(size)]
        dist.all_gather(everybodys, states[-1].contiguous())
        if not all(torch.equal(each, everybodys[0]) for each in everybodys):
            faults.append(f"{codec}: the ranks have different parameters")
        if not got[-1] < 0.9 * got[0]:
            faults.append(f"{codec}: the loss went from {got[0]} to {got[-1]}")
    return faults


def captured_training(rank: int, size: int) -> Faults:
    """A whole step of training, gradients averaged by flagcx, in one graph."""
    import torch
    import torch.distributed as dist

    from tests.interop import training

    def run(device: str, group: Any, captures: bool) -> Any:
        model = training.network().to(device)
        x, y = (t.to(device) for t in training.batch(rank, 0))

        def step() -> None:
            for p in model.parameters():
                p.grad = None
            torch.nn.functional.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad, group=group)
                with torch.no_grad():
                    p -= 0.01 * p.grad

        if not captures:
            for _ in range(8):
                step()
        else:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            for _ in range(5):
                graph.replay()
        return torch.cat([p.detach().reshape(-1).cpu() for p in model.parameters()])

    group: Any = dist.group.WORLD
    ours, theirs = run("cuda", None, True), run("cpu", group.original, False)
    if torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4):
        return []
    return [f"parameters differ by {(ours - theirs).abs().max().item()}"]


def compiled(rank: int, size: int) -> Faults:
    """A compiled function with a collective in it."""
    import torch
    import torch.distributed as dist

    def step(x: Any) -> Any:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    got = torch.compile(step, backend="aot_eager")(torch.full((900,), float(rank), device="cuda"))
    want = 2 * sum(range(size)) + 1
    return [] if bool((got == want).all()) else [f"got {got[:3].tolist()}, expected {want}"]


def batches(rank: int, size: int) -> Faults:
    """Large sends and receives on a group of NCCL's; but for the batch they would wait for each other."""
    import torch
    import torch.distributed as dist

    x = torch.full((1 << 24,), float(rank), device="cuda")
    got = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x, (rank + 1) % size),
        dist.P2POp(dist.irecv, got, (rank - 1) % size),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return [] if bool((got == (rank - 1) % size).all()) else [f"got {got[:3].tolist()}"]


def ends_of_barriers(rank: int, size: int) -> Faults:
    """Behind a barrier of NCCL's group the host has waited for what its stream had."""
    import torch
    import torch.distributed as dist

    x = torch.zeros(10, device="cuda")
    torch.cuda._sleep(50_000_000)
    x += 1
    event = torch.cuda.current_stream().record_event()
    dist.barrier()
    return [] if event.query() else ["the stream was still at work"]


CHECKS = [calls, by_flagcx, streams, memory, futures, graphs, ddp, captured_training, compiled]


def faults_of(results: list[dict[str, Faults]]) -> str:
    """What all ranks found, as text."""
    return "\n".join(
        f"rank {rank}, {check}: {fault}"
        for rank, found in enumerate(results)
        for check, faults in found.items()
        for fault in faults
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "flagcx"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_on_one_gpu(ranks, tmp_path: Path, size: int, backend: str):
    results = ranks(size, run_checks, backend, str(tmp_path / "store"), CHECKS, timeout_s=240)
    assert not faults_of(results), faults_of(results)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["nccl", "flagcx"])
def test_ranks_with_a_gpu_each(tmp_path: Path, backend: str):
    import torch

    import flagcx as fc

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    own = [by_flagcx, streams, memory, futures, graphs, compiled, batches, ends_of_barriers]
    with tempfile.TemporaryDirectory() as place:
        results = fc.launch(run_checks, 2, (backend, f"{place}/store", own), timeout_s=240)
    assert not faults_of(results), faults_of(results)
