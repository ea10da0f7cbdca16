"""How a model calls its decoder blocks: with which masks, position embeddings and other arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import ModelError
from quantkit.models.stream import ModelStream
from quantkit.models.structure import model_body

# Tokens of the windows that a GPU runs through a block at once: of a small block, fewer leave it idle between kernels.
# A CPU is as fast with one window, and holds less.
_TOKENS_AT_ONCE = {"cuda": 4096}


@dataclass(frozen=True)
class BlockCall:
    """How the model calls one block, besides the hidden states: masks, position embeddings, alibi, ..."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class BlocksReadTextError(ModelError):
    """A model's blocks are handed something that depends on the text, so it runs as a whole only."""


def tokens_at_once(device: torch.device, seq_len: int) -> int:
    """How many tokens run through a block at a time, in windows of ``seq_len``."""
    return max(seq_len, _TOKENS_AT_ONCE.get(device.type, 0))


@dataclass(frozen=True)
class RecordedCalls:
    """What one pass shows. width: the shape of a hidden state behind [n, seq_len]. Others as in BlockInputs."""

    calls: tuple[BlockCall, ...]
    width: tuple[int, ...]
    dtype: torch.dtype
    rest: tuple[Any, ...] | None
    batched: Mapping[int, tuple[BlockCall, ...]] = field(default_factory=dict)


def recorded_calls(stream: ModelStream, windows: Tensor, start: int = 0) -> RecordedCalls:
    """_record_calls, once it is known that what the blocks are called with does not depend on the text.

    Raises BlocksReadTextError where it does: the calls of one window would be wrong for another.
    """
    ends = [windows[end][None].to(stream.device, torch.long) for end in ((0, -1) if len(windows) > 1 else (0,))]
    with stream.block(0):
        found = [_record_calls(stream, window, start) for window in ends]
    for index, (first, other) in enumerate(zip(found[0].calls, found[-1].calls, strict=True)):
        if not _same(first.arguments, other.arguments) or not _same(first.keywords, other.keywords):
            raise BlocksReadTextError(
                f"{type(stream.model).__name__}: hands block {index} something that depends on the text; models with "
                "such blocks (inputs per layer) cannot be run block by block"
            )
    most = min(len(windows), tokens_at_once(stream.device, windows.shape[1]) // windows.shape[1])
    batches = [windows[: 1 << power].to(stream.device, torch.long) for power in range(1, most.bit_length())]
    with stream.block(0):
        batched = {len(batch): _record_calls(stream, batch, start).calls for batch in batches}
    return replace(found[0], batched=batched)


def _same(first: Any, other: Any) -> bool:
    """Whether two arguments of a block are equal; objects that are neither tensors nor collections are taken so."""
    if isinstance(first, Tensor):
        return isinstance(other, Tensor) and torch.equal(first, other)
    if isinstance(first, dict):
        return isinstance(other, dict) and all(_same(value, other.get(key)) for key, value in first.items())
    if isinstance(first, list | tuple):
        return len(first) == len(other) and all(map(_same, first, other))
    return True


def _record_calls(stream: ModelStream, windows: Tensor, start: int) -> RecordedCalls:
    """Arguments of every block in one pass over windows [b, seq_len]; they differ where layers attend differently
    (sliding, local rope).

    Only the first block computes: what the model hands to a block depends on the tokens' places alone. The others give
    back what they are given, in the form of the first block's answer.
    """
    name, blocks = type(stream.model).__name__, [block for _, block in stream.blocks]
    calls: list[BlockCall] = []
    outputs: list[Any] = []

    def record(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        hidden = hidden_of(arguments, keywords)
        before = first_of(outputs[-1]) if outputs else None
        if before is not None and (hidden.shape != before.shape or hidden.data_ptr() != before.data_ptr()):
            raise ModelError(f"{name}: block {len(calls)} is not fed by the block before it")
        keywords = {key: value for key, value in keywords.items() if key != "hidden_states"}
        calls.append(BlockCall(arguments[1:], keywords))
        return hidden

    def pass_on(*arguments: Any, **keywords: Any) -> Any:
        hidden = record(arguments, keywords).clone()
        outputs.append((hidden, *outputs[-1][1:]) if isinstance(outputs[-1], tuple) else hidden)
        return outputs[-1]

    shape: list[torch.Size] = []

    def compute(*arguments: Any, **keywords: Any) -> Any:
        shape.append(record(arguments, keywords).shape)
        outputs.append(forward(*arguments, **keywords))
        return outputs[-1]

    forward = blocks[0].forward
    with stream.block(0), replaced_forwards(blocks, [compute, *[pass_on] * (len(blocks) - 1)]):
        model_body(stream.model)(windows, use_cache=False, **_positions(windows, start))
    if len(calls) != len(blocks):
        raise ModelError(f"{name}: a pass runs {len(calls)} of its {len(blocks)} blocks")
    rest = outputs[0][1:] if isinstance(outputs[0], tuple) else None
    return RecordedCalls(tuple(calls), tuple(shape[0][2:]), first_of(outputs[0]).dtype, rest)


@contextmanager
def replaced_forwards(blocks: Sequence[nn.Module], functions: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """While entered, the blocks compute these functions instead."""
    former = [vars(block).get("forward") for block in blocks]
    try:
        for block, function in zip(blocks, functions, strict=True):
            block.forward = function
        yield
    finally:
        for block, own in zip(blocks, former, strict=True):
            vars(block).pop("forward", None)
            if own is not None:
                block.forward = own


def _positions(windows: Tensor, start: int) -> dict[str, Tensor]:
    """What a model is told of the positions of windows that do not begin at 0."""
    if not start:
        return {}
    return {"position_ids": torch.arange(start, start + windows.shape[1], device=windows.device)[None]}


def first_of(output: Any) -> Any:
    """The hidden states of what a block returns."""
    return output[0] if isinstance(output, tuple) else output


def hidden_of(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
    """The hidden states that a block is called with. Raises ModelError where there are none."""
    hidden = arguments[0] if arguments else keywords.get("hidden_states")
    if not isinstance(hidden, Tensor):
        raise ModelError("a decoder block is called without hidden states; its structure is not supported")
    return hidden
