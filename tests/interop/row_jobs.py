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
        run = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(2):
            faults += far("compiled", run(x, torch.ops.flagcx.allreduce_rmsnorm), want)
        faults += far("compiled, functional", run(x, unfused), want)
    torch.library.opcheck(
        torch.ops.flagcx.allreduce_rmsnorm.default, (x, x, model.norms[0].detach(), EPS, model.name),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    dist.destroy_process_group()
    return faults


class LlamaRMSNorm(torch.nn.Module):
    """A norm as transformers has it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(data(seed, 40)), EPS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (40,), self.weight, self.variance_epsilon)


class Part(torch.nn.Module):
    """Attention or feed-forward part, in name alone: one product in, one that is split over the ranks out."""

    def __init__(self, seed: int, out: str, rank: int, size: int, bias: bool) -> None:
        super().__init__()
        self.first, self.out, self.rank, self.size = torch.nn.Linear(40, 40, False), out, rank, size
        last = torch.nn.Linear(40, 40, bias)
        whole = data(seed, 40, 40) / 6
        self.first.weight.data = data(seed + 1, 40, 40).chunk(size)[rank] / 6
        last.weight.data = whole.chunk(size, 1)[rank].contiguous()
        if bias:
            last.bias.data = data(seed + 2, 40)
        last.forward = lambda x: torch.nn.functional.linear(x, last.weight)
        last.register_forward_hook(self.added)
        setattr(self, out, last)

    def added(self, linear: torch.nn.Module, _: Any, part: torch.Tensor) -> torch.Tensor:
        """All-reduces a part of a sum, in a hook."""
        dist.all_reduce(part)
        return part if linear.bias is None else part + linear.bias

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> Any:
        made = getattr(self, self.out)(torch.relu(self.first(hidden_states)) * scale)
        return (made, None) if self.out == "o_proj" else made


class LlamaDecoderLayer(torch.nn.Module):
    """A layer as transformers has it."""

    def __init__(self, seed: int, rank: int, size: int) -> None:
        super().__init__()
        self.self_attn = Part(seed, "o_proj", rank, size, True)
        self.mlp = Part(seed + 5, "down_proj", rank, size, False)
        self.input_layernorm, self.post_attention_layernorm = LlamaRMSNorm(seed + 8), LlamaRMSNorm(seed + 9)

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        h, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), scale=scale)
        hidden_states = hidden_states + h
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Decoder(torch.nn.Module):
    """Some layers and a norm."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(LlamaDecoderLayer(100 + 20 * i, rank, size) for i in range(3))
        self.norm = LlamaRMSNorm(99)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=scale)
        return self.norm(x)


def fused_layers(path: str) -> list[str]:
    """A model's layers before and after they are fused, eager and compiled; and what cannot be fused."""
    from flagcx.interop.torch import fuse_rmsnorm, unfuse_rmsnorm

    rank, faults = joined(path), []
    model, x = torch.nn.Sequential(Decoder(rank, dist.get_world_size())), data(80, 5, 40)
    names = [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        want = [model[0](x + i, scale=0.5) for i in range(2)]
        assert fuse_rmsnorm(model) is model
        assert [name for name, _ in model.named_parameters()] == names
        for i in range(2):
            faults += far("fused", model[0](x + i, scale=0.5), want[i])
        compiled = torch.compile(model[0], backend="eager", fullgraph=True)
        for i in range(2):
            faults += far("compiled", compiled(x + i, scale=0.5), want[i])
        assert unfuse_rmsnorm(model) is model
        assert [name for name, _ in model.named_parameters()] == names
        for i in range(2):
            faults += far("undone", model[0](x + i, scale=0.5), want[i])
        fuse_rmsnorm(unfuse_rmsnorm(model))
        faults += far("fused again", model[0](x, scale=0.5), want[0])
    refused = [
        (lambda: fuse_rmsnorm(model), "is fused already"),
        (lambda: model(x.requires_grad_()), "is for inference"),
        (
            lambda: fuse_rmsnorm(torch.nn.Sequential(torch.nn.TransformerEncoderLayer(40, 4))),
            "has TransformerEnc",
        ),
        (lambda: fuse_rmsnorm(Decoder(0, 1)), "has all 40 columns"),
    ]
    for call, words in refused:
        try:
            call()
            faults.append(f"no error that says {words!r}")
        except fc.ArgumentError as error:
            faults += [] if words in str(error) else [str(error)]
    dist.destroy_process_group()
    return faults
