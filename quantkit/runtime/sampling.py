"""Drawing the next token from a model's logits, by transformers' own warpers and a generator of its own seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quantkit.errors import GenerationError

Draw = Callable[[Tensor], Tensor]
"""Logits [B, vocabulary] -> the next tokens [B, 1]."""


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 takes the most probable token. top_p: of the probability. top_k: tokens; 0 all. seed: of drawing.

    Raises GenerationError for values out of range, and for those that mean nothing without a temperature.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise GenerationError(f"`temperature` {self.temperature}: give 0 (no drawing) or a number above it")
        if not 0 < self.top_p <= 1:
            raise GenerationError(f"`top_p` {self.top_p}: give a share of the probability, above 0 and up to 1")
        if self.top_k < 0:
            raise GenerationError(f"`top_k` {self.top_k}: give a number of tokens, 0 for all")
        if not self.temperature and (self.top_p, self.top_k, self.seed) != (1.0, 0, None):
            raise GenerationError("`top_p`, `top_k` and `seed` are for drawing; give a `temperature` above 0 as well")


def drawer(sampling: Sampling, device: torch.device) -> Draw | None:
    """What draws by these settings; None where the most probable token is taken. The same seed draws the same."""
    if not sampling.temperature:
        return None
    warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    generator = torch.Generator(device).manual_seed(sampling.seed or 0)

    def draw(logits: Tensor) -> Tensor:
        none = torch.empty(len(logits), 0, dtype=torch.long, device=device)  # these warpers ask for no former tokens
        return torch.multinomial(warpers(none, logits.float()).softmax(-1), 1, generator=generator)

    return draw
