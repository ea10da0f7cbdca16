"""Decoder blocks of single tokens, with fewer kernels than transformers' own code.

A block that the family table describes in full (ResidualBlock) computes here what its class computes, every sum and
function rounded where it was before, in one kernel each:

  norm -> q, k, v -> attention with rotary and cache update -> output + residual
  norm -> gate, source -> activation -> target + residual

The additions are left to the products before them where those have a kernel with an epilogue, as is an activation
without a gate; elsewhere the first addition is left to the norm behind it. What has no kernel runs by torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from quantkit.models.families import decoder_blocks, known_family
from quantkit.models.family import Attention, ResidualBlock
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.nn.table import LINEARS
from quantkit.ops.activations import activation_name
from quantkit.ops.decode.launch import Token
from quantkit.ops.decode.layout import can_attend, can_gate, can_rotate
from quantkit.ops.decode.op import attention, gated
from quantkit.ops.epilogue import Epilogue
from quantkit.runtime.merged_linears import MergedLinears, merge_linears
from quantkit.runtime.norms import FastNorm, fast_norm
from quantkit.runtime.prefix import has_prefix
from quantkit.runtime.twin import holds_watched

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine of a token's angles, [1 or B, 1, D] each."""


@dataclass(frozen=True, eq=False)
class TokenAttention:
    """Attention of one token of each sequence up to the Linear behind it, in floating point always.

    module: transformers' attention. scale: of q k^T. query_scale: of q before that, or None.
    """

    module: Any
    products: MergedLinears
    head_norms: tuple[FastNorm, ...]
    scale: float
    query_scale: float | None

    def __call__(self, x: Tensor, cache: Any, mask: Tensor, rotary: Rotary | None) -> Tensor:
        """y [B, 1, H D] for x [B, 1, K]; key and value go into the cache, a StaticCache, at its next position.

        mask: [B or 1, 1, 1, capacity] bool. The cache's count stays: one addition behind all blocks serves them all.
        """
        layer = cache.layers[self.module.layer_idx]
        keys, values, position = layer.keys, layer.values, layer.cumulative_length.view(1)
        q, k, v = self._heads(x, keys)
        by_kernel, query_scale = can_attend(q, keys), self.query_scale
        if not by_kernel or not (rotary is None or can_rotate(q, rotary)):
            if query_scale is not None:
                q, query_scale = q * query_scale, None
            if rotary is not None:
                q, k, rotary = _rotated(q, rotary), _rotated(k, rotary), None
        if by_kernel:
            token = Token(k, v, position, rotary)
            y = attention(q, token, (keys, values), mask, self.scale, 1.0 if query_scale is None else query_scale)
        else:
            keys.index_copy_(2, position, k)
            values.index_copy_(2, position, v)
            y = sdpa_attention_forward(self.module, q, keys, values, mask, scaling=self.scale)[0]
        return y.reshape(len(x), 1, -1)

    def _heads(self, x: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
        """q, k and v [B, heads, 1, D] of x, normed; keys: [B, heads of k and v, capacity, D]."""
        products, width = self.products(x), keys.shape[1] * keys.shape[-1]
        if len(products) == 1:
            products = products[0].split((products[0].shape[-1] - 2 * width, width, width), dim=-1)
        q, k, v = (y.view(len(x), 1, -1, keys.shape[-1]) for y in products)
        if self.head_norms:
            q, k = self.head_norms[0](q), self.head_norms[1](k)
        return tuple(y.transpose(1, 2) for y in (q, k, v))


def _rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """x [B, H, 1, D] rotated, value i with value i + D / 2, in the steps in which transformers does it."""
    cosine, sine = (part.unsqueeze(1) for part in rotary)
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


@dataclass(frozen=True, eq=False)
class TokenBlock:
    """A decoder block of one token of each sequence.

    inputs: gate and source, or source. activation: of ACTIVATIONS, or None.
    """

    block: nn.Module
    row: ResidualBlock
    norms: tuple[FastNorm, ...]
    attention: TokenAttention
    inputs: MergedLinears
    activation: str | None

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any,
        attention_mask: Tensor,
        *_: Any,
        position_embeddings: Rotary | None = None,
        **__: Any,
    ) -> Tensor:
        """The block's result for hidden_states [B, 1, K]; the rest as TokenAttention takes it.

        What else transformers hands its blocks (positions, whether to cache) says nothing more of a single token. GPT-2
        hands the cache and the mask by their places, the others by name.
        """
        rotary = position_embeddings if self.row.attention.rotary else None
        y = self.attention(self.norms[0](hidden_states), past_key_values, attention_mask, rotary)
        output, target = map(self.block.get_submodule, (self.row.attention.output, self.row.target))
        if _takes_epilogue(output):
            hidden_states = _with_epilogue(output, y, residual=hidden_states)
            normal = self.norms[1](hidden_states)
        else:
            hidden_states, normal = self.norms[1].after_adding(hidden_states, output(y))
        between = self._between(normal)
        if _takes_epilogue(target):
            return _with_epilogue(target, between, residual=hidden_states)
        result: Tensor = hidden_states + target(between)
        return result

    def _between(self, x: Tensor) -> Tensor:
        function, source = self.block.get_submodule(self.row.activation), self.inputs.modules[-1]
        if self.row.gate is None and self.activation is not None and _takes_epilogue(source):
            return _with_epilogue(source, x, activation=self.activation)
        *gates, y = self.inputs(x)
        result: Tensor
        if not gates:
            result = function(y)
        elif self.activation is not None and can_gate(gates[0], y):
            result = gated(gates[0], y, self.activation)
        else:
            result = function(gates[0]) * y
        return result


