"""Running a model block by block: what the inputs of each block are once the blocks before it were quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import ModelError
from quantkit.models.stream import ModelStream
from quantkit.models.structure import model_body
from quantkit.ranks import ALONE, Ranks
from quantkit.storage.resume import Workspace


@dataclass(frozen=True)
class BlockCall:
    """How the model calls one block, besides the hidden states: masks, position embeddings, alibi, ..."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True)
class BlockInputs:
    """What flows into a block.

    hidden: [windows, seq_len, hidden_size] in any place; one window at a time is handed to the block. With ``models``
        above 1, [windows, models, seq_len, hidden_size]: those of several models side by side; ``of`` chooses one.
    calls: how each block is called, in block order; the same for every window, as all have one length.
    dtype: what the blocks compute in; ``hidden`` may be stored in fewer bits.
    rest: what a block returns behind the hidden states; None where it returns them bare.
    """

    hidden: Tensor
    calls: tuple[BlockCall, ...]
    dtype: torch.dtype
    rest: tuple[Any, ...] | None = None
    models: int = 1

    def with_hidden(self, hidden: Tensor) -> BlockInputs:
        """The same with other hidden states."""
        return replace(self, hidden=hidden)

    def of(self, model: int) -> BlockInputs:
        """The same with the hidden states of one model, where those of several stand side by side."""
        return self if self.models == 1 else replace(self, hidden=self.hidden[:, model], models=1)


