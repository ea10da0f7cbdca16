"""Smoothing: moving large activation channels into the weight, x diag(s)^-1 and diag(s) W (FlattenQuant Eq 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quantkit.errors import StatsError
from quantkit.models.families import decoder_blocks, feeds_of, linear_weight
from quantkit.models.structure import LINEAR_TYPES
from quantkit.quantizers.base import Transformed

SMOOTHINGS = ("sigmoid", "smoothquant", "none")


def _standard(absmax: Tensor) -> Tensor:
    """Channel maxima minus their mean, in population standard deviations; 0 where all are equal."""
    spread = absmax.std(correction=0)
    return (absmax - absmax.mean()) / spread if spread > 0 else torch.zeros_like(absmax)


def sigmoid_scale(act_absmax: Tensor, weight_absmax: Tensor, strength: float) -> Tensor:
    """s_j = sigmoid(z(max|X_j|))^alpha / sigmoid(z(max|W_j|))^(1 - alpha) (Eq 5).

    act_absmax, weight_absmax: [K], max per input channel. strength: alpha in 0..1. Returns s [K] fp32 > 0.
    Deviation: Eq 5 prints one mu and one sigma, defined on X, for both operands; here each operand is standardized
    by its own mean and deviation. The units of W are not those of X: with X's mean, every z(W) is the same constant.
    """
    acts = torch.sigmoid(_standard(act_absmax.float())).pow(strength)
    return acts / torch.sigmoid(_standard(weight_absmax.float())).pow(1 - strength)


_SMALLEST = 1e-5  # SmoothQuant's own floor under the maxima


def smoothquant_scale(act_absmax: Tensor, weight_absmax: Tensor, strength: float) -> Tensor:
    """s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), Xiao et al. 2023, Eq 4; arguments as in sigmoid_scale."""
    acts = act_absmax.float().clamp_min(_SMALLEST).pow(strength)
    return (acts / weight_absmax.float().clamp_min(_SMALLEST).pow(1 - strength)).clamp_min(_SMALLEST)


SCALES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "sigmoid": sigmoid_scale,
    "smoothquant": smoothquant_scale,
}


def bounded_scale(scale: Tensor, source: Tensor) -> Tensor:
    """s [K] with a median of 1 and so large that W / s has no larger weight than W: source [K, M], a row per channel.

    A factor of all of s is free: it moves from one scale per tensor to the other. Where a channel is hardly used and
    its weights are large, s is small, and one row of W / s then sets the step of all others.
    """
    absmax = source.abs().amax(dim=1).to(scale)
    return (scale / scale.median()).maximum(absmax / absmax.max().clamp_min(_SMALLEST))


class Smoothing(Protocol):
    """The settings that folding reads; those of every method that smooths."""

    @property
    def smoothing(self) -> str: ...
    @property
    def smoothing_strength(self) -> float: ...
    @property
    def rotate_inputs(self) -> bool | str: ...
    @property
    def smooth_linears(self) -> bool: ...
    @property
    def bound_linears(self) -> bool: ...


@torch.no_grad()
def fold_smoothing(model: nn.Module, plans: Mapping[str, Any], calibration: Any) -> Transformed:
    """Fold Eq 5 into the norms and linears that feed the planned layers; the model's function stays the same.

    plans: LayerPlan by module name, the settings being Smoothing. calibration: the artifact; layers[name].absmax.
    A feed is folded only where every layer it feeds is planned with the same smoothing. Returns s per folded layer.
    Decoder blocks on the meta device are left for a later call.
    """
    scales: dict[str, Tensor] = {}
    sources = []
    for prefix, block in decoder_blocks(model):
        if next(block.parameters()).is_meta:
            continue
        for feed in feeds_of(model):
            targets = [f"{prefix}.{name}" for name in feed.targets]
            source = model.get_submodule(f"{prefix}.{feed.source}")
            settings = _shared_settings([plans[name].settings for name in targets if name in plans], len(targets))
            if settings is None or (isinstance(source, LINEAR_TYPES) and not settings.smooth_linears):
                continue
            weights = [linear_weight(model.get_submodule(name)) for name in targets]
            weight_absmax = torch.stack([weight.abs().amax(dim=0) for weight in weights]).amax(dim=0)
            act_absmax = calibration.layers[targets[0]].absmax.to(weight_absmax)
            if not torch.isfinite(act_absmax).all():
                raise StatsError(f"{targets[0]}: its input holds NaN or Inf on the calibration text")
            scale = SCALES[settings.smoothing](act_absmax, weight_absmax, settings.smoothing_strength)
            if isinstance(source, LINEAR_TYPES) and settings.bound_linears:
                scale = bounded_scale(scale, linear_weight(source))
            for weight in weights:
                weight.mul_(scale)
            _divide_outputs(source, scale)
            scales |= dict.fromkeys(targets, scale)
            sources.append(f"{prefix}.{feed.source}")
    return Transformed({"folded_into": sources}, scales)


def _shared_settings(settings: Sequence[Smoothing], targets: int) -> Smoothing | None:
    """The settings to fold with, or None where not all targets are planned, smoothed, and smoothed alike.

    An input that is rotated as the model runs is not smoothed: its large channels are spread over their block, and the
    scale would make rows of what feeds it large. Where that is chosen layer by layer, the scale is folded before.
    """
    if len(settings) < targets or settings[0].smoothing == "none" or any(s.rotate_inputs is True for s in settings):
        return None
    first = settings[0]
    alike = all(
        (s.smoothing, s.smoothing_strength, s.smooth_linears, s.bound_linears)
        == (first.smoothing, first.smoothing_strength, first.smooth_linears, first.bound_linears)
        for s in settings
    )
    return first if alike else None


def _divide_outputs(source: nn.Module, scale: Tensor) -> None:
    """Divide every output channel of a norm or linear by scale [channels], in place."""
    if isinstance(source, LINEAR_TYPES):
        linear_weight(source).div_(scale[:, None])
    else:
        weight = source.weight
        assert isinstance(weight, Tensor)
        weight.div_(scale)
    if isinstance(bias := getattr(source, "bias", None), Tensor):
        bias.div_(scale)
