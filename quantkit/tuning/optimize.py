"""One loop for both stages: Adam on what is stored, a held-out loss after every pass, the best pass kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import StatsError
from quantkit.progress import say, track
from quantkit.tuning.part import TunedPart, holding
from quantkit.tuning.settings import TuneSettings
from quantkit.tuning.steps import Objective, Steps

FP32 = 4  # bytes
HIDDEN_COPIES = 40
"""Of a block's hidden state, that its graph holds."""
LOGIT_COPIES = 6
"""Of the predictions of both models, as logarithms, and gradients."""


def divergence(found: Tensor, wanted: Tensor) -> Tensor:
    """KL(wanted || found) in nats per token of log-probabilities [tokens, vocabulary]."""
    return nn.functional.kl_div(found, wanted, log_target=True, reduction="sum") / len(found)


@dataclass(frozen=True)
class TuneReport:
    """before, after: held-out loss. seen: after, of as many windows that were tuned on; far below it where passes were
    too many for so few windows. kept: the pass that was kept, 0 for the start. passes: held-out loss after each."""

    before: float
    after: float
    seen: float
    kept: int
    passes: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """As quantkit.json holds it."""
        return asdict(self)


def split_windows(count: int, held_out: float) -> tuple[Tensor, Tensor]:
    """(numbers to tune on, numbers held out): the last share of the windows, at least one of each.

    Raises StatsError for fewer than two windows.
    """
    if count < 2:
        raise StatsError("tuning holds windows of the calibration text out; calibrate with 2 windows or more")
    kept = min(max(1, round(count * held_out)), count - 1)
    numbers = torch.arange(count)
    return numbers[:-kept], numbers[-kept:]


def tune(
    parts: Sequence[TunedPart], others: Sequence[nn.Parameter], objective: Objective, settings: TuneSettings
) -> TuneReport:
    """Tune the parts and the other parameters in place; ends with the pass of least held-out loss.

    Raises StatsError for a loss that is not finite at the start.
    """
    used, held_out = split_windows(objective.windows, settings.held_out)
    held_out = held_out.to(objective.device)
    state = _State(parts, others, objective.dtype)
    steps = Steps(parts, others, objective, settings, settings.epochs * -(-len(used) // settings.batch))
    generator = torch.Generator().manual_seed(settings.seed)
    best, least, kept = state.rounded(), state.stored_loss(objective, held_out), 0
    if not math.isfinite(least):
        raise StatsError(f"tuning: the held-out loss of the {objective.of} is not finite")
    passes = [least]
    for epoch in range(1, settings.epochs + 1):
        order = used[torch.randperm(len(used), generator=generator)].to(objective.device)
        batches = order.split(settings.batch)
        for batch in track(batches, f"tuning, pass {epoch} of {settings.epochs}") if objective.shown else batches:
            steps.take(batch)
        passes.append(state.stored_loss(objective, held_out))
        if objective.shown:
            say(f"pass {epoch} of {settings.epochs}: held-out loss {passes[-1]:.4g}, least before {least:.4g}")
        if passes[-1] < least:
            best, least, kept = state.rounded(), passes[-1], epoch
    state.load(best)
    seen = state.stored_loss(objective, used[-len(held_out) :].to(objective.device))
    return TuneReport(passes[0], least, seen, kept, tuple(passes[1:]))


class _State:
    """The values that are tuned, and the stored ones that they stand for."""

    def __init__(self, parts: Sequence[TunedPart], others: Sequence[nn.Parameter], dtype: torch.dtype):
        self._parts = parts
        self._floating = [*others, *(part.bias for part in parts if part.bias is not None)]
        self._rest = [value for part in parts for value in part.values]
        self._dtype = dtype

    @torch.no_grad()
    def rounded(self) -> list[Tensor]:
        """Copies of all values; those stored in ``dtype`` rounded to it. Linears round theirs when they multiply."""
        return [*self._rounded_floating(), *(p.clone() for p in self._rest)]

    @torch.no_grad()
    def load(self, values: list[Tensor]) -> None:
        """Take the values on."""
        for parameter, value in zip([*self._floating, *self._rest], values, strict=True):
            parameter.copy_(value)

    @torch.no_grad()
    def stored_loss(self, objective: Objective, numbers: Tensor) -> float:
        """The mean loss of windows, with the values as they would be stored."""
        exact = [p.clone() for p in self._floating]
        for parameter, value in zip(self._floating, self._rounded_floating(), strict=True):
            parameter.copy_(value)
        with holding(self._parts, [part.expanded() for part in self._parts]):
            total = sum(objective.loss(part).item() * len(part) for part in numbers.split(objective.at_once))
        for parameter, value in zip(self._floating, exact, strict=True):
            parameter.copy_(value)
        return total / len(numbers)

    def _rounded_floating(self) -> list[Tensor]:
        return [p.to(self._dtype).to(p.dtype).clone() for p in self._floating]
