"""Embeddings disturbed at random: how far the last digits of fp32 move a figure of a model with INT8 activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

DISTURBANCE = 1e-6  # about eight times the rounding of fp32


@contextmanager
def disturbed(model: Any, seed: int | None) -> Iterator[None]:
    """While entered, what the embeddings [..., K] give is multiplied by 1 + DISTURBANCE * normal; as it is for None."""
    if seed is None:
        yield
        return
    draw = torch.Generator().manual_seed(seed)

    def disturb(_module: Any, _inputs: Any, x: Tensor) -> Tensor:
        return x * (1 + DISTURBANCE * torch.randn(x.shape, generator=draw))

    hook = model.get_input_embeddings().register_forward_hook(disturb)
    try:
        yield
    finally:
        hook.remove()
