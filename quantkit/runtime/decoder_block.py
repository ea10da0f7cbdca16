"""Decoder blocks that generate, with fewer kernels than transformers' own code: of prompts and of single tokens.

A block that the family table describes in full (ResidualBlock) computes here what its class computes, every sum and
function rounded where it was before, in one kernel each:

  norm -> q, k, v -> attention with rotary and cache update (fused_attention.py) -> output + residual
  norm -> gate, source -> activation -> target + residual

The additions are left to the products before them where those have a kernel with an epilogue, as is an activation
without a gate; elsewhere the first addition is left to the norm behind it. Norms and gated activations write the order
in which the product behind them reads, where it has one of its own. What has no kernel runs by torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quantkit.models.families import decoder_blocks, known_family, linear_shape
from quantkit.models.family import Attention, ResidualBlock
from quantkit.ops.activations import activation_name
from quantkit.ops.bcq.arranged import InputOrder, ProductInput, arranged_gated
from quantkit.ops.decode.layout import can_gate
from quantkit.ops.decode.op import gated
from quantkit.ops.epilogue import Epilogue
from quantkit.runtime.fused_attention import FusedAttention, Rotary
from quantkit.runtime.merged_linears import EpilogueProduct, MergedLinears, merge_linears, product_with_epilogue
from quantkit.runtime.norms import FastNorm, fast_norm
from quantkit.runtime.prefix import has_prefix
from quantkit.runtime.twin import holds_watched

_PARTS = 3  # q, k and v of one product


@dataclass(frozen=True, eq=False)
class Projection:
    """The Linear that ends a residual branch, and its product with the addition where a kernel has both."""

    linear: nn.Module
    product: EpilogueProduct | None

    @classmethod
    def of(cls, linear: nn.Module) -> Projection:
        """Of a Linear whose tensors stay what they are."""
        return cls(linear, product_with_epilogue(linear))


@dataclass(frozen=True, eq=False)
class FusedBlock:
    """A decoder block of the last token of each sequence, or of whole prompts.

    output, target: behind the attention, and behind the activation ``function``. inputs: gate and source, or source.
    activated: the product of source and the activation, where there is no gate and a kernel has both.
    activation: of ACTIVATIONS, or None.
    """

    block: nn.Module
    rotary: bool
    norms: tuple[FastNorm, ...]
    attention: FusedAttention
    output: Projection
    inputs: MergedLinears
    activated: EpilogueProduct | None
    function: nn.Module
    activation: str | None
    target: Projection

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any,
        attention_mask: Tensor,
        *_: Any,
        position_embeddings: Rotary | None = None,
        **__: Any,
    ) -> Tensor:
        """The block's result for hidden_states [B, M, K]; the rest as FusedAttention takes it.

        What else transformers hands its blocks (positions, whether to cache) says nothing more. GPT-2 hands the cache
        and the mask by their places, the others by name.
        """
        rotary, output, target = position_embeddings if self.rotary else None, self.output, self.target
        normal = self.norms[0].in_order(hidden_states, self.attention.products.input_order(hidden_states))
        y = self.attention(normal, past_key_values, attention_mask, rotary)
        if output.product is not None:
            hidden_states = output.product(y, Epilogue(residual=hidden_states))
            normal = self.norms[1].in_order(hidden_states, self._input_order(hidden_states))
        else:
            hidden_states, normal = self.norms[1].after_adding(hidden_states, output.linear(y))
        between = self._between(normal, hidden_states)
        if target.product is not None:
            return target.product(between, Epilogue(residual=hidden_states))
        result: Tensor = hidden_states + target.linear(between)
        return result

    def _input_order(self, like: Tensor) -> InputOrder | None:
        if self.activated is not None:
            return self.activated.input_order(like, Epilogue(self.activation))
        return self.inputs.input_order(like)

    def _between(self, x: ProductInput, residual: Tensor) -> ProductInput:
        if self.activated is not None:
            return self.activated(x, Epilogue(self.activation))
        *gates, y = self.inputs(x)
        result: ProductInput
        if not gates:
            result = self.function(y)
        elif self.activation is not None and can_gate(gates[0], y):
            result = self._gated(gates[0], y, self.activation, residual)
        else:
            result = self.function(gates[0]) * y
        return result

    def _gated(self, gate: Tensor, up: Tensor, activation: str, residual: Tensor) -> ProductInput:
        target = self.target.product
        order = None if target is None else target.input_order(gate, Epilogue(residual=residual))
        if order is None:
            return gated(gate, up, activation)
        return arranged_gated(gate, up, activation, order)


def fused_blocks(model: nn.Module) -> list[FusedBlock]:
    """The model's decoder blocks that the family table describes in full; none in training.

    None for a model without a row there, whose blocks may hold no Linear any more by which they would be found.
    Left out, too, are blocks inside which something watches a module, and models with a key/value prefix, which
    FusedAttention does not read.
    """
    family, config = known_family(model), getattr(model, "config", None)
    row = None if family is None else family.block
    if row is None or model.training or has_prefix(model) or not row.exact(config):
        return []
    blocks = (block for _, block in decoder_blocks(model) if row.describes(block) and not holds_watched(block))
    return [made for block in blocks if (made := _fused_block(block, row)) is not None]


def _fused_block(block: nn.Module, row: ResidualBlock) -> FusedBlock | None:
    norms, head_norms = _fast_norms(block, row.norms), _fast_norms(block, row.attention.head_norms)
    if norms is None or head_norms is None:
        return None
    inputs = _submodules(block, (row.source,) if row.gate is None else (row.gate, row.source))
    output, function, target = _submodules(block, (row.attention.output, row.activation, row.target))
    merged, activation = merge_linears(inputs), activation_name(function)
    return FusedBlock(
        block=block,
        rotary=row.attention.rotary,
        norms=norms,
        attention=_fused_attention(block, row.attention, head_norms),
        output=Projection.of(output),
        inputs=merged,
        activated=product_with_epilogue(inputs[-1]) if row.gate is None and activation is not None else None,
        function=function,
        activation=activation,
        target=Projection.of(target),
    )


def _fused_attention(block: nn.Module, row: Attention, head_norms: tuple[FastNorm, ...]) -> FusedAttention:
    module: Any = block.get_submodule(row.module)
    inputs = _submodules(block, row.inputs)
    last, _ = linear_shape(inputs[-1])
    return FusedAttention(
        module=module,
        products=merge_linears(inputs),
        head_norms=head_norms,
        kv_features=last if len(inputs) > 1 else last // _PARTS,
        scale=1.0 if row.scales_query else module.scaling,
        query_scale=module.scaling if row.scales_query else None,
    )


def _submodules(block: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    return [block.get_submodule(name) for name in names]


def _fast_norms(block: nn.Module, names: Sequence[str]) -> tuple[FastNorm, ...] | None:
    """The norms of those names, or None where one has no kernel."""
    norms = tuple(norm for module in _submodules(block, names) if (norm := fast_norm(module)) is not None)
    return norms if len(norms) == len(names) else None
