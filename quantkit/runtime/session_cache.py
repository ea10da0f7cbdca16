"""The static KV cache of some prompts that are continued at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from quantkit.errors import GenerationError

_STEP = 64  # attention kernels want the mask aligned; others copy it in every layer


class SessionCache(StaticCache):
    """A cache of the model for ``needed`` tokens or some more, ``capacity``.

    padded: whether some of the prompts' ids stand for no token, so that a mask says what is seen. together: layers of
    equal keys and values whose memory is one piece. Within a sliding window nothing slides, so a layer that has one
    keeps its tokens like any other. What layers count their tokens in stands on the device from the start: moving it
    there layer by layer, while the prompt runs, would wait for the GPU each time.
    Raises GenerationError where the tokens do not fit the window.
    """

    layers: list[Any]

    def __init__(self, model: Any, needed: int, device: torch.device, *, padded: bool, together: Sequence[int]):
        self.capacity, self.padded, self._together = -(-needed // _STEP) * _STEP, padded, together
        super().__init__(config=model.config, max_cache_len=self.capacity)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, StaticSlidingWindowLayer):
                window = layer.max_cache_len
                if window < needed:
                    raise GenerationError(
                        f"{needed} tokens of prompt and answer exceed the model's sliding window of {window}"
                    )
                self.layers[index] = StaticLayer(max_cache_len=self.capacity)
        counts = torch.zeros(len(self.layers), dtype=torch.long, device=device)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, StaticLayer):
                layer.cumulative_length = counts[index]

    def layer(self, index: int, key: Tensor) -> Any:
        """One of the layers that go together, with room for keys and values like ``key`` [B, Hkv, M, D]."""
        if not self.layers[index].is_initialized:
            self._make_room(key)
        return self.layers[index]

    def _make_room(self, key: Tensor) -> None:
        sequences, heads, _, head_dim = key.shape
        shape = (2, len(self._together), sequences, heads, self.capacity, head_dim)
        rooms = torch.zeros(shape, dtype=key.dtype, device=key.device)
        for index, keys, values in zip(self._together, *rooms, strict=True):
            layer = self.layers[index]
            layer.keys, layer.values, layer.dtype, layer.device = keys, values, key.dtype, key.device
            layer.is_initialized = True