# Share of a GPU's free memory that one copy of the hidden states may take there; larger ones are in a file.
_GPU_SHARE = 0.15
_ACTIVATIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def activations_dtype(activations: str) -> torch.dtype:
    """What hidden states are stored in between blocks, by the name that a user gives. Raises ModelError for others."""
    if activations not in _ACTIVATIONS:
        raise ModelError(f"`activations` {activations}: choose {' or '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activations]


Room = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""(shape, dtype) -> a tensor to hold hidden states, in memory, on a GPU or mapped from a file."""


def in_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Room for hidden states in memory."""
    return torch.empty(shape, dtype=dtype)


class _Captured(Exception):
    """Ends a forward pass once the first block was reached."""


class BlocksReadTextError(ModelError):
    """A model's blocks are handed something that depends on the text, so it runs as a whole only."""


@torch.no_grad()
def capture_inputs(
    stream: ModelStream,
    windows: Tensor,
    *,
    room: Room = in_memory,
    dtype: torch.dtype | None = None,
    ranks: Ranks = ALONE,
    start: int = 0,
) -> BlockInputs:
    """Inputs of the first decoder block for every window, and how each block is called.

    windows: [n, seq_len] token ids. room: where the hidden states go. dtype: what they are stored in, where that is
    narrower than what the model computes in. ranks: each fills in its own windows. start: the position of a window's
    first token; only rotary positions take one below 0.
    Raises ModelError where the blocks are no plain chain (each fed by the one before), or for an unknown structure.
    """
    with stream.outside():
        found = _recorded_calls(stream, windows, start)
        narrower = dtype is not None and dtype.itemsize < found.dtype.itemsize
        hidden = room((*windows.shape, *found.width), dtype if narrower and dtype is not None else found.dtype)
        numbers = iter(ranks.own(len(windows)))

        def catch(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            hidden[next(numbers)] = _hidden(arguments, keywords)[0]
            raise _Captured

        body, (_, first) = model_body(stream.model), stream.blocks[0]
        handle = first.register_forward_pre_hook(catch, with_kwargs=True)
        try:
            for number in ranks.own(len(windows)):
                with suppress(_Captured):
                    body(windows[number][None].to(stream.device, torch.long), use_cache=False)
        finally:
            handle.remove()
    return BlockInputs(hidden, found.calls, found.dtype, found.rest)


def stored_inputs(
    stream: ModelStream,
    windows: Tensor,
    work: Workspace,
    dtype: torch.dtype,
    *,
    first: int,
    models: int = 1,
    ranks: Ranks = ALONE,
) -> BlockInputs:
    """capture_inputs with the hidden states that the work's next block starts from: those of its files, or new ones.

    New ones are on the GPU where the model runs there and they are small beside its memory, else in the work's files.
    first: which piece of the work the first block is. models: how many there are whose hidden states stand side by side
    (BlockInputs), equal before the first block. Raises OutputError where an earlier run's are not what it wrote.
    """
    if not work.finished:

        def room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return state_room(stream.device, work, first, _side_by_side(shape, models), dtype)

        return replace(capture_inputs(stream, windows, room=room, dtype=dtype, ranks=ranks), models=models)
    with stream.outside(), torch.no_grad():
        found = _recorded_calls(stream, windows)
    shape = _side_by_side((*windows.shape, *found.width), models)
    hidden = work.state(work.finished, shape, dtype)
    ranks.lead(lambda: work.check_state(hidden))
    room_for_it = state_room(stream.device, work, work.finished, shape, dtype)
    hidden = hidden if room_for_it.device.type == "cpu" else room_for_it.copy_(hidden)
    return BlockInputs(hidden, found.calls, found.dtype, found.rest, models)


def _side_by_side(shape: tuple[int, ...], models: int) -> tuple[int, ...]:
    return shape if models == 1 else (shape[0], models, *shape[1:])


def state_room(
    device: torch.device, work: Workspace, number: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Room for the hidden states that a piece of the work starts from: on a GPU, where they are small beside what is
    free there, else in the work's file."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if torch.Size(shape).numel() * dtype.itemsize <= free * _GPU_SHARE:
            return torch.empty(shape, dtype=dtype, device=device)
    return work.state(number, shape, dtype)


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """While entered, a GPU rounds the factors of fp32 products to TF32, 11 bits of mantissa where bf16 has 8, and adds
    in fp32: four to eight times as fast. For running text through blocks; never for solving."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def run_block(
    block: nn.Module, inputs: BlockInputs, index: int, windows: Sequence[int] | None = None
) -> Iterator[tuple[int, Tensor]]:
    """(window number, output [1, seq_len, hidden_size]) of block ``index`` for one window after the other.

    windows: numbers of those that run, where there are such windows; by default all.
    """
    present = range(len(inputs.hidden))
    for number in present if windows is None else (number for number in windows if number in present):
        with torch.no_grad():
            output = call_block(block, inputs, index, inputs.hidden[number][None])
        yield number, output


def call_block(block: nn.Module, inputs: BlockInputs, index: int, hidden: Tensor) -> Tensor:
    """What block ``index`` makes of hidden states [1, seq_len, hidden_size], in what it computes in."""
    call = inputs.calls[index]
    device = next(block.parameters()).device
    output: Tensor = _first(block(hidden.to(device, inputs.dtype), *call.arguments, **call.keywords))
    return output


def advance(block: nn.Module, inputs: BlockInputs, index: int, into: Tensor | None = None) -> BlockInputs:
    """The inputs of block ``index + 1``, written to ``into`` or, window by window, over those of this block."""
    outputs = inputs.hidden if into is None else into
    for number, output in run_block(block, inputs, index):
        outputs[number] = output[0].to(outputs.device)
    return inputs.with_hidden(outputs)


@dataclass(frozen=True)
class _Recorded:
    """What one pass shows. width: the shape of a hidden state behind [n, seq_len]. Others as in BlockInputs."""

    calls: tuple[BlockCall, ...]
    width: tuple[int, ...]
    dtype: torch.dtype
    rest: tuple[Any, ...] | None


def _recorded_calls(stream: ModelStream, windows: Tensor, start: int = 0) -> _Recorded:
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
    return found[0]


def _same(first: Any, other: Any) -> bool:
    """Whether two arguments of a block are equal; objects that are neither tensors nor collections are taken so."""
    if isinstance(first, Tensor):
        return isinstance(other, Tensor) and torch.equal(first, other)
    if isinstance(first, dict):
        return isinstance(other, dict) and all(_same(value, other.get(key)) for key, value in first.items())
    if isinstance(first, list | tuple):
        return len(first) == len(other) and all(map(_same, first, other))
    return True


def _record_calls(stream: ModelStream, window: Tensor, start: int) -> _Recorded:
    """Arguments of every block in one pass; they differ where layers attend differently (sliding, local rope).

    Only the first block computes: what the model hands to a block depends on the tokens' places alone. The others give
    back what they are given, in the form of the first block's answer.
    """
    name, blocks = type(stream.model).__name__, [block for _, block in stream.blocks]
    calls: list[BlockCall] = []
    outputs: list[Any] = []

    def record(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        hidden = _hidden(arguments, keywords)
        before = _first(outputs[-1]) if outputs else None
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
        model_body(stream.model)(window, use_cache=False, **_positions(window, start))
    if len(calls) != len(blocks):
        raise ModelError(f"{name}: a pass runs {len(calls)} of its {len(blocks)} blocks")
    rest = outputs[0][1:] if isinstance(outputs[0], tuple) else None
    return _Recorded(tuple(calls), tuple(shape[0][2:]), _first(outputs[0]).dtype, rest)


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


def _positions(window: Tensor, start: int) -> dict[str, Tensor]:
    """What a model is told of the positions of a window that does not begin at 0."""
    if not start:
        return {}
    return {"position_ids": torch.arange(start, start + window.shape[1], device=window.device)[None]}


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _hidden(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
    hidden = arguments[0] if arguments else keywords.get("hidden_states")
    if not isinstance(hidden, Tensor):
        raise ModelError("a decoder block is called without hidden states; its structure is not supported")
    return hidden
