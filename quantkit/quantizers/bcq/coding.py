"""Group-wise codes of a weight: fitted levels per group, the code of every weight, and the packed result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from quantkit.formats.base import PackedWeight
from quantkit.formats.bcq import CODE_BITS, FORMAT, BcqSpec, dequantize_planes, group_count, group_width
from quantkit.formats.planes import pack_codes
from quantkit.quantizers.base import LayerInput, error_report
from quantkit.quantizers.bcq.groups import group_batches
from quantkit.quantizers.bcq.levels import Coding
from quantkit.quantizers.bcq.scales import ScaleGrid, row_grid


class Coder(Protocol):
    """The levels of G groups, as the format stores them: scales [bits, G] fp32 and offset [G] fp32."""

    @property
    def scales(self) -> Tensor: ...

    @property
    def offset(self) -> Tensor: ...

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Values [G, g] -> codes [G, g] of the nearest levels, and those levels [G, g] fp32."""
        ...


FitGroup = Callable[[Tensor, Tensor], Coder]
"""(values [G, g], importance [G, g]) -> the levels of each group."""


@dataclass(frozen=True)
class CodeShape:
    """What a weight is coded as: q, columns per scale (-1: the row), bits per scale."""

    bits: int
    group_size: int
    scale_bits: int

    @property
    def coded_scales(self) -> bool:
        """Whether scales are 8-bit codes with a factor per row."""
        return self.scale_bits == CODE_BITS


@dataclass(frozen=True)
class GroupCodes:
    """codes [N, K] uint8, scales [bits, N, G] and offset [N, G] fp32 on ``grid``; groups of ``width`` columns."""

    codes: Tensor
    scales: Tensor
    offset: Tensor
    width: int
    grid: ScaleGrid

    @property
    def bits(self) -> int:
        """Planes per weight."""
        return self.scales.shape[0]

    @classmethod
    def empty(cls, weight: Tensor, shape: CodeShape, grid: ScaleGrid) -> GroupCodes:
        """Room for the codes of a weight [N, K], on its device."""
        rows, columns = weight.shape
        groups, device = group_count(shape.group_size, columns), weight.device
        return cls(
            torch.empty(rows, columns, dtype=torch.uint8, device=device),
            torch.empty(shape.bits, rows, groups, device=device),
            torch.empty(rows, groups, device=device),
            group_width(shape.group_size, columns),
            grid,
        )

    def dequantize(self) -> Tensor:
        """[N, K] fp32."""
        signs = pack_codes(self.codes, self.bits)
        return dequantize_planes(signs, self.scales, self.offset, self.codes.shape[1], self.width)

    def better_rows(self, loss: Tensor, other: GroupCodes, other_loss: Tensor) -> tuple[GroupCodes, Tensor]:
        """Row by row that of the two whose loss [N] is lower, and the lower losses."""
        better = other_loss < loss
        rows = better[:, None]
        merged = replace(
            self,
            codes=torch.where(rows, other.codes, self.codes),
            scales=torch.where(rows[None], other.scales, self.scales),
            offset=torch.where(rows, other.offset, self.offset),
        )
        return merged, torch.where(better, other_loss, loss)

    def pack(self, layer: LayerInput, shape: CodeShape, *, offset: bool) -> PackedWeight:
        """The ``bcq`` format's tensors, with the error they leave; the offset is 0 where none is stored."""
        spec = BcqSpec(self.bits, shape.group_size, offset, shape.scale_bits)
        signs = pack_codes(self.codes, self.bits)
        tensors = self.grid.stored(signs, self.scales, self.offset if offset else None).named()
        size = (self.codes.shape[0], self.codes.shape[1])
        return PackedWeight(spec, size, tensors, error_report(layer, FORMAT.dequantize(spec, tensors, size)))


def code_groups(weight: Tensor, importance: Tensor, shape: CodeShape, fit: FitGroup) -> GroupCodes:
    """Code every group of a weight [N, K] by itself; importance [K] weighs the squared error.

    With 8-bit scales the rows' factors follow from the fitted scales, and every weight then takes the level nearest
    to it among those of the rounded scales: no row is worse than with the signs that were fitted.
    """
    coding = GroupCodes.empty(weight, shape, ScaleGrid())
    for span, values, weights in group_batches(weight, importance, shape.group_size):
        coder = fit(values, weights)
        span.put(coding.codes, coder.encode(values)[0])
        span.put_groups(coding.scales, coder.scales)
        span.put_groups(coding.offset, coder.offset)
    if not shape.coded_scales:
        return coding
    masses = torch.stack([part.sum() for part in importance.split(coding.width)])
    grid = row_grid(coding.scales, coding.offset, masses)
    rounded = GroupCodes(
        coding.codes, grid.round_scales(coding.scales), grid.round_offset(coding.offset), coding.width, grid
    )
    for span, values, _ in group_batches(weight, importance, shape.group_size):
        levels = Coding(span.groups_of(rounded.scales), span.groups_of(rounded.offset))
        span.put(rounded.codes, levels.encode(values)[0])
    return rounded
