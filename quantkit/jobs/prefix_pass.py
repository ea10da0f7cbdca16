"""The prefix of a checkpoint while it is made: keys and values of its tokens, of each block before it is quantized."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from quantkit.checkpoint.config import PREFIX_FIELDS, Prefix
from quantkit.errors import ModelError
from quantkit.models.families import decoder_blocks, family_of, linear_shape
from quantkit.models.stream import ModelStream
from quantkit.models.streaming import advance, capture_inputs
from quantkit.runtime.prefix import capturing


def prefix_of(model: nn.Module, tokens: Sequence[int]) -> Prefix | None:
    """What a checkpoint says of the prefix of these tokens; None for none."""
    if not tokens:
        return None
    row = family_of(model).block
    assert row is not None  # check_takes_prefix
    modules = {}
    for block_name, block in decoder_blocks(model):
        width = block.get_submodule(row.attention.module).head_dim
        heads = linear_shape(block.get_submodule(row.attention.inputs[1]))[0] // width  # type: ignore[operator]
        modules[f"{block_name}.{row.attention.module}"] = (heads, len(tokens), width)
    return Prefix(tuple(tokens), modules)  # type: ignore[arg-type]


class PrefixPass:
    """Runs the prefix's tokens through the blocks, one after the other, and gives each attention its prefix."""

    def __init__(self, stream: ModelStream, prefix: Prefix, hidden: list[float] | None = None):
        """To be made while what is outside the blocks is there. hidden: what the next block starts from, or the first.

        The tokens stand before position 0.
        """
        self._stream, self._prefix = stream, prefix
        tokens = torch.tensor([prefix.tokens])
        self._inputs = capture_inputs(stream, tokens, start=-len(prefix.tokens))
        if hidden is not None:
            self._inputs = self._inputs.with_hidden(torch.tensor(hidden).view(self._inputs.hidden.shape))

    def attach(self, index: int) -> None:
        """Run the block as it is, and put the keys and values of its attention where every later text sees them.

        Raises ModelError where the attention does not call its function.
        """
        name, block = self._stream.blocks[index]
        modules = {own: self._stream.model.get_submodule(own) for own in self._prefix.modules if _inside(own, name)}
        with capturing(modules) as found:
            self._inputs = advance(block, self._inputs, index)
        for own, module in modules.items():
            if own not in found:
                raise ModelError(f"{own}: does not call the attention function, so there is no prefix to store")
            for field, states in zip(PREFIX_FIELDS, found[own], strict=True):
                module.register_buffer(field, states.clone())

    def hidden(self) -> list[float]:
        """What the next block starts from."""
        values: list[float] = self._inputs.hidden.flatten().tolist()
        return values


def _inside(name: str, block: str) -> bool:
    return name.startswith(f"{block}.")
