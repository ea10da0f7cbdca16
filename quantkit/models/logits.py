"""Logits of a model over windows of text, whether it is in memory or a stream of its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.models.stream import ModelStream
from quantkit.models.streaming import BlockInputs, BlocksReadTextError, advance, capture_inputs, replaced_forwards
from quantkit.progress import say, track
from quantkit.storage.resume import Workspace, passing_workspace

# Share of a GPU's free memory that hidden states may take there; larger ones are in a file.
_GPU_SHARE = 0.25


@torch.no_grad()
def window_logits(
    model: Any, windows: Sequence[Tensor], what: str, *, activations: torch.dtype = torch.float32
) -> Iterator[Tensor]:
    """Logits [tokens, vocabulary] of each window [tokens] of ids, in order, on the model's device.

    model: in memory, or a ModelStream: its blocks then read all windows one block after the other, and hidden states
    in between are in a file in the folder for temporary files, or on the GPU where they take a quarter of what is free.
    A stream whose blocks read the text themselves is put into memory as a whole, and a line says so.
    what: the progress line. activations: what hidden states are stored in, where that is narrower than what is computed.
    """
    if not isinstance(model, ModelStream):
        yield from _of_whole(model, windows, what)
        return
    with passing_workspace({}) as work:
        try:
            parts = _first_inputs(model, windows, activations, work)
        except BlocksReadTextError:
            say(f"{type(model.model).__name__}: its blocks depend on the text, so all of it is put into memory")
            with model.whole() as loaded:
                yield from _of_whole(loaded, windows, what)
            return
        for index in track(range(len(model.blocks)), what):
            with model.block(index) as block:
                for part in parts:
                    advance(block, part.inputs, index)
        yield from _of_last_states(model, windows, parts)


@dataclass(frozen=True)
class _Part:
    """The windows of one length, by their numbers, and what flows through the blocks for them."""

    numbers: list[int]
    inputs: BlockInputs


def _of_whole(model: Any, windows: Sequence[Tensor], what: str) -> Iterator[Tensor]:
    device = next(model.parameters()).device
    for window in track(windows, what):
        yield model(window[None].to(device, torch.long), use_cache=False).logits[0]


def _first_inputs(
    stream: ModelStream, windows: Sequence[Tensor], activations: torch.dtype, work: Workspace
) -> list[_Part]:
    parts = []
    for length in sorted({len(window) for window in windows}):
        numbers = [number for number, window in enumerate(windows) if len(window) == length]
        ids = torch.stack([windows[number] for number in numbers])
        room = partial(_room, stream.device, work, len(parts))
        parts.append(_Part(numbers, capture_inputs(stream, ids, room=room, dtype=activations)))
    return parts


def _room(device: torch.device, work: Workspace, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if torch.Size(shape).numel() * dtype.itemsize <= free * _GPU_SHARE:
            return torch.empty(shape, dtype=dtype, device=device)
    return work.state(number, shape, dtype)


def _of_last_states(stream: ModelStream, windows: Sequence[Tensor], parts: Sequence[_Part]) -> Iterator[Tensor]:
    """What the model's own code makes of the last block's outputs: norm, head, and whatever it does to logits."""
    places = {number: (part.inputs, row) for part in parts for row, number in enumerate(part.numbers)}
    blocks = [block for _, block in stream.blocks]
    with stream.outside():
        for number, window in enumerate(windows):
            inputs, row = places[number]
            hidden = inputs.hidden[row][None].to(stream.device, inputs.dtype)
            answer = partial(_answer, hidden if inputs.rest is None else (hidden, *inputs.rest))
            with replaced_forwards(blocks, [answer] * len(blocks)):
                logits = stream.model(window[None].to(stream.device, torch.long), use_cache=False).logits[0]
            yield logits


def _answer(result: Any, *_arguments: Any, **_keywords: Any) -> Any:
    return result
