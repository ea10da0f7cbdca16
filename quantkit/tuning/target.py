"""What the original model predicts on the windows: its blocks run once where that can be held, its head whenever it is
asked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.models.block_calls import replaced_forwards
from quantkit.models.families import decoder_blocks
from quantkit.models.logits import log_probabilities
from quantkit.progress import say, track


class Target:
    """The original model's log-probabilities of windows [n, seq_len] of token ids.

    The last block's outputs may be held, [n, seq_len, hidden_size] fp32 on the model's device: logits of all windows
    would take vocabulary / hidden_size times as much.
    """

    def __init__(self, original: Any, windows: Tensor, at_once: int, *, held: bool):
        """at_once: windows that the blocks read at a time. held: whether they read all windows now, or those that are
        asked for each time."""
        self._original, self._windows = original, windows
        self._blocks = [block for _, block in decoder_blocks(original)]
        self._rest: tuple[Any, ...] | None = None
        self._states: Tensor | None = None
        if held:
            self._states = self._held_states(at_once)
        else:
            say("original model: states of all windows are too large to hold, so it reads each step's windows again")

    @torch.no_grad()
    def log_probabilities(self, numbers: Tensor) -> Tensor:
        """Of the windows of these numbers [b]: [b * seq_len, vocabulary] fp32."""
        if self._states is None:
            return log_probabilities(self._original, self._windows[numbers])
        states = self._states[numbers]
        answer = states if self._rest is None else (states, *self._rest)
        with replaced_forwards(self._blocks, [lambda *_arguments, **_keywords: answer] * len(self._blocks)):
            return log_probabilities(self._original, self._windows[numbers])

    def _held_states(self, at_once: int) -> Tensor:
        """Of all windows, in a tensor that is made once: two of that size may not fit."""
        held: Tensor | None = None
        for numbers in track(torch.arange(len(self._windows)).split(at_once), "original model"):
            first, states = int(numbers[0]), self._last_states(self._windows[numbers])
            if held is None:
                held = states.new_empty(len(self._windows), *states.shape[1:])
            held[first : first + len(states)] = states
        assert held is not None  # there are windows
        return held

    @torch.no_grad()
    def _last_states(self, windows: Tensor) -> Tensor:
        outputs: list[Any] = []
        handle = self._blocks[-1].register_forward_hook(lambda _block, _arguments, output: outputs.append(output))
        try:
            self._original(windows.to(next(self._original.parameters()).device, torch.long), use_cache=False)
        finally:
            handle.remove()
        (output,) = outputs
        if not isinstance(output, tuple):
            return output
        self._rest = output[1:]
        return output[0]
