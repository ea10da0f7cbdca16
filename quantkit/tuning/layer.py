"""A Linear in the ``bcq`` format whose stored values have gradients.

W = sum_i scales_i * signs_i + offset is linear in scales and offset, so their gradients are exact sums over a group.
Gradients pass straight through the rounding of scales (fp16, or codes of 8 bits) and the choice of codes (Bengio et al.
2013): the forward product is that of the values as they would be stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantkit.formats.base import PackedWeight
from quantkit.formats.bcq import BcqSpec, BcqTensors, group_width
from quantkit.formats.hadamard import rotate
from quantkit.formats.planes import pack_codes, unpack_codes
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.quantizers.bcq.levels import Coding
from quantkit.quantizers.bcq.scales import ScaleGrid
from quantkit.tuning.codes import gradients_of_groups, nearest_codes, weight_of
from quantkit.tuning.part import Straight, TunedPart

# How far a weight starts from the level of its code at most, as a share of the way to the border of the code's cell.
# Where compensation chose codes, originals often lie outside; from 0.98 a few steps take a weight over the border.
_INSIDE = 0.7


class TunedLinear(TunedPart):
    """y = x W^T + bias, W from ``scales``, ``offset`` and codes; with ``latent``, the codes nearest to it.

    scales: [q, N, G] fp32. offset: [N, G] fp32, or None where none is stored. latent: [N, K] fp32, or None for codes
    that stay. All before rounding. codes: [N, K] uint8.
    """

    codes: Tensor
    factors: Tensor | None

    def __init__(self, linear: QuantizedLinear, original: Tensor | None):
        """linear: in the ``bcq`` format. original: [N, K], the weight before quantization, for codes that are chosen
        again: each starts as it is, the nearer to the border of its cell the less the original agrees."""
        super().__init__(linear)
        stored = BcqTensors.of(linear.tensors)
        assert isinstance(linear.spec, BcqSpec)
        self.width = group_width(self.spec.group_size, self.shape[1])
        self.groups = stored.scales.shape[-1]
        factors = None if stored.scale_factors is None else stored.scale_factors.float()
        self.register_buffer("factors", factors, persistent=False)
        self.scales = nn.Parameter(stored.decoded_scales())
        offset = stored.decoded_offset()
        self.offset = None if offset is None else nn.Parameter(offset)
        self.register_buffer("codes", unpack_codes(stored.signs, self.shape[1]), persistent=False)
        if original is not None and linear.spec.rotate_inputs:
            original = rotate(original)
        self.latent = None if original is None else nn.Parameter(self._inside_cells(original))

    @property
    def grid(self) -> ScaleGrid:
        """What scales and offsets are rounded to."""
        return ScaleGrid(self.factors)

    def dequantize(self) -> Tensor:
        """The weight [N, K] fp32 of the values as they would be stored; W Q where inputs are rotated."""
        scales, offset = self._rounded()
        values = scales.detach(), offset.detach(), self.width
        if self.latent is None:
            exact = weight_of(self.codes, *values)
        else:
            self.codes, exact = nearest_codes(self.latent.detach(), *values)
        weight: Tensor = _Dequantize.apply(self.latent, scales, offset, self.codes, exact, self.width)
        return weight

    @torch.no_grad()
    def packed(self) -> PackedWeight:
        """The format's tensors of the values at hand; what is read back is what ``dequantize`` gave, bit for bit."""
        self.dequantize()
        scales, offset = self._rounded()
        signs = pack_codes(self.codes, self.spec.weight_bits)
        stored = self.grid.stored(signs, scales, offset if self.offset is not None else None)
        return PackedWeight(self.spec, self.shape, stored.named(), {})

    def _rounded(self) -> tuple[Tensor, Tensor]:
        """Scales and offset (zeros where none is stored) as they would be stored; gradients pass through."""
        scales = Straight.apply(self.scales, self.grid.round_scales(self.scales.detach()))
        if self.offset is None:
            return scales, torch.zeros_like(self.scales[0])
        return scales, Straight.apply(self.offset, self.grid.round_offset(self.offset.detach()))

    @torch.no_grad()
    def _inside_cells(self, original: Tensor) -> Tensor:
        """[N, K]: the original weights, moved into the cells of the codes as they are."""
        scales, offset = self._rounded()
        level = weight_of(self.codes, scales, offset, self.width)
        values, order = Coding(scales.flatten(1), offset.flatten()).levels().sort(dim=-1)
        middles = (values[:, 1:] + values[:, :-1]) / 2
        ends = torch.full_like(middles[:, :1], torch.inf)
        padded = nn.functional.pad(self.codes, (0, self.groups * self.width - self.shape[1]))
        rank = order.argsort(dim=-1).gather(-1, padded.view(-1, self.width).long())
        below, above = torch.cat([-ends, middles], dim=-1), torch.cat([middles, ends], dim=-1)
        low, high = (side.gather(-1, rank).view_as(padded)[:, : self.shape[1]] for side in (below, above))
        wanted = original.to(level)
        inside = torch.minimum(torch.maximum(wanted, level + (low - level) * _INSIDE), level + (high - level) * _INSIDE)
        return torch.where(inside.isfinite(), inside, wanted)


class _Dequantize(torch.autograd.Function):
    """The weight of codes; its gradient summed over groups for scales and offset, and passed on to the latent."""

    @staticmethod
    def forward(
        ctx: Any, _latent: Tensor | None, scales: Tensor, _offset: Tensor, codes: Tensor, weight: Tensor, width: int
    ) -> Tensor:
        ctx.save_for_backward(codes)
        ctx.bits, ctx.width = len(scales), width
        return weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (codes,) = ctx.saved_tensors
        scales, offset = gradients_of_groups(gradients[0], codes, ctx.bits, ctx.width)
        return gradients[0] if ctx.needs_input_grad[0] else None, scales, offset, None, None, None
