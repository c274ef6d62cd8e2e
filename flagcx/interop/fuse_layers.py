"""Has the layers of a tensor-parallel model do all-reduce, residual and norm in one call."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

from flagcx.errors import ArgumentError
from flagcx.interop.row_operators import name_of

LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""The classes of layers that compute what ``_forward`` does."""


def fuse_rmsnorm(model: Any, group: Any = None) -> Any:
    """Fuses the all-reduces of a tensor-parallel model with the residuals and RMS norms that follow them.

    For inference with models of ``transformers`` whose layers are like Llama's, split by ``tp_plan="auto"``
    or otherwise: the output projections of attention and of the feed-forward part hold this rank's columns.
    Their own all-reduce is left out; each layer calls ``torch.ops.flagcx.allreduce_rmsnorm`` in place of it,
    of the residual and of the norm of the next part. The model's parameters keep their names.
    ``torch.compile`` takes the model as before; ``unfuse_rmsnorm`` undoes it.

    Args:
        model: The model, changed in place.
        group: The process group over which it is split, or its name; that of its weights if they are
            DTensors, else the default group. ``fc.enhance_process_group`` makes it flagcx's.

    Returns:
        The model.

    Raises:
        ArgumentError: It has no such layers, they are not split over the ranks of the group, or they are
            fused already.

    Example:
        >>> fc.enhance_process_group()                                       # doctest: +SKIP
        >>> model = AutoModelForCausalLM.from_pretrained(p, tp_plan="auto")  # doctest: +SKIP
        >>> flagcx.interop.torch.fuse_rmsnorm(model)                         # doctest: +SKIP
    """
    import torch.distributed.tensor  # which torch itself does not import

    found = list(_decoders(model))
    if not found:
        kinds = sorted({type(m).__name__ for m in model.modules() if type(m).__name__.endswith("Layer")})
        raise ArgumentError(
            f"fuse_rmsnorm knows layers of {', '.join(LAYERS)} with a norm after the last; this model has "
            f"{', '.join(kinds) or 'no layers'}; call flagcx.interop.torch.allreduce_rmsnorm in its code"
        )
    if any(hasattr(decoder, _BEFORE) for decoder in found):
        raise ArgumentError("this model is fused already; undo that first: unfuse_rmsnorm(model)")
    for decoder in found:
        name = _group_name(decoder, group)
        size = torch.distributed.distributed_c10d._resolve_process_group(name).size()
        for layer in decoder.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                _check_split(linear, size)
        setattr(decoder, _BEFORE, [_State(module) for module in _changed(decoder)])
        norms = [*(layer.input_layernorm for layer in decoder.layers[1:]), decoder.norm]
        for layer, following in zip(decoder.layers, norms, strict=True):
            _fuse(layer, following, name)
    return model


def unfuse_rmsnorm(model: Any) -> Any:
    """Undoes ``fuse_rmsnorm``: the model's layers do what they did before. A model that is not fused stays.

    Args:
        model: The model, changed in place. One that ``torch.compile`` has made of it is to be made anew.

    Returns:
        The model.

    Example:
        >>> flagcx.interop.torch.unfuse_rmsnorm(model)  # doctest: +SKIP
    """
    for decoder in _decoders(model):
        for state in vars(decoder).pop(_BEFORE, ()):
            state.restore()
    return model


_BEFORE = "before_fuse_rmsnorm"
_ABSENT = object()


class _State:
    """The forward and the hooks of a module, to be given back to it."""

    def __init__(self, module: Any) -> None:
        self._module, self._forward = module, vars(module).get("forward", _ABSENT)
        self._hooks = [dict(hooks) for hooks in (module._forward_hooks, module._forward_pre_hooks)]

    def restore(self) -> None:
        """Gives them back."""
        own = vars(self._module)
        own.pop("forward", None)
        own.pop("ready", None)
        if self._forward is not _ABSENT:
            own["forward"] = self._forward
        for kept, hooks in zip(
            self._hooks, (self._module._forward_hooks, self._module._forward_pre_hooks), strict=True
        ):
            hooks.clear()
            hooks.update(kept)


def _changed(decoder: Any) -> Iterator[Any]:
    """The modules whose forward or hooks are changed."""
    yield decoder.norm
    for layer in decoder.layers:
        yield from (layer, layer.input_layernorm, layer.self_attn.o_proj, layer.mlp.down_proj)


def _decoders(model: Any) -> Iterator[Any]:
    """The parts of a model that have such layers, and a norm after them."""
    for module in model.modules():
        layers: Any = getattr(module, "layers", None)
        has_both = isinstance(layers, torch.nn.ModuleList) and len(layers) and hasattr(module, "norm")
        if has_both and all(type(layer).__name__ in LAYERS for layer in layers):
            yield module


def _group_name(decoder: Any, group: Any) -> str:
    mesh = getattr(decoder.layers[0].self_attn.o_proj.weight, "device_mesh", None)
    if group is None and mesh is not None:
        group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    return name_of(group)


def _check_split(linear: Any, size: int) -> None:
    columns, whole = _local(linear.weight).shape[1], linear.in_features
    if size > 1 and columns >= whole:
        raise ArgumentError(
            f"a projection has all {whole} columns on rank {dist.get_rank()} of {size}; expected a model "
            f"that is split over the ranks, as from_pretrained(..., tp_plan='auto') makes it"
        )


def _local(tensor: Any) -> Any:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def _fuse(layer: Any, following: Any, name: str) -> None:
    """Gives a layer its new forward, and its linear and following norm theirs."""
    for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
        linear._forward_hooks.clear()  # of older versions of transformers, which add up in a hook
        linear._forward_pre_hooks.clear()
        linear.forward = MethodType(_part, linear)
    following.ready = None
    following.forward = _given_first(following)
    layer.forward = _forward(layer, following, name)


def _part(linear: Any, x: Any) -> Any:
    """This rank's part of a product, before it is added to those of others; without the bias."""
    return torch.nn.functional.linear(_local(x), _local(linear.weight))


def _given_first(norm: Any) -> Any:
    """A forward that returns what the layer before has normalised already."""
    original = norm.forward

    def forward(x: Any) -> Any:
        ready = norm.ready
        if ready is None:
            return original(x)
        norm.ready = None
        return ready

    return forward


def _forward(layer: Any, following: Any, name: str) -> Any:
    """A layer's forward: the residual goes on to the next layer, and its norm with it."""
    between, attention, feed_forward = layer.post_attention_layernorm, layer.self_attn, layer.mlp

    def add(part: Any, residual: Any, norm: Any, linear: Any) -> tuple[Any, Any]:
        bias = None if linear.bias is None else _local(linear.bias)
        weight, eps = _local(norm.weight), norm.variance_epsilon
        return torch.ops.flagcx.allreduce_rmsnorm(part, residual, weight, eps, name, bias)

    def forward(hidden_states: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise ArgumentError("a model that fuse_rmsnorm has changed is for inference; use torch.no_grad()")
        h, residual = layer.input_layernorm(hidden_states), hidden_states
        h, *_ = attention(hidden_states=h, **options)
        h, residual = add(h, residual, between, attention.o_proj)
        h, residual = add(feed_forward(h), residual, following, feed_forward.down_proj)
        following.ready = h
        return residual

    return forward
