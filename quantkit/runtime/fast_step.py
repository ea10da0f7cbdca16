"""Faster parts in the place of a transformers model's own while a single token runs: kernels and joined products.

Both floating-point and quantized models decode through it, so their times compare. Models keep their own code, but for
the blocks of fast_block.py: norms and sibling Linears are replaced per module, the attention through transformers'
AttentionInterface, the cache update per layer, the rotation of query and key in the Python module that calls it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import BenchError
from quantkit.ops.decode.launch import Token
from quantkit.ops.decode.layout import can_attend, can_rotate
from quantkit.ops.decode.op import attention
from quantkit.runtime.decoder_block import FastBlock, QueryScale
from quantkit.runtime.merged_linears import Siblings
from quantkit.runtime.norms import fast_norm

_NAME = "quantkit_decode"


@dataclass(frozen=True, eq=False)
class Turn:
    """A call of a model's rotation that is left to the attention: rotate(q, k, cosine, sine)."""

    rotate: Callable[..., tuple[Tensor, Tensor]]
    cosine: Tensor
    sine: Tensor


_waiting: dict[int, Token] = {}
"""id of a layer's key cache -> the token, until its attention writes key and value there."""
_unturned: dict[int, Turn] = {}
"""id of a query -> what turns it and its key, until their attention does."""


@dataclass(frozen=True)
class Parts:
    """What of a model runs in another way for single tokens: from join_siblings and fast_blocks."""

    siblings: tuple[Siblings, ...] = ()
    blocks: tuple[FastBlock, ...] = ()


@contextmanager
def fast_step(model: Any, cache: Any, position: Tensor, parts: Parts) -> Iterator[None]:
    """Inside, ``model`` on a GPU runs single tokens with the kernels of ops/decode/op.py where those take the shapes.

    cache: a transformers StaticCache that has seen the prompt. position: [1], where the next token's keys go.
    parts: the model's. Models that attend in their own way (BLOOM) keep it.
    """
    if position.device.type != "cuda":
        yield
        return
    with replaced_parts(model, cache, position, parts):
        yield


@contextmanager
def replaced_parts(model: Any, cache: Any, position: Tensor, parts: Parts) -> Iterator[None]:
    """As fast_step, on any device; what has no kernel there computes the same by torch."""
    from transformers.cache_utils import StaticLayer

    attend = getattr(model, "_supports_attention_backend", False)
    layers = [layer for layer in cache.layers if type(layer) is StaticLayer]
    norms = [(module, norm) for module in model.modules() if (norm := fast_norm(module)) is not None]
    forwards: list[tuple[nn.Module, Callable[..., Any]]] = [*norms]
    forwards += [pair for group in parts.siblings for pair in group.forwards()]
    forwards += [pair for block in parts.blocks for pair in block.forwards()]
    with ExitStack() as stack:
        for module, forward in forwards:
            _replace(stack, module, "forward", forward)
        if attend:
            _replace_attention(stack, model)
            for layer in layers:
                _replace(stack, layer, "update", _updater(layer, position))
            for block in parts.blocks:
                if block.row.scales_query:
                    _leave_query(stack, block.attention)
            if len(layers) == len(cache.layers):  # other layers keep a key as they get it
                _leave_rotations(stack, parts.blocks)
        for group in parts.siblings:
            stack.callback(group.forget)
        stack.callback(_waiting.clear)
        stack.callback(_unturned.clear)
        yield
        if _waiting or _unturned:
            raise BenchError(f"{type(model).__name__}: its attention does not take its keys from the cache")
        if attend and layers:  # masks and positions are made from these counts; other layers count for themselves
            torch._foreach_add_([layer.cumulative_length for layer in layers], 1)


def _replace(stack: ExitStack, owner: Any, name: str, method: Callable[..., Any]) -> None:
    if name in vars(owner):  # blocks that take batches in parts
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, method)


def _replace_attention(stack: ExitStack, model: Any) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attend)
    holders = [module.config for module in model.modules() if hasattr(module, "config")]
    for config in {id(config): config for config in holders if hasattr(config, "_attn_implementation")}.values():
        stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
        config._attn_implementation = _NAME


def _leave_query(stack: ExitStack, attention: Any) -> None:
    stack.callback(setattr, attention, "scaling", attention.scaling)
    attention.scaling = QueryScale(attention.scaling)


def _leave_rotations(stack: ExitStack, blocks: tuple[FastBlock, ...]) -> None:
    names = {(type(block.block).__module__, block.row.rotation) for block in blocks if block.row.rotation is not None}
    for module, name in sorted(names):
        _replace(stack, sys.modules[module], name, _left_rotation(getattr(sys.modules[module], name)))


def _left_rotation(rotate: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    def leave(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        _unturned[id(query)] = Turn(rotate, cosine, sine)
        return query, key

    return leave


def _updater(layer: Any, position: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    def update(key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        _waiting[id(layer.keys)] = Token(key, value, position)
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

    token, left = _waiting.pop(id(key), None), getattr(module, "scaling", None)
    turn = None if token is None else _unturned.pop(id(query), None)
    query_scale = left.value if isinstance(left, QueryScale) else 1.0
    masked = attention_mask is not None and attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1
    by_kernel = masked and can_attend(query, key)
    if token is not None and turn is not None:
        query, token = _turned(query, token, turn, by_kernel)
    if token is None or not by_kernel:
        if token is not None:
            key.index_copy_(2, token.position, token.key)
            value.index_copy_(2, token.position, token.value)
        query = query * query_scale if isinstance(left, QueryScale) else query
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return output
    assert attention_mask is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention(query, token, (key, value), attention_mask, scale, query_scale), None


def _turned(query: Tensor, token: Token, turn: Turn, by_kernel: bool) -> tuple[Tensor, Token]:
    """Query and token with their rotation behind them, or with all that the attention kernel needs for it."""
    by = turn.cosine, turn.sine
    if by_kernel and can_rotate(query, by):
        return query, replace(token, rotary=by)
    query, key = turn.rotate(query, token.key, *by)
    return query, replace(token, key=key)
