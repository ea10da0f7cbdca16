"""Random bcq weights shared by the tests of the bcq ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.formats.bcq import dequantize_planes, group_count
from quantkit.formats.planes import pack_bits
from quantkit.ops.bcq_tiles import tile_scales, tile_signs


@dataclass(frozen=True)
class BcqWeight:
    signs: Tensor
    scales: Tensor
    offset: Tensor | None
    group_size: int
    columns: int

    @property
    def rows(self) -> int:
        return self.signs.shape[1]

    def to(self, device: torch.device) -> BcqWeight:
        offset = None if self.offset is None else self.offset.to(device)
        return BcqWeight(self.signs.to(device), self.scales.to(device), offset, self.group_size, self.columns)

    def tiled(self) -> tuple[Tensor, Tensor]:
        return tile_signs(self.signs), tile_scales(self.scales, self.offset, self.group_size, self.columns)

    def dequantized(self) -> Tensor:
        """[N, K] fp64."""
        weight = dequantize_planes(self.signs, self.scales, self.offset, self.columns, self.group_size)
        return weight.double()


def random_weight(bits: int, rows: int, columns: int, group_size: int, *, offset: bool) -> BcqWeight:
    groups = group_count(group_size, columns)
    signs = pack_bits(torch.randint(0, 2, (bits, rows, columns)))
    scales = (torch.rand(bits, rows, groups) * 0.02 + 0.001).half()
    constant = (torch.randn(rows, groups) * 0.01).half() if offset else None
    return BcqWeight(signs, scales, constant, group_size, columns)
