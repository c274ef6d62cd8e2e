"""All-reduces of rows with an epilogue as operators of torch, which torch.compile and CUDA graphs take.

They are functional: results are new tensors, and no argument is written. The group is named, since the
operators of a compiled graph take no objects; a group that is not flagcx's, or whose ranks flagcx cannot
join, makes an all-reduce of its own and torch computes what follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from flagcx.errors import ArgumentError
from flagcx.interop.no_dynamo import no_dynamo
from flagcx.interop.process_group import FlagcxProcessGroup
from flagcx.interop.tensors import NUMPY_DTYPES, is_plain, plain

_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}

_SCHEMAS = {
    "allreduce_rmsnorm": "Tensor x, Tensor residual, Tensor weight, float eps, str group_name, "
    "Tensor? bias=None) -> (Tensor, Tensor",
    "allreduce_layernorm": "Tensor x, Tensor residual, Tensor weight, Tensor? shift, float eps, "
    "str group_name, Tensor? bias=None) -> (Tensor, Tensor",
    "allreduce_rmsnorm_quantized": "Tensor x, Tensor residual, Tensor weight, float eps, ScalarType dtype, "
    "str group_name, Tensor? scale=None, Tensor? bias=None) -> (Tensor, Tensor, Tensor",
}


@lru_cache(maxsize=1)
def register_operators() -> Any:
    """Registers ``torch.ops.flagcx``; returns the library, which lives as long as its operators."""
    library = torch.library.Library("flagcx", "DEF")
    for name, schema in _SCHEMAS.items():
        library.define(f"{name}({schema})")
        library.impl(name, _OPERATORS[name], "CompositeExplicitAutograd")
        torch.library.register_fake(f"flagcx::{name}", _FAKES[name], lib=library)
    return library


def allreduce_rmsnorm(
    x: Any, residual: Any, weight: Any, eps: float = 1e-6, group: Any = None, bias: Any = None
) -> tuple[Any, Any]:
    """Adds up the rows of all ranks, adds the residual, and normalises each row by its root mean square.

    For inference: no gradient flows through it. ``torch.ops.flagcx.allreduce_rmsnorm`` is the same for
    compiled models, with the group's name in place of the group.

    Args:
        x: Tensor of shape (..., columns), in float16, bfloat16 or float32: this rank's part of the sum.
        residual: Tensor of the shape of ``x``, the same on every rank.
        weight: Tensor of one value for each column.
        eps: What is added to the mean of the squares.
        group: The process group, or its name; the default group if None.
        bias: Tensor of one value for each column, that is added to the sum once.

    Returns:
        The normalised rows in the dtype of ``x``, and the sum with the residual in that of ``residual``.

    Example:
        >>> h, residual = allreduce_rmsnorm(y, residual, norm.weight, norm.eps)  # doctest: +SKIP
    """
    return torch.ops.flagcx.allreduce_rmsnorm(x, residual, weight, eps, name_of(group), bias)


def name_of(group: Any) -> str:
    """The name of a process group, by which operators find it.

    Raises:
        ArgumentError: torch.distributed has no default group.
    """
    if isinstance(group, str):
        return group
    if group is None and not dist.is_initialized():
        raise ArgumentError(
            "torch.distributed has no default process group yet; call init_process_group first"
        )
    return str((dist.group.WORLD if group is None else group).group_name)


def _rmsnorm(x: Any, residual: Any, weight: Any, eps: float, group_name: str, bias: Any = None) -> tuple:
    out, total = _fake_rmsnorm(x, residual)

    def ours(comm: Any, at: Callable[[Any], Any]) -> None:
        comm.allreduce_rmsnorm(
            at(x), at(residual), at(weight), eps, bias=at(bias), out=at(out), residual_out=at(total)
        )

    if not _run(group_name, [x, residual, weight, bias, out, total], ours):
        _normalised(x, residual, weight, eps, group_name, bias, out, total)
    return out, total


def _layernorm(
    x: Any, residual: Any, weight: Any, shift: Any, eps: float, group_name: str, bias: Any = None
) -> tuple:
    out, total = _fake_rmsnorm(x, residual)

    def ours(comm: Any, at: Callable[[Any], Any]) -> None:
        comm.allreduce_layernorm(
            at(x),
            at(residual),
            at(weight),
            at(shift),
            eps,
            bias=at(bias),
            out=at(out),
            residual_out=at(total),
        )

    if not _run(group_name, [x, residual, weight, shift, bias, out, total], ours):
        added = _added(x, residual, group_name, bias)
        total.copy_(added)
        wide = [None if part is None else part.float() for part in (weight, shift)]
        out.copy_(torch.nn.functional.layer_norm(added, x.shape[-1:], *wide, eps))
    return out, total


def _quantized(
    x: Any,
    residual: Any,
    weight: Any,
    eps: float,
    dtype: Any,
    group_name: str,
    scale: Any = None,
    bias: Any = None,
) -> tuple:
    out, total, scales = _fake_quantized(x, residual, weight, eps, dtype, group_name, scale)
    if dtype not in _LIMITS:
        raise ArgumentError(f"dtype={dtype} is none to quantise to; expected {', '.join(map(str, _LIMITS))}")
    if scale is not None:
        scales.copy_(scale.reshape(scales.shape))

    def ours(comm: Any, at: Callable[[Any], Any]) -> None:
        given = {"scales": at(scales)} if scale is None else {"scale": at(scales)}
        comm.allreduce_rmsnorm(
            at(x), at(residual), at(weight), eps, bias=at(bias), out=at(out), residual_out=at(total),
            quantize=NUMPY_DTYPES[dtype], **given,
        )  # fmt: skip

    if not _run(group_name, [x, residual, weight, bias, out, total, scales], ours):
        single = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        _normalised(x, residual, weight, eps, group_name, bias, single, total)
        if scale is None:
            least = torch.finfo(torch.float32).tiny
            scales.copy_((single.abs().amax(-1, keepdim=True) / _LIMITS[dtype]).clamp_min(least))
        small = (single / scales).clamp(-_LIMITS[dtype], _LIMITS[dtype])
        out.copy_(small.round() if dtype is torch.int8 else small)
    return out, total, scales


def _normalised(
    x: Any, residual: Any, weight: Any, eps: float, group_name: str, bias: Any, out: Any, total: Any
) -> None:
    added = _added(x, residual, group_name, bias)
    total.copy_(added)
    out.copy_(torch.nn.functional.rms_norm(added, x.shape[-1:], weight.float(), eps))


def _added(x: Any, residual: Any, group_name: str, bias: Any) -> Any:
    """The sum of all ranks, with bias and residual, in float32, by the group's own all-reduce."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=c10d._resolve_process_group(group_name))
    total = total.float() + residual
    return total if bias is None else total + bias


