"""A stored key/value prefix in front of every text, on which massive channels then sit (PrefixQuant).

Source: Chen et al. 2024, "PrefixQuant". A few channels of a few tokens, mostly of the first one, are thousands of times
as large as others, and one static scale cannot hold both. Tokens that every text sees but no Linear computes take that
place: their keys and values are tensors of the checkpoint, [heads of K and V, P, D] per attention module.

The prefix stands at positions -P .. -1, so that texts keep theirs and caches, masks and limits know nothing of it. That
is exact for rotary positions, which tell distances alone. Deviation: PrefixQuant gives the prefix the positions from 0
on and moves the text. It is an attention function of transformers, so whatever runs the model applies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from quantkit.checkpoint.config import PREFIX_FIELDS
from quantkit.errors import ModelError

_NAME = "quantkit_prefix"
_CAPTURED = "quantkit_prefix_captured"
_KEY, _VALUE = PREFIX_FIELDS


def install(model: Any) -> None:
    """Make the model's attention see the prefix that its modules hold. Raises ModelError where it takes no function."""
    if not getattr(model, "_can_set_attn_implementation", lambda: False)():
        raise ModelError(f"{type(model).__name__}: computes its attention in code of its own, which takes no prefix")
    model.set_attn_implementation(_NAME)


def has_prefix(model: nn.Module) -> bool:
    """Whether the model's attention is the one of this module."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == _NAME


@contextmanager
def installed(model: Any) -> Iterator[None]:
    """While entered, attention modules that hold a prefix see it."""
    before = model.config._attn_implementation
    install(model)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def capturing(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """While entered, filled with the keys and values [heads, M, D] that each attention module computes, by name."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in modules.items():
        module.__dict__[_CAPTURED] = (found, name)
    try:
        yield found
    finally:
        for module in modules.values():
            del module.__dict__[_CAPTURED]


def prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [B, H, M, D]; key, value [B, H or fewer, T, D] -> [B, M, H, D], as transformers' sdpa function.

    attention_mask: [B or 1, 1, M, T], bool or added to the scores. Every query sees the whole prefix.
    """
    captured = module.__dict__.get(_CAPTURED)
    if captured is not None:
        captured[0][captured[1]] = key[0].detach(), value[0].detach()
    stored = getattr(module, _KEY, None)
    if captured is not None or stored is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, is_causal=is_causal, **options)
    batch, _, queries, _ = query.shape
    length, said = stored.shape[1], getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None:
        attention_mask = _padded(attention_mask, length)
    elif queries > 1 and said:
        # keys behind the queries are of a cache that is not yet full
        key, value = key[:, :, :queries], value[:, :, :queries]
        causal = torch.ones(queries, queries, dtype=torch.bool, device=query.device).tril()
        attention_mask = _padded(causal[None, None], length)
    ahead = [getattr(module, name).to(key)[None].expand(batch, -1, -1, -1) for name in PREFIX_FIELDS]
    key, value = torch.cat([ahead[0], key], dim=2), torch.cat([ahead[1], value], dim=2)
    return sdpa_attention_forward(module, query, key, value, attention_mask, is_causal=False, **options)


def _padded(mask: Tensor, length: int) -> Tensor:
    """The mask with ``length`` keys in front that all see."""
    return torch.nn.functional.pad(mask, (length, 0), value=True if mask.dtype == torch.bool else 0.0)


AttentionInterface.register(_NAME, prefix_attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)
