"""Running a model block by block: what the inputs of each block are once the blocks before it were quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import ModelError
from quantkit.memory import free_bytes
from quantkit.models.block_calls import BlockCall, first_of, hidden_of, recorded_calls
from quantkit.models.stream import ModelStream
from quantkit.models.structure import model_body
from quantkit.ranks import ALONE, Ranks
from quantkit.storage.resume import Workspace


@dataclass(frozen=True)
class BlockInputs:
    """What flows into a block.

    hidden: [windows, seq_len, hidden_size] in any place. With ``models`` above 1, [windows, models, seq_len,
        hidden_size]: those of several models side by side; ``of`` chooses one.
    calls: how each block is called with one window, in block order; the same for all, as they have one length.
    batched: by number of windows, how each block is called with so many at once; nothing where they run one by one.
    dtype: what the blocks compute in; ``hidden`` may be stored in fewer bits.
    rest: what a block returns behind the hidden states; None where it returns them bare.
    """

    hidden: Tensor
    calls: tuple[BlockCall, ...]
    dtype: torch.dtype
    rest: tuple[Any, ...] | None = None
    models: int = 1
    batched: Mapping[int, tuple[BlockCall, ...]] = field(default_factory=dict)

    def batches(self, count: int) -> list[int]:
        """How many of ``count`` windows run at once, one batch after the other."""
        sizes, left = [], count
        for size in (*sorted(self.batched, reverse=True), 1):
            sizes += [size] * (left // size)
            left %= size
        return sizes

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
        found = recorded_calls(stream, windows, start)
        narrower = dtype is not None and dtype.itemsize < found.dtype.itemsize
        hidden = room((*windows.shape, *found.width), dtype if narrower and dtype is not None else found.dtype)
        numbers = iter(ranks.own(len(windows)))

        def catch(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            hidden[next(numbers)] = hidden_of(arguments, keywords)[0]
            raise _Captured

        body, (_, first) = model_body(stream.model), stream.blocks[0]
        handle = first.register_forward_pre_hook(catch, with_kwargs=True)
        try:
            for number in ranks.own(len(windows)):
                with suppress(_Captured):
                    body(windows[number][None].to(stream.device, torch.long), use_cache=False)
        finally:
            handle.remove()
    return BlockInputs(hidden, found.calls, found.dtype, found.rest, batched=found.batched)


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
        found = recorded_calls(stream, windows)
    shape = _side_by_side((*windows.shape, *found.width), models)
    hidden = work.state(work.finished, shape, dtype)
    ranks.lead(lambda: work.check_state(hidden))
    room_for_it = state_room(stream.device, work, work.finished, shape, dtype)
    hidden = hidden if room_for_it.device.type == "cpu" else room_for_it.copy_(hidden)
    return BlockInputs(hidden, found.calls, found.dtype, found.rest, models, found.batched)


def _side_by_side(shape: tuple[int, ...], models: int) -> tuple[int, ...]:
    return shape if models == 1 else (shape[0], models, *shape[1:])


def state_room(
    device: torch.device, work: Workspace, number: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Room for the hidden states that a piece of the work starts from: on a GPU, where they are small beside what is
    free there, else in the work's file."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if device.type == "cuda" and size <= free_bytes(device) * _GPU_SHARE:
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
    block: nn.Module, inputs: BlockInputs, index: int, windows: Iterable[int] | None = None
) -> Iterator[tuple[int, Tensor]]:
    """(window number, output [1, seq_len, hidden_size]) of block ``index`` for one window after the other, of which
    several may have run at once.

    windows: numbers of those that run, where there are such windows; by default all.
    """
    for numbers, output in run_batches(block, inputs, index, windows):
        yield from zip(numbers, output.split(1), strict=True)


def run_batches(
    block: nn.Module,
    inputs: BlockInputs,
    index: int,
    windows: Iterable[int] | None = None,
    *,
    before: Callable[[Sequence[int]], None] | None = None,
) -> Iterator[tuple[list[int], Tensor]]:
    """(window numbers, outputs [b, seq_len, hidden_size]) of as many windows at once as there are calls for.

    windows: as run_block takes them. before: is told which windows run next.
    """
    present = range(len(inputs.hidden))
    numbers = list(present if windows is None else (number for number in windows if number in present))
    for size in inputs.batches(len(numbers)):
        batch, numbers = numbers[:size], numbers[size:]
        if before is not None:
            before(batch)
        with torch.no_grad():
            hidden = inputs.hidden[batch[0]][None] if size == 1 else inputs.hidden[batch]
            output = call_block(block, inputs, index, hidden)
        yield batch, output


def call_block(block: nn.Module, inputs: BlockInputs, index: int, hidden: Tensor) -> Tensor:
    """What block ``index`` makes of hidden states [b, seq_len, hidden_size], in what it computes in.

    b: 1, or a number of windows that ``inputs`` has a call for.
    """
    call = (inputs.calls if len(hidden) == 1 else inputs.batched[len(hidden)])[index]
    device = next(block.parameters()).device
    output: Tensor = first_of(block(hidden.to(device, inputs.dtype), *call.arguments, **call.keywords))
    return output


def advance(block: nn.Module, inputs: BlockInputs, index: int, into: Tensor | None = None) -> BlockInputs:
    """The inputs of block ``index + 1``, written to ``into`` or, window by window, over those of this block."""
    outputs = inputs.hidden if into is None else into
    for number, output in run_block(block, inputs, index):
        outputs[number] = output[0].to(outputs.device)
    return inputs.with_hidden(outputs)
