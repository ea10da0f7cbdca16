"""Round-to-nearest on a uniform grid per group, stored as bit planes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import RecipeError
from quantkit.formats.base import PackedWeight, Shape
from quantkit.formats.bcq import CODE_BITS, BcqSpec, check_group_size, check_scale_bits, check_weight_bits
from quantkit.formats.hadamard import block_width
from quantkit.quantizers.base import ACTIVATIONS, ONLINE, LayerInput, check_hessian_kind, check_rotate
from quantkit.quantizers.bcq.coding import CodeShape, code_groups
from quantkit.quantizers.bcq.compensation import compensate
from quantkit.quantizers.bcq.groups import SMALLEST_SCALE, weighted_error
from quantkit.quantizers.gptq import GptqOptions
from quantkit.quantizers.rotated_inputs import quantize_rotated

# Shrink factors of a group's range that the clip search tries. 1 bit wants about 0.3 of a Gaussian's range.
CLIPS, CLIP_STEPS = 31, 40
_CLIP_RATIOS = tuple(1.0 - i / CLIP_STEPS for i in range(CLIPS))
_ZEROS = ("free", "integer")
_HALF_DIGITS = 11  # significant bits of fp16


@dataclass(frozen=True)
class RtnSettings:
    """weight_bits: 1-8. group_size: columns per grid, -1 for the row. clip: search the range of least squared error
    (weighted by E[x^2] with a calibration artifact) instead of taking minimum and maximum. compensate: GPTQ, each
    column's error moved to the columns behind it, grids fitted per group on the way. damping: share of each diagonal
    element of E[x x^T] added to it. scale_bits: 16, or 8 for scales and offsets as codes with a factor per row; each
    plane's scale is then rounded by itself. zero: free, the middle of the range, or integer, a whole number of steps
    from 0, as other engines store it (exchange/). rotate, rotate_inputs, hessian: as for bcq."""

    weight_bits: int = 4
    group_size: int = 128
    clip: bool = True
    compensate: bool = False
    damping: float = 0.5
    scale_bits: int = 16
    zero: str = "free"
    rotate: bool | str = False
    rotate_inputs: bool = False
    hessian: str = ACTIVATIONS

    def __post_init__(self) -> None:
        check_weight_bits(self.weight_bits)
        check_group_size(self.group_size)
        check_scale_bits(self.scale_bits)
        if self.zero not in _ZEROS:
            raise RecipeError(f"zero is {self.zero!r}; choose {' or '.join(_ZEROS)}")
        if self.zero == "integer" and self.scale_bits == CODE_BITS:
            raise RecipeError("zero: integer needs scale_bits: 16; codes of scales are no uniform grid")
        if self.zero == "integer" and (self.rotate_inputs or self.rotate == ONLINE):
            raise RecipeError("zero: integer is for export, which takes no rotated inputs; set zero=free")
        check_rotate(self.rotate)
        check_hessian_kind(self.hessian, used=self.compensate)
        GptqOptions(damping=self.damping)


def stored_specs(settings: RtnSettings, shape: Shape) -> tuple[BcqSpec]:
    """What these settings store a weight as. Raises RecipeError for inputs that cannot be rotated."""
    if settings.rotate_inputs:
        block_width(shape[1])
    return (BcqSpec(settings.weight_bits, settings.group_size, True, settings.scale_bits, settings.rotate_inputs),)


def needs_hessian(settings: RtnSettings) -> bool:
    """Whether quantize wants LayerInput.hessian."""
    return settings.compensate


@dataclass(frozen=True)
class UniformGrid:
    """Levels half_step * (2 code - (2**bits - 1)) + offset, per group; both [G] fp32 holding fp16 values.

    half_step is the scale of the lowest bit plane: plane i has scale half_step * 2**i, an exact conversion.
    """

    half_step: Tensor
    offset: Tensor
    bits: int

    def round(self, values: Tensor) -> Tensor:
        """Codes [G, g] uint8 of the levels nearest to values [G, g]."""
        top = 2**self.bits - 1
        codes = (values - self.offset[:, None]).mul_((0.5 / self.half_step)[:, None]).add_(top / 2)
        return codes.round_().clamp_(0, top).to(torch.uint8)

    def levels(self, codes: Tensor) -> Tensor:
        """Values [G, g] fp32 of codes [G, g]."""
        top = 2**self.bits - 1
        return (codes.float() * 2 - top).mul_(self.half_step[:, None]).add_(self.offset[:, None])

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and levels, [G, g] each, nearest to values [G, g]."""
        codes = self.round(values)
        return codes, self.levels(codes)

    @property
    def scales(self) -> Tensor:
        """The grid as binary-coding scales [bits, G] fp32."""
        return torch.stack([self.half_step * 2.0**i for i in range(self.bits)])


