"""What ranks do to test the operators for rows, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import layer_norm, rms_norm

import flagcx as fc
from flagcx.interop.torch import allreduce_rmsnorm

SHAPE = (2, 3, 40)
EPS = 1e-5


def data(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that differ in every seed and place."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def joined(path: str, enhance: bool = True) -> int:
    """Joins the ranks in a group of gloo's, enhanced or not; returns this rank."""
    comm = fc.init()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=comm.rank, world_size=comm.size)
    if enhance:
        fc.enhance_process_group()
    return comm.rank


def far(name: str, got: torch.Tensor, want: torch.Tensor, last: float = 1e-5) -> list[str]:
    """What is wrong with a tensor."""
    if torch.allclose(got.float(), want.float(), last, last):
        return []
    return [f"{name}: {got.flatten()[:3].tolist()}, expected {want.flatten()[:3].tolist()}"]


def operators(path: str, kind: str, last: float, enhance: bool) -> list[str]:
    """Each operator, on an enhanced group and on one that is not."""
    dtype = getattr(torch, kind)
    rank, ops, faults = joined(path, enhance), torch.ops.flagcx, []
    size, name = dist.get_world_size(), dist.group.WORLD.group_name
    x, residual, weight = (
        data(rank, *SHAPE, dtype=dtype),
        data(50, *SHAPE, dtype=dtype),
        data(51, 40, dtype=dtype),
    )
    bias, shift = data(52, 40), data(53, 40)
    total = sum(data(q, *SHAPE, dtype=dtype).float() for q in range(size)) + residual.float()
    kept = residual.clone()

    got, added = allreduce_rmsnorm(x, residual, torch.nn.Parameter(weight), EPS)
    faults += far("norm", got, rms_norm(total, (40,), weight.float(), EPS), last) + far(
        "sum", added, total, last
    )
    assert got.dtype == dtype and torch.equal(residual, kept)

    got, added = ops.allreduce_layernorm(x, residual, weight, shift, EPS, name, bias)
    want = layer_norm(total + bias, (40,), weight.float(), shift, EPS)
    faults += far("layernorm", got, want, last) + far("sum with bias", added, total + bias, last)

    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    got, added = ops.allreduce_rmsnorm(turned, residual, weight, EPS, name, bias)
    faults += far("norm of strides", got, rms_norm(total + bias, (40,), weight.float(), EPS), last)

    want = rms_norm(total, (40,), weight.float(), EPS)
    small, added, scales = ops.allreduce_rmsnorm_quantized(x, residual, weight, EPS, torch.int8, name)
    faults += far("scales", scales, want.abs().amax(-1, keepdim=True) / 127, 10 * last)
    faults += far("int8", small * scales, want, 0.04)
    scale = torch.tensor([0.05])
    small, added, scales = ops.allreduce_rmsnorm_quantized(
        x, residual, weight, EPS, torch.float8_e4m3fn, name, scale
    )
    faults += far("fp8", small.float() * 0.05, want, 0.08) + far("its scale", scales, scale)
    dist.destroy_process_group()
    return faults


class Block(torch.nn.Module):
    """Two layers as a decoder has them, whose sums travel."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.first, self.second = (
            torch.nn.Parameter(data(q + 10 * rank, 40, 40 // size) / 6) for q in (1, 2)
        )
        self.norms = torch.nn.ParameterList([data(60 + q, 40) for q in range(2)])
        self.name, self.rank, self.width = dist.group.WORLD.group_name, rank, 40 // size

    def forward(self, x: torch.Tensor, add: Callable[..., Any]) -> torch.Tensor:
        """The last norm, and the residual."""
        h, residual = x, x
        for weight, norm in zip((self.first, self.second), self.norms, strict=True):
            part = h[:, self.rank * self.width : (self.rank + 1) * self.width]
            h, residual = add(part @ weight.T, residual, norm, EPS, self.name)
        return h * 2 + residual


def unfused(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, name: str) -> tuple:
    """The same by a functional collective and torch's own norm."""
    from torch.distributed import _functional_collectives as functions

    residual = residual + functions.all_reduce(x, "sum", name)
    return rms_norm(residual, (40,), weight, eps), residual


def compiled(path: str) -> list[str]:
    """A model that is compiled into one graph, with the operator and without."""
    rank, faults = joined(path), []
    torch.manual_seed(3)
    with torch.no_grad():
        model, x = Block(rank, dist.get_world_size()), data(70, 6, 40)
        want = model(x, unfused)
        faults += far("eager", model(x, torch.ops.flagcx.allreduce_rmsnorm), want)
        for backend in ("aot_eager", "eager"):
            run = torch.compile(model, backend=backend, fullgraph=True)
            for _ in range(2):
                faults += far(backend, run(x, torch.ops.flagcx.allreduce_rmsnorm), want)
            faults += far(f"{backend}, functional", run(x, unfused), want)
    torch.library.opcheck(
        torch.ops.flagcx.allreduce_rmsnorm.default, (x, x, model.norms[0].detach(), EPS, model.name),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    dist.destroy_process_group()
    return faults