def token_blocks(model: nn.Module) -> list[TokenBlock]:
    """The model's decoder blocks that the family table describes in full; none in training.

    None for a model without a row there, whose blocks may hold no Linear any more by which they would be found.
    Left out, too, are blocks inside which something watches a module, and models with a key/value prefix, which the
    attention kernel does not read.
    """
    family, config = known_family(model), getattr(model, "config", None)
    row = None if family is None else family.block
    if row is None or model.training or has_prefix(model) or not row.exact(config):
        return []
    blocks = (block for _, block in decoder_blocks(model) if row.describes(block) and not holds_watched(block))
    return [made for block in blocks if (made := _token_block(block, row)) is not None]


def _token_block(block: nn.Module, row: ResidualBlock) -> TokenBlock | None:
    norms, head_norms = _fast_norms(block, row.norms), _fast_norms(block, row.attention.head_norms)
    if norms is None or head_norms is None:
        return None
    inputs = _submodules(block, (row.source,) if row.gate is None else (row.gate, row.source))
    return TokenBlock(
        block=block,
        row=row,
        norms=norms,
        attention=_token_attention(block, row.attention, head_norms),
        inputs=merge_linears(inputs),
        activation=activation_name(block.get_submodule(row.activation)),
    )


def _token_attention(block: nn.Module, row: Attention, head_norms: tuple[FastNorm, ...]) -> TokenAttention:
    module: Any = block.get_submodule(row.module)
    return TokenAttention(
        module=module,
        products=merge_linears(_submodules(block, row.inputs)),
        head_norms=head_norms,
        scale=1.0 if row.scales_query else module.scaling,
        query_scale=module.scaling if row.scales_query else None,
    )


def _submodules(block: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    return [block.get_submodule(name) for name in names]


def _fast_norms(block: nn.Module, names: Sequence[str]) -> tuple[FastNorm, ...] | None:
    """The norms of those names, or None where one has no kernel."""
    norms = tuple(norm for module in _submodules(block, names) if (norm := fast_norm(module)) is not None)
    return norms if len(norms) == len(names) else None


def _takes_epilogue(module: nn.Module) -> bool:
    """Whether the module's product has a kernel for what follows it."""
    if not isinstance(module, QuantizedLinear) or not module.prepared or module.follower is not None:
        return False
    return LINEARS[module.format_name].epilogue_forward is not None


def _with_epilogue(module: Any, x: Tensor, *, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
    forward = LINEARS[module.format_name].epilogue_forward
    assert forward is not None
    return forward(module.spec, module.held, module.shape, x, module.bias, Epilogue(activation, residual))
