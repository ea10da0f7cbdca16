"""Decoder blocks with fewer kernels between their products, while single tokens are decoded.

A block that the family table describes in full (ResidualBlock) runs here instead of in transformers: the same modules
in the same order, but activations and residual additions are left to the products before them where those have a kernel
for it, and one of the two additions to the norm behind it elsewhere. Sums and functions round where they did before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quantkit.errors import BenchError
from quantkit.models.families import ResidualBlock, decoder_blocks, family_of
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.nn.table import LINEARS
from quantkit.ops.activations import activation_name
from quantkit.ops.decode.layout import can_gate
from quantkit.ops.decode.op import gated
from quantkit.ops.epilogue import Epilogue
from quantkit.runtime.norms import FastNorm, fast_norm


@dataclass(frozen=True)
class QueryScale:
    """Stands for an attention's ``scaling``: the query is left as it is, and the attention kernel multiplies it."""

    value: float

    def __rmul__(self, query: Tensor) -> Tensor:
        return query


@dataclass(eq=False)
class FastOutput:
    """The forward of the Linear that ends an attention; adds ``residual`` to the next product, if it can and is set."""

    module: Any
    residual: Tensor | None = None

    @property
    def adds(self) -> bool:
        """Whether the product has a kernel that adds."""
        return _finishes(self.module)

    def __call__(self, x: Tensor) -> Tensor:
        """residual + the product of x [..., K], or the product."""
        residual, self.residual = self.residual, None
        y: Tensor = self.module.multiply(x) if residual is None else _finished(self.module, x, residual=residual)
        return y


@dataclass(eq=False)
class FastBlock:
    """One decoder block as its row describes it. activation: of ACTIVATIONS, or None."""

    block: nn.Module
    row: ResidualBlock
    norms: tuple[FastNorm, FastNorm]
    output: FastOutput
    activation: str | None

    def forwards(self) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """Modules with what may run in the place of their own forward, all of them together."""
        pairs: list[tuple[nn.Module, Callable[..., Any]]] = [(self.block, self.forward)]
        return [*pairs, (self.output.module, self.output)] if self.output.adds else pairs

    @property
    def attention(self) -> nn.Module:
        """The block's attention."""
        return self.block.get_submodule(self.row.attention)

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """The block's result for hidden_states [1, M, K].

        Raises BenchError where the attention does not end with the Linear that the row names.
        """
        if self.output.adds:
            self.output.residual = hidden_states
        normal = self.block.get_submodule(self.row.norms[0])(hidden_states)
        y = self.attention(hidden_states=normal, **options)[0]
        if self.output.residual is not None:
            self.output.residual = None
            raise BenchError(f"{type(self.block).__name__}: its attention did not call {self.row.output}")
        if self.output.adds:
            hidden_states, normal = y, self.norms[1](y)
        else:
            hidden_states, normal = self.norms[1].after_adding(hidden_states, y)
        target = self.block.get_submodule(self.row.target)
        between = self._between(normal)
        if _finishes(target):
            return _finished(target, between, residual=hidden_states)
        result: Tensor = hidden_states + target(between)
        return result

    def _between(self, x: Tensor) -> Tensor:
        source, activation = map(self.block.get_submodule, (self.row.source, self.row.activation))
        result: Tensor
        if self.row.gate is not None:
            gate, up = self.block.get_submodule(self.row.gate)(x), source(x)
            if self.activation is not None and can_gate(gate, up):
                return gated(gate, up, self.activation)
            result = activation(gate) * up
        elif self.activation is not None and _finishes(source):
            result = _finished(source, x, activation=self.activation)
        else:
            result = activation(source(x))
        return result


def fast_blocks(model: nn.Module) -> tuple[FastBlock, ...]:
    """The model's decoder blocks that the family table describes in full; none of any other model, or in training."""
    row, config = family_of(model).block, getattr(model, "config", None)
    if row is None or model.training or not row.exact(config):
        return ()
    found = (_fast_block(block, row) for _, block in decoder_blocks(model))
    return tuple(block for block in found if block is not None)


def _fast_block(block: nn.Module, row: ResidualBlock) -> FastBlock | None:
    if not row.describes(block):
        return None
    first, second = (fast_norm(block.get_submodule(name)) for name in row.norms)
    if first is None or second is None:
        return None
    output, activation = map(block.get_submodule, (row.output, row.activation))
    return FastBlock(block, row, (first, second), FastOutput(output), activation_name(activation))


def _finishes(module: nn.Module) -> bool:
    """Whether the module's product has a kernel for what follows it."""
    if not isinstance(module, QuantizedLinear) or not module.prepared or module.follower is not None:
        return False
    return LINEARS[module.format_name].epilogue_forward is not None


def _finished(module: Any, x: Tensor, *, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
    forward = LINEARS[module.format_name].epilogue_forward
    assert forward is not None
    epilogue = Epilogue(activation, residual)
    return forward(module.spec, module.held, module.shape, x, module.bias, epilogue)
