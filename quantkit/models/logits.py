"""Logits of a model over windows of text, whether it is in memory or a stream of its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.models.block_calls import BlocksReadTextError, replaced_forwards
from quantkit.models.stream import ModelStream
from quantkit.models.streaming import BlockInputs, advance, capture_inputs, state_room
from quantkit.progress import say, track
from quantkit.storage.resume import Workspace, passing_workspace


@torch.no_grad()
def window_logits(
    model: Any, windows: Sequence[Tensor], what: str, *, activations: torch.dtype = torch.float32
) -> Iterator[Tensor]:
    """Logits [tokens, vocabulary] of each window [tokens] of ids, in order, on the model's device.

    model: in memory, or a ModelStream: its blocks then read all windows one block after the other, and hidden states
    in between are in a file in the folder for temporary files, or on the GPU where they are small beside what is free.
    A stream whose blocks read the text themselves is put into memory as a whole, and a line says so.
    what: the progress line. activations: what hidden states are stored in, where that is narrower than what the
    blocks compute in.
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


def log_probabilities(model: Any, tokens: Tensor) -> Tensor:
    """[b * seq_len, vocabulary] fp32 of windows [b, seq_len] of ids, with a graph where gradients are on; the model is
    in memory."""
    # Without a cache the code of transformers asks whether texts are packed into a window, so the host waits for a GPU.
    logits: Tensor = model(tokens.long(), use_cache=True).logits
    return logits.float().log_softmax(dim=-1).flatten(0, -2)


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
    parts: list[_Part] = []
    for length in sorted({len(window) for window in windows}):
        numbers = [number for number, window in enumerate(windows) if len(window) == length]
        ids = torch.stack([windows[number] for number in numbers])
        room = partial(state_room, stream.device, work, len(parts))
        parts.append(_Part(numbers, capture_inputs(stream, ids, room=room, dtype=activations)))
    return parts


def _of_last_states(stream: ModelStream, windows: Sequence[Tensor], parts: Sequence[_Part]) -> Iterator[Tensor]:
    places = {number: (part.inputs, row) for part in parts for row, number in enumerate(part.numbers)}
    with stream.outside():
        for number, window in enumerate(windows):
            inputs, row = places[number]
            yield logits_of(stream, inputs, inputs.hidden[row][None].to(stream.device, inputs.dtype), window)


def logits_of(stream: ModelStream, inputs: BlockInputs, hidden: Tensor, window: Tensor) -> Tensor:
    """What the model's own code makes of the last block's output [1, tokens, hidden_size] for a window [tokens]: norm,
    head, and whatever it does to logits [tokens, vocabulary]. What is outside the blocks is in memory."""
    blocks = [block for _, block in stream.blocks]
    answer = partial(_answer, hidden if inputs.rest is None else (hidden, *inputs.rest))
    with replaced_forwards(blocks, [answer] * len(blocks)):
        logits: Tensor = stream.model(window[None].to(stream.device, torch.long), use_cache=False).logits[0]
    return logits


def _answer(result: Any, *_arguments: Any, **_keywords: Any) -> Any:
    return result
