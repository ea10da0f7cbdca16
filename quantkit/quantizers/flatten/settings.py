"""The settings of method ``flatten``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quantkit.errors import RecipeError
from quantkit.formats.flatten import COLUMN_STEP, FLATTEN_BITS
from quantkit.quantizers.base import AUTO, check_rotate
from quantkit.quantizers.flatten.bit_selection import KL_BINS, KL_COMBINES
from quantkit.quantizers.flatten.smoothing import SMOOTHINGS
from quantkit.quantizers.gptq import GptqOptions


@dataclass(frozen=True)
class FlattenSettings:
    """bits: 4, 8, or "mixed" (chosen per layer by Eq 8).
    flatten: cut outlier channels over extra columns; false: plain per-tensor absmax quantization.
    rotate, rotate_inputs: as for bcq: rotated inputs have no large channels. One that is rotated as the model runs is
        not smoothed. rotate_inputs: auto rotates that of the last Linear of a gated FFN, behind its smoothing, where
        this costs less by error and ``column_price``; and no other.
    smoothing: sigmoid (Eq 5), smoothquant (Xiao et al. 2023) or none. smoothing_strength: alpha.
    smooth_unfed: also smooth, at run time, layers that no norm or linear feeds; false leaves them alone.
    smooth_linears: fold into feeding linears too, not only into norms. bound_linears: s never makes the largest weight
        of such a linear larger, as its own codes have one scale.
    threshold_multiplier: beta, Eq 7. outlier_clip: the boxplot of Eq 6.
    max_flatten_ratio: extra columns per input channel at most; above it thresholds are raised or tails clamped, by
        calibration error.
    column_price: choose both thresholds, as multiples of Eq 7's, by the root of the output error plus this much per
        extra column (K of them count as 1); 0: the thresholds of Eq 7 as they are.
    few_columns: also try thresholds so far above Eq 7's that a single channel is cut; for a high column_price.
    cover_vocabulary: slices reach as far as any token of the vocabulary did, not only the calibration text.
    headroom: they reach this many times as far.
    longer_text: a channel has one slice more where a text of this many times the calibration's tokens is expected to
        reach beyond its last (LayerStats.growth); 1: none. Not of rotated inputs, which spread what is large.
    row_scales: every row of W has a scale of its own, and no channel of W is cut.
    clip: choose the input's threshold and slices by the output error on the calibration sample, clamp what is beyond;
        behind a prefix.
    pad_channels_to: K_ext is a multiple of this.
    kl_ratio_limit: gamma, Eq 8. kl_combine: mean, max, activation or weight. kl_bins: histogram bins.
    gptq, act_order, damping: GPTQ on the flattened weight.
    """

    bits: int | str = 8
    flatten: bool = True
    rotate: bool | str = False
    rotate_inputs: bool | str = False
    smoothing: str = "sigmoid"
    smoothing_strength: float = 0.5
    smooth_unfed: bool = True
    smooth_linears: bool = True
    bound_linears: bool = False
    threshold_multiplier: float = 1.3
    outlier_clip: bool = True
    max_flatten_ratio: float = 1.0
    column_price: float = 0.0
    few_columns: bool = False
    cover_vocabulary: bool = False
    headroom: float = 1.0
    longer_text: float = 1.0
    row_scales: bool = False
    clip: bool = False
    pad_channels_to: int = COLUMN_STEP
    kl_ratio_limit: float = 1.86
    kl_combine: str = "mean"
    kl_bins: int = KL_BINS
    gptq: bool = False
    act_order: bool = False
    damping: float = 0.01

    def __post_init__(self) -> None:
        _among("bits", self.bits, (*FLATTEN_BITS, "mixed"))
        _among("smoothing", self.smoothing, SMOOTHINGS)
        _among("kl_combine", self.kl_combine, KL_COMBINES)
        check_rotate(self.rotate)
        if self.rotate_inputs not in (False, True, AUTO):
            raise RecipeError(f"rotate_inputs is {self.rotate_inputs!r}; choose true, false or {AUTO}")
        if not 0 <= self.smoothing_strength <= 1:
            raise RecipeError(f"smoothing_strength is {self.smoothing_strength}; choose 0 to 1")
        if self.threshold_multiplier <= 0:
            raise RecipeError(f"threshold_multiplier is {self.threshold_multiplier}; choose a factor above 0")
        if self.max_flatten_ratio < 0:
            raise RecipeError(f"max_flatten_ratio is {self.max_flatten_ratio}; choose 0 or more")
        if self.headroom < 1:
            raise RecipeError(f"headroom is {self.headroom}; choose a factor of 1 or more")
        if self.longer_text < 1:
            raise RecipeError(f"longer_text is {self.longer_text}; choose a factor of 1 or more")
        if self.column_price < 0:
            raise RecipeError(f"column_price is {self.column_price}; choose 0 or more")
        if self.pad_channels_to <= 0 or self.pad_channels_to % COLUMN_STEP:
            raise RecipeError(f"pad_channels_to is {self.pad_channels_to}; choose a multiple of {COLUMN_STEP}")
        if self.kl_bins < 2:
            raise RecipeError(f"kl_bins is {self.kl_bins}; choose 2 or more")
        GptqOptions(self.damping, self.act_order)


def _among(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise RecipeError(f"{name} is {value!r}; choose {', '.join(str(choice) for choice in choices)}")
