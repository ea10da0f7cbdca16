"""Attention of the blocks of decoder_block.py: of single tokens over their cache, and of prompts, which fill it.

A single token's queries, rotary embedding, cache update and attention are one kernel. A prompt's queries and keys are
turned and its cache filled by one; attention itself is torch's, over the prompt's own tokens and not the whole cache,
and causal without a mask where no sequence is padded, or that of runtime/int8_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from quantkit.ops.bcq.arranged import ProductInput
from quantkit.ops.decode.launch import Token
from quantkit.ops.decode.layout import can_attend, can_place, can_rotate
from quantkit.ops.decode.op import attention, place_prompt
from quantkit.runtime.int8_attention import has_scales, int8_attention
from quantkit.runtime.merged_linears import MergedLinears
from quantkit.runtime.norms import FastNorm
from quantkit.runtime.session_cache import SessionCache

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine of the tokens' angles, [1 or B, M, D] each."""
Heads = tuple[Tensor, Tensor, Tensor]
"""q [B, H, M, D], k and v [B, Hkv, M, D]."""


@dataclass(frozen=True, eq=False)
class FusedAttention:
    """Attention of one token of each sequence, or of whole prompts, up to the Linear behind it.

    Single tokens attend in floating point always. module: transformers' attention. kv_features: of k and of v, Hkv D.
    scale: of q k^T. query_scale: of q before that, or None.
    """

    module: Any
    products: MergedLinears
    head_norms: tuple[FastNorm, ...]
    kv_features: int
    scale: float
    query_scale: float | None

    def __call__(self, x: ProductInput, cache: SessionCache, mask: Tensor, rotary: Rotary | None) -> Tensor:
        """y [B, M, H D] for x [B, M, K], as the products take it; keys and values go into the cache.

        One token goes to its next position; several are a prompt, and the cache is empty. mask: [B or 1, 1, M,
        capacity] bool. The cache's count stays: one addition behind all blocks serves them all.
        """
        heads = self._heads(x)
        layer = cache.layer(self.module.layer_idx, heads[1])
        if x.shape[1] > 1:
            y = self._prompt(heads, layer, mask if cache.padded else None, rotary)
        else:
            y = self._token(heads, layer, mask, rotary)
        return y.reshape(*x.shape[:2], -1)

    def _token(self, heads: Heads, layer: Any, mask: Tensor, rotary: Rotary | None) -> Tensor:
        (q, k, v), keys, values = heads, layer.keys, layer.values
        position, query_scale, by_kernel = layer.cumulative_length.view(1), self.query_scale, can_attend(q, keys)
        if not by_kernel or not (rotary is None or can_rotate(q, rotary)):
            q, k = self._turned(q, k, rotary)
            query_scale = rotary = None
        if by_kernel:
            token = Token(k, v, position, rotary)
            return attention(q, token, (keys, values), mask, self.scale, 1.0 if query_scale is None else query_scale)
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        y: Tensor = sdpa_attention_forward(self.module, q, keys, values, mask, scaling=self.scale)[0]
        return y

    def _prompt(self, heads: Heads, layer: Any, mask: Tensor | None, rotary: Rotary | None) -> Tensor:
        q, k, v = heads
        count, cache = q.shape[2], (layer.keys, layer.values)
        if can_place(heads, layer.keys, rotary):
            q = place_prompt(heads, rotary, cache, self.query_scale)
        else:
            q, k = self._turned(q, k, rotary)
            for stored, new in zip(cache, (k, v), strict=True):
                stored[:, :, :count] = new
        k, v = (stored[:, :, :count] for stored in cache)
        function = int8_attention if has_scales(self.module) else sdpa_attention_forward
        seen = None if mask is None else mask[..., :count]
        y: Tensor = function(self.module, q, k, v, seen, scaling=self.scale, is_causal=mask is None)[0]
        return y

    def _turned(self, q: Tensor, k: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """q, scaled, and k, both rotated, by torch."""
        q = q if self.query_scale is None else q * self.query_scale
        return (q, k) if rotary is None else (_rotated(q, rotary), _rotated(k, rotary))

    def _heads(self, x: ProductInput) -> Heads:
        """q, k and v of x, normed."""
        products, width, head_dim = self.products(x), self.kv_features, self.module.head_dim
        if len(products) == 1:
            products = products[0].split((products[0].shape[-1] - 2 * width, width, width), dim=-1)
        q, k, v = (y.view(*x.shape[:2], -1, head_dim) for y in products)
        if self.head_norms:
            q, k = self.head_norms[0](q), self.head_norms[1](k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """x [B, H, M, D] rotated, value i with value i + D / 2, in the steps in which transformers does it."""
    cosine, sine = (part.unsqueeze(1) for part in rotary)
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
