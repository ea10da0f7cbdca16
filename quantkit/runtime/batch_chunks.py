"""Decoder blocks of ``flatten`` Linears that take a large batch in chunks.

The sequences of a batch do not meet inside a block, so what a block makes on its way (the normed input, q, k, v, the
attention's result, codes) is in memory for a few sequences at a time; its input and its result are whole. The model's
own code runs, once per chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, compiler, nn

from quantkit.models.families import FAMILIES
from quantkit.nn.quantized_linear import QuantizedLinear, is_flatten
from quantkit.runtime.twin import holds_watched

CHUNK_TOKENS = 8192  # 4096 save little more and take 3 % longer (docs/kernels/log.md, flatten)
_KEPT_WHOLE = (bool, int, float, str, type(None))


@dataclass(frozen=True, eq=False)
class ChunkedBlock:
    """A block whose forward runs once for every chunk of the batch."""

    block: nn.Module

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """The block's result for hidden_states [B, M, K].

        Whole where the batch is small, keys and values are cached, an argument is of an unknown kind, or something
        watches the modules inside, which would see chunks.
        """
        batch, length = hidden_states.shape[:2] if hidden_states.ndim == 3 else (1, len(hidden_states))
        sequences, rest = max(1, CHUNK_TOKENS // max(length, 1)), (arguments, options)
        whole = batch <= sequences or compiler.is_compiling() or not _can_split(rest, batch)
        if whole or holds_watched(self.block):
            return self._own(hidden_states, rest)
        result: Tensor | None = None
        for first in range(0, batch, sequences):
            some = slice(first, first + sequences)
            y = self._own(hidden_states[some], _chunk(rest, some, batch))
            if result is None:
                result = y.new_empty(batch, *y.shape[1:])
            result[some] = y
            del y
        assert result is not None
        return result

    def _own(self, hidden_states: Tensor, rest: tuple[tuple[Any, ...], dict[str, Any]]) -> Tensor:
        y: Tensor = type(self.block).forward(self.block, hidden_states, *rest[0], **rest[1])
        return y


def chunk_batches(model: nn.Module) -> None:
    """Let the decoder blocks of ``flatten`` Linears take large batches in chunks; once more changes nothing.

    Only blocks of classes that the family table describes in full: of others it is not known what their arguments are.
    """
    described = [family.block for family in FAMILIES if family.block is not None]
    for block in model.modules():
        known = any(row.describes(block) for row in described)
        if known and "forward" not in vars(block) and _holds_flatten(block):
            block.forward = ChunkedBlock(block).forward


def _holds_flatten(block: nn.Module) -> bool:
    """Whether its packed Linears are all ``flatten``; others do work that does not grow with M once per chunk."""
    packed = [module for module in block.modules() if isinstance(module, QuantizedLinear)]
    return bool(packed) and all(map(is_flatten, packed))


def _can_split(value: Any, batch: int) -> bool:
    if isinstance(value, dict):
        return all(_can_split(item, batch) for item in value.values())
    if isinstance(value, tuple | list):
        return all(_can_split(item, batch) for item in value)
    if isinstance(value, Tensor):
        return value.ndim < 2 or len(value) in (1, batch)
    return isinstance(value, _KEPT_WHOLE)


def _chunk(value: Any, some: slice, batch: int) -> Any:
    """``value`` with every tensor [B, ...] cut; masks, positions and rotary embeddings come with B = 1, too."""
    if isinstance(value, dict):
        return {name: _chunk(item, some, batch) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_chunk(item, some, batch) for item in value)
    return value[some] if isinstance(value, Tensor) and value.ndim >= 2 and len(value) == batch else value
