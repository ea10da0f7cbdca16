"""What stored scales and offsets may be: fp16 numbers, or 8-bit codes that count in a factor of their row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.formats.bcq import MOST_OFFSET_CODE, MOST_SCALE_CODE, BcqTensors
from quantkit.quantizers.bcq.groups import SMALLEST_SCALE

_SCALE_CODES, _OFFSET_CODES = (0, MOST_SCALE_CODE), (-MOST_OFFSET_CODE, MOST_OFFSET_CODE)
_LARGEST_FACTOR = 65504.0  # of fp16
# Factors that are tried, over the smallest that reaches all of a row's scales: the rounding errors of so few numbers
# are a matter of luck.
_STRETCHES = tuple(1.0 + 0.01 * i for i in range(16))


@dataclass(frozen=True)
class ScaleGrid:
    """factors: [N, 1] fp32 holding fp16 values, what the codes of a row count in; None for fp16 scales.

    Scales are [..., N, G], not negative where factors are given; offsets [N, G].
    """

    factors: Tensor | None = None

    def round_scales(self, scales: Tensor) -> Tensor:
        """The nearest scales that can be stored, fp32; those beyond a row's largest code become that."""
        return self._rounded(scales, _SCALE_CODES)

    def round_offset(self, offset: Tensor) -> Tensor:
        """The nearest offsets that can be stored, fp32; those beyond a row's largest code become that."""
        return self._rounded(offset, _OFFSET_CODES)

    def _rounded(self, values: Tensor, codes: tuple[int, int]) -> Tensor:
        if self.factors is None:
            return values.half().float()
        return _codes(values, self.factors, codes) * self.factors

    def stored(self, signs: Tensor, scales: Tensor, offset: Tensor | None) -> BcqTensors:
        """The format's tensors of scales and offset as ``round_scales`` and ``round_offset`` return them."""
        if self.factors is None:
            return BcqTensors(signs, scales.half(), None if offset is None else offset.half())
        return BcqTensors(
            signs,
            _codes(scales, self.factors, _SCALE_CODES).to(torch.uint8),
            None if offset is None else _codes(offset, self.factors, _OFFSET_CODES).to(torch.int8),
            self.factors.half(),
        )


def row_grid(scales: Tensor, offset: Tensor, importance: Tensor) -> ScaleGrid:
    """8-bit scales with the factors that lose least on these.

    scales: [bits, N, G]. offset: [N, G]. importance: [G], of the squared error of a group's scales.
    """
    reach = _reach(scales, offset)
    best = _representable(reach)
    least = torch.full_like(best, torch.inf)
    for stretch in _STRETCHES:
        factors = _representable(reach * stretch)
        grid = ScaleGrid(factors)
        error = (grid.round_scales(scales) - scales).square().sum(dim=0) + (grid.round_offset(offset) - offset).square()
        error = (error * importance).sum(dim=-1, keepdim=True)
        better = error < least
        best, least = torch.where(better, factors, best), torch.where(better, error, least)
    return ScaleGrid(best)


def roomy_grid(scales: Tensor, offset: Tensor, room: float) -> ScaleGrid:
    """8-bit scales that reach ``room`` times these, [bits, N, G], and offsets [N, G]: for scales not known yet."""
    return ScaleGrid(_representable(_reach(scales, offset) * room))


def _codes(values: Tensor, factors: Tensor, codes: tuple[int, int]) -> Tensor:
    return (values / factors).round_().clamp_(*codes)


def _reach(scales: Tensor, offset: Tensor) -> Tensor:
    """[N, 1]: the smallest factors whose codes reach every scale and offset of the row."""
    largest_scale = scales.amax(dim=(0, 2))[:, None] / _SCALE_CODES[1]
    return torch.maximum(largest_scale, offset.abs().amax(dim=1, keepdim=True) / _OFFSET_CODES[1])


def _representable(factors: Tensor) -> Tensor:
    """The next larger fp16 numbers, so that every code still reaches: the steps between denormal ones are wide."""
    wanted = factors.clamp(SMALLEST_SCALE, _LARGEST_FACTOR)
    nearest = wanted.half()
    above = (nearest.view(torch.int16) + 1).view(torch.float16)
    return torch.where(nearest < wanted, above, nearest).float()