def fit_uniform(values: Tensor, importance: Tensor, bits: int, *, symmetric: bool, clip: bool) -> UniformGrid:
    """The uniform grid of each group with the least weighted squared error over the tried clip ratios.

    values, importance: [G, g] fp32. symmetric: levels mirrored at 0 (offset 0), none of them 0.
    """
    if symmetric:
        high = values.abs().amax(dim=-1)
        low = -high
    else:
        high, low = values.amax(dim=-1), values.amin(dim=-1)
    offset = ((high + low) / 2).half().float()
    best = UniformGrid(_half_step(high - low, bits), offset, bits)
    if not clip:
        return best
    least = weighted_error(best.levels(best.round(values)), values, importance)
    half_step = best.half_step
    for ratio in _CLIP_RATIOS[1:]:
        grid = UniformGrid(_half_step((high - low) * ratio, bits), offset, bits)
        error = weighted_error(grid.levels(grid.round(values)), values, importance)
        better = error < least
        least = torch.where(better, error, least)
        half_step = torch.where(better, grid.half_step, half_step)
    return UniformGrid(half_step, offset, bits)


def fit_integer_zero(values: Tensor, importance: Tensor, bits: int, *, clip: bool) -> UniformGrid:
    """As fit_uniform, of grids that hold 0 as a level: offset = (2**bits - 1 - 2 zero) * half_step, zero an integer.

    The product is exact in fp16: half_step keeps as few bits as that takes, 10 where zero is next to the middle.
    """
    low, high = values.amin(dim=-1).clamp_max(0), values.amax(dim=-1).clamp_min(0)
    best = _integer_zero(low, high, bits)
    least = weighted_error(best.levels(best.round(values)), values, importance)
    for ratio in _CLIP_RATIOS[1:] if clip else ():
        grid = _integer_zero(low * ratio, high * ratio, bits)
        error = weighted_error(grid.levels(grid.round(values)), values, importance)
        better = error < least
        least = torch.where(better, error, least)
        best = UniformGrid(
            torch.where(better, grid.half_step, best.half_step), torch.where(better, grid.offset, best.offset), bits
        )
    return best


def _integer_zero(low: Tensor, high: Tensor, bits: int) -> UniformGrid:
    top = 2**bits - 1
    half_step = _half_step(high - low, bits)
    zero = (-low / (2 * half_step)).round_().clamp_(0, top)
    odd = top - 2 * zero
    _, digits = torch.frexp(odd)  # bits of the integer
    mantissa, exponent = torch.frexp(half_step)
    scale = 2.0 ** (_HALF_DIGITS - digits)
    half_step = torch.ldexp((mantissa * scale).round_() / scale, exponent).half().float().clamp_min(SMALLEST_SCALE)
    return UniformGrid(half_step, odd * half_step, bits)


def _half_step(width: Tensor, bits: int) -> Tensor:
    return (width / (2 * (2**bits - 1))).half().float().clamp_min(SMALLEST_SCALE)


def quantize(layer: LayerInput, settings: RtnSettings) -> PackedWeight:
    """Round each group to the nearest levels of its own uniform grid; the offset is stored per group.

    Raises StatsError naming the layer where compensation meets a Hessian that cannot be inverted.
    """
    if settings.rotate_inputs:
        return quantize_rotated(layer, settings, quantize)

    def fit(values: Tensor, importance: Tensor) -> UniformGrid:
        if settings.zero == "integer":
            return fit_integer_zero(values, importance, settings.weight_bits, clip=settings.clip)
        return fit_uniform(values, importance, settings.weight_bits, symmetric=False, clip=settings.clip)

    shape = CodeShape(settings.weight_bits, settings.group_size, settings.scale_bits)
    if settings.compensate:
        coding, _ = compensate(layer, shape, fit, damping=settings.damping)
    else:
        coding = code_groups(layer.weight, layer.importance(), shape, fit)
    return coding.pack(layer, shape, offset=True)
