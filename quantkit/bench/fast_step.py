"""Faster parts in the place of a transformers model's own while a single token runs: kernels and joined products.

Both floating-point and quantized models decode through it, so their times compare. Models keep their own code: norms
and sibling Linears are replaced per module, the attention through transformers' AttentionInterface, the cache update
per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.bench.siblings import Siblings
from quantkit.errors import BenchError
from quantkit.ops.decode import attention, can_attend, can_norm, norm

_NAME = "quantkit_decode"
_RMS_NORM = "RMSNorm"  # how transformers' classes of that kind end
_waiting: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
"""id of a layer's key cache -> the token's key, value and position, until its attention writes them there."""


@contextmanager
def fast_step(model: Any, cache: Any, position: Tensor, siblings: Sequence[Siblings]) -> Iterator[None]:
    """Inside, ``model`` on a GPU runs single tokens with the kernels of ops/decode.py where those take the shapes.

    cache: a transformers StaticCache that has seen the prompt. position: [1], where the next token's keys go.
    siblings: the model's, from join_siblings. Models that attend in their own way (BLOOM) keep it.
    """
    if position.device.type != "cuda":
        yield
        return
    from transformers.cache_utils import StaticLayer

    attend = getattr(model, "_supports_attention_backend", False)
    layers = [layer for layer in cache.layers if type(layer) is StaticLayer]
    forwards = [(module, forward) for module in model.modules() if (forward := _norm_forward(module)) is not None]
    forwards += [pair for group in siblings for pair in group.forwards()]
    with ExitStack() as stack:
        for module, forward in forwards:
            _replace(stack, module, "forward", forward)
        if attend:
            _replace_attention(stack, model)
            for layer in layers:
                _replace(stack, layer, "update", _updater(layer, position))
        for group in siblings:
            stack.callback(group.forget)
        stack.callback(_waiting.clear)
        yield
        if _waiting:
            raise BenchError(f"{type(model).__name__}: its attention does not take its keys from the cache")
        if attend:  # masks and positions are made from these counts
            torch._foreach_add_([layer.cumulative_length for layer in layers], 1)


def _replace(stack: ExitStack, owner: Any, name: str, method: Callable[..., Any]) -> None:
    setattr(owner, name, method)
    stack.callback(delattr, owner, name)


def _replace_attention(stack: ExitStack, model: Any) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
    holders = [module.config for module in model.modules() if hasattr(module, "config")]
    for config in {id(config): config for config in holders if hasattr(config, "_attn_implementation")}.values():
        stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
        config._attn_implementation = _NAME


def _norm_forward(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    original, centered = module.forward, isinstance(module, nn.LayerNorm)
    if not centered and not (type(module).__name__.endswith(_RMS_NORM) and hasattr(module, "variance_epsilon")):
        return None
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    epsilon: Any = module.eps if centered else module.variance_epsilon

    def forward(x: Tensor) -> Tensor:
        if not can_norm(x) or weight.dtype != x.dtype:
            result: Tensor = original(x)
            return result
        return norm(x, weight, bias, epsilon, centered=centered)

    return forward


def _updater(layer: Any, position: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    def update(key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        _waiting[id(layer.keys)] = key, value, position
        return layer.keys, layer.values

    return update


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    waiting = _waiting.pop(id(key), None)
    usable = attention_mask is not None and attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1
    if waiting is None or not usable or not can_attend(query, key):
        if waiting is not None:
            key.index_copy_(2, waiting[2], waiting[0])
            value.index_copy_(2, waiting[2], waiting[1])
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return output
    assert attention_mask is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention(query, waiting[:2], (key, value), attention_mask, waiting[2], scale), None
