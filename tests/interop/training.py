"""Training of a small network: through flagcx as through gloo, step for step."""

from __future__ import annotations

import io
import itertools
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flagcx.compression import RandomK
from flagcx.interop.torch import ddp_hook

Faults = list[str]
STEPS = 6
CODECS = ("fp16", "bf16", "fp8", "int8", "int4", "topk", "randomk", "powersgd", "sparse")


def network() -> Any:
    """A network with several buckets of gradients, the same on every rank."""
    torch.manual_seed(11)
    layers = [torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 3))


def batch(rank: int, step: int) -> tuple[Any, Any]:
    """Inputs and classes of a rank in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 20, generator=generator)
    return x, (x[:, :3] * 3).argmax(1)


def train(
    group: Any,
    rank: int,
    hook: Any = None,
    steps: int = STEPS,
    device: str = "cpu",
    compiler: str = "",
    **options: Any,
) -> tuple[list[float], Any]:
    """Losses of each step, and the parameters, end to end, after each."""
    options = {"bucket_cap_mb": 0.01} | options
    model = DistributedDataParallel(network().to(device), process_group=group, **options)
    run = torch.compile(model, backend=compiler) if compiler else model
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, states = [], []
    for step in range(steps):
        x, y = (tensor.to(device) for tensor in batch(rank, step))
        loss = torch.nn.functional.cross_entropy(run(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        states.append(torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()]))
    return losses, torch.stack(states)


def close(name: str, ours: Any, theirs: Any, size: int) -> Faults:
    """Equal with two ranks, whose sums have one order; else within the rounding of another order."""
    same = torch.equal(ours, theirs) if size == 2 else torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    return [] if same else [f"{name}: parameters differ by {(ours - theirs).abs().max().item()}"]


def ddp(group: Any, rank: int, size: int) -> Faults:
    """DistributedDataParallel, in the forms that it has."""
    faults = []
    _, theirs = train(group.original, rank)
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        faults += close(f"DDP {options}", train(None, rank, **options)[1], theirs, size)
    # The compiler wants a first bucket that is no larger than the others, so there is but one.
    ours = train(None, rank, compiler="aot_eager", bucket_cap_mb=25)[1]
    return faults + close("DDP compiled", ours, theirs, size)


def hooks(group: Any, rank: int, size: int) -> Faults:
    """Hooks: none is DDP's own average; the others train too, and keep the ranks equal bit by bit."""
    faults = []
    losses, theirs = train(group.original, rank)
    faults += close("hook without compression", train(None, rank, ddp_hook())[1], theirs, size)
    other = dist.new_group(list(range(size)))
    faults += close("hook on a plain group", train(other, rank, ddp_hook(group=other))[1], theirs, size)
    dist.destroy_process_group(other)
    for name in CODECS if size == 2 else ("int8", "topk"):
        codec = RandomK(density=0.1) if name == "randomk" else name
        got, states = train(None, rank, ddp_hook(compression=codec), steps=4 * STEPS)
        everybodys = [torch.empty_like(states[-1]) for _ in range(size)]
        dist.all_gather(everybodys, states[-1].contiguous())
        if not all(torch.equal(each, everybodys[0]) for each in everybodys):
            faults.append(f"{name}: the ranks have different parameters")
        if not got[-1] < 0.9 * losses[0]:
            faults.append(f"{name}: the loss went from {got[0]} to {got[-1]}")
    return faults


def scaled(group: Any, rank: int, size: int) -> Faults:
    """A GradScaler's skipped step is skipped on all ranks, once, and leaves all that the codec remembers.

    In step 4 all gradients are infinite on one rank, in step 8 those of one bucket.
    """
    faults = []
    for codec, momentum in itertools.product(("fp16", "int8", "topk", "randomk", "powersgd"), (0.0, 0.9)):
        model = DistributedDataParallel(network(), bucket_cap_mb=0.01)
        hook = ddp_hook(compression=codec, momentum=momentum)
        model.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler, skipped = torch.amp.GradScaler("cpu", init_scale=256.0), []
        for step in range(12):
            x, y = batch(rank, step)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            kept, spoils = hook.state_dict(), None
            if step == 8 and rank == 0:
                spoils = model.module[-1].bias.register_hook(lambda grad: grad / 0)
            optimizer.zero_grad()
            scaler.scale(loss * (float("inf") if step == 4 and rank == size - 1 else 1)).backward()
            before = [p.detach().clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            if all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)):
                skipped.append(step)
                after = hook.state_dict()
                if kept.keys() != after.keys() or not all(np.array_equal(kept[k], after[k]) for k in kept):
                    faults.append(f"{codec} with momentum {momentum}: step {step} left something behind")
            if spoils is not None:
                spoils.remove()
        if skipped != [4, 8] or scaler.get_scale() != 64.0:
            faults.append(f"{codec} with momentum {momentum}: skipped {skipped}")
    return faults


def continued(group: Any, rank: int, size: int) -> Faults:
    """A training that goes on from the states of model, optimizer and hook ends with the same bits."""
    faults = []

    def begin(codec: str, momentum: float) -> tuple[Any, Any, Any]:
        model = DistributedDataParallel(network(), bucket_cap_mb=0.01)
        hook = ddp_hook(compression=codec, momentum=momentum)
        model.register_comm_hook(None, hook)
        return model, hook, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0 if momentum else 0.9)

    def go(model: Any, optimizer: Any, first: int, last: int) -> Any:
        for step in range(first, last):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()

    for codec, momentum in (("int8", 0.0), ("topk", 0.9), ("powersgd", 0.0)):
        model, hook, optimizer = begin(codec, momentum)
        go(model, optimizer, 0, 5)
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict(), hook.state_dict()], file)
        through = go(model, optimizer, 5, 10)
        for warm in (True, False):
            model, hook, optimizer = begin(codec, momentum)
            if warm:  # DDP forms its buckets anew after the first pass
                go(model, optimizer, 90, 91)
            file.seek(0)
            states = torch.load(file, weights_only=False)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for part, state in zip((model, optimizer, hook), states, strict=True):
                    part.load_state_dict(state)
                end = go(model, optimizer, 5, 10)
            said = [str(w.message) for w in caught if "whose memory was loaded" in str(w.message)]
            if warm and (said or not torch.equal(end, through)):
                faults.append(f"{codec} goes on with other bits: {said}")
            steps = hook.state_dict()["0.step"] - states[2]["0.step"]
            if steps != (5 if warm or not said else 4):
                faults.append(f"{codec} uses what was loaded in {steps} steps: {said}")
            if not torch.isfinite(end).all() or (end - through).abs().max() > 0.5:
                faults.append(f"{codec} goes on elsewhere")
    if ddp_hook().state_dict():
        faults.append("a hook without compression has a state")
    return faults


def fsdp(group: Any, rank: int, size: int) -> Faults:
    """Parameters in shards: torch's own fully_shard, which gathers and scatters through the group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _, theirs = train(group.original, rank)
    model = network()
    mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ours = torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])
    if not torch.allclose(ours, theirs[-1], rtol=1e-4, atol=1e-6):
        return [f"FSDP: parameters differ by {(ours - theirs[-1]).abs().max().item()}"]
    return []
