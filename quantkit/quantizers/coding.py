"""Group-wise codes of a weight: fitted levels per group, the code of every weight, and the packed result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantkit.formats.base import PackedWeight
from quantkit.formats.bcq import FORMAT, BcqSpec, dequantize_planes, group_count, group_width
from quantkit.formats.planes import pack_codes
from quantkit.quantizers.base import LayerInput, error_report
from quantkit.quantizers.groups import group_batches


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
class GroupCodes:
    """codes [N, K] uint8, scales [bits, N, G] fp16, offset [N, G] fp16; groups of ``width`` columns."""

    codes: Tensor
    scales: Tensor
    offset: Tensor
    width: int

    @property
    def bits(self) -> int:
        """Planes per weight."""
        return self.scales.shape[0]

    @classmethod
    def empty(cls, weight: Tensor, group_size: int, bits: int) -> GroupCodes:
        """Room for the codes of a weight [N, K], on its device."""
        rows, columns = weight.shape
        groups, device = group_count(group_size, columns), weight.device
        return cls(
            torch.empty(rows, columns, dtype=torch.uint8, device=device),
            torch.empty(bits, rows, groups, dtype=torch.float16, device=device),
            torch.empty(rows, groups, dtype=torch.float16, device=device),
            group_width(group_size, columns),
        )

    def dequantize(self) -> Tensor:
        """[N, K] fp32."""
        signs = pack_codes(self.codes, self.bits)
        return dequantize_planes(signs, self.scales, self.offset, self.codes.shape[1], self.width)

    def pack(self, layer: LayerInput, group_size: int, *, offset: bool) -> PackedWeight:
        """The ``bcq`` format's tensors, with the error they leave; the offset is 0 where none is stored."""
        spec = BcqSpec(weight_bits=self.bits, group_size=group_size, offset=offset)
        tensors = {"signs": pack_codes(self.codes, self.bits), "scales": self.scales}
        if offset:
            tensors["offset"] = self.offset
        shape = (self.codes.shape[0], self.codes.shape[1])
        return PackedWeight(spec, shape, tensors, error_report(layer, FORMAT.dequantize(spec, tensors, shape)))


def code_groups(weight: Tensor, importance: Tensor, group_size: int, bits: int, fit: FitGroup) -> GroupCodes:
    """Code every group of a weight [N, K] by itself; importance [K] weighs the squared error."""
    coding = GroupCodes.empty(weight, group_size, bits)
    for span, values, weights in group_batches(weight, importance, group_size):
        coder = fit(values, weights)
        span.put(coding.codes, coder.encode(values)[0])
        span.put_groups(coding.scales, coder.scales)
        span.put_groups(coding.offset, coder.offset)
    return coding
