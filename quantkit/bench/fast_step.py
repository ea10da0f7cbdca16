"""Single-token kernels in the place of a transformers model's norms, cache update and attention, while a step runs.

Both floating-point and quantized models decode through it, so their times compare. Models keep their own code: norms
are replaced per module, the attention through transformers' AttentionInterface, the cache update per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.ops.decode import append, attention, can_append, can_attend, can_norm, norm

_NAME = "quantkit_decode"
_RMS_NORM = "RMSNorm"  # how transformers' classes of that kind end


@contextmanager
def fast_step(model: Any, cache: Any, position: Tensor, *, attend: bool) -> Iterator[None]:
    """Inside, ``model`` on a GPU runs single tokens with the kernels of ops/decode.py where those take the shapes.

    cache: a transformers StaticCache that has seen the prompt. position: [1], where the next token's keys go.
    attend: also replace the attention; not for models that add a bias to the scores.
    """
    if position.device.type != "cuda":
        yield
        return
    from transformers import AttentionInterface
    from transformers.cache_utils import StaticLayer

    AttentionInterface.register(_NAME, _attend)
    norms = [(module, forward) for module in model.modules() if (forward := _norm_forward(module)) is not None]
    layers = [layer for layer in cache.layers if type(layer) is StaticLayer]
    holders = [module.config for module in model.modules() if hasattr(module, "config")]
    configs = {id(config): config for config in holders if hasattr(config, "_attn_implementation")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for module, forward in norms:
            module.forward = forward
        for layer in layers:
            layer.update = _updater(layer, position)  # type: ignore[method-assign]
        for config in configs.values() if attend else ():
            config._attn_implementation = _NAME
        yield
        torch._foreach_add_([layer.cumulative_length for layer in layers], 1)  # masks and positions are made from it
    finally:
        for module, _ in norms:
            del module.forward
        for layer in layers:
            del layer.update
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _norm_forward(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    original, centered = module.forward, isinstance(module, nn.LayerNorm)
    if not centered and not (type(module).__name__.endswith(_RMS_NORM) and hasattr(module, "variance_epsilon")):
        return None
    bias: Any = getattr(module, "bias", None)
    epsilon: Any = module.eps if centered else module.variance_epsilon

    def forward(x: Tensor) -> Tensor:
        if not can_norm(x) or weight.dtype != x.dtype:
            result: Tensor = original(x)
            return result
        return norm(x, weight, bias, epsilon, centered=centered)

    return forward


def _updater(layer: Any, position: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    def update(key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if can_append(key, layer.keys) and can_append(value, layer.values):
            append(key, value, layer.keys, layer.values, position)
        else:
            layer.keys.index_copy_(2, position, key)
            layer.values.index_copy_(2, position, value)
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

    usable = attention_mask is not None and attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1
    if not usable or not can_attend(query, key):
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return output
    assert attention_mask is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention(query, key, value, attention_mask, scale), None