@no_dynamo
def _run(group_name: str, tensors: list[Any], call: Callable[[Any, Callable[[Any], Any]], None]) -> bool:
    """Makes a call on flagcx's communicator of a group; returns whether it has one for these tensors.

    Args:
        group_name: The group.
        tensors: The tensors of the call, or None.
        call: (communicator, what makes an array of a tensor).
    """
    group = c10d._resolve_process_group(group_name)
    used = [tensor for tensor in tensors if tensor is not None]
    queue = group.queue_of(used) if isinstance(group, FlagcxProcessGroup) else None
    if queue is None:
        return False
    views, copies = queue.views, []

    def array(tensor: Any) -> Any:
        if tensor is None:
            return None
        if not is_plain(tensor):
            tensor = plain(tensor)
            copies.append(tensor)  # two of them must not lie in the same memory
        return views.shaped(tensor)

    queue.run(lambda: call(queue.comm, array), used, True)
    return True


def _fake_rmsnorm(x: Any, residual: Any, *_: Any) -> tuple:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(residual, memory_format=torch.contiguous_format),
    )


def _fake_quantized(
    x: Any,
    residual: Any,
    weight: Any,
    eps: float,
    dtype: Any,
    group_name: str,
    scale: Any = None,
    bias: Any = None,
) -> tuple:
    rows = (*x.shape[:-1], 1) if scale is None else (1,)
    return (
        torch.empty(x.shape, dtype=dtype, device=x.device),
        torch.empty_like(residual, memory_format=torch.contiguous_format),
        torch.empty(rows, dtype=torch.float32, device=x.device),
    )


_OPERATORS = {
    "allreduce_rmsnorm": _rmsnorm,
    "allreduce_layernorm": _layernorm,
    "allreduce_rmsnorm_quantized": _quantized,
}
_FAKES = {
    "allreduce_rmsnorm": _fake_rmsnorm,
    "allreduce_layernorm": _fake_rmsnorm,
    "allreduce_rmsnorm_quantized": _fake_quantized,
}
