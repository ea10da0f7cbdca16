"""Random bcq weights shared by the tests of the bcq ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.formats.bcq import BcqTensors, dequantize_stored, group_count
from quantkit.formats.planes import pack_bits
from quantkit.ops.bcq.instances import SOURCES
from quantkit.ops.bcq.layout import BcqTiles, tile
from quantkit.ops.bcq.order import Order

BINARY, INT8, LEVEL, LUT, GEMM_MMA, GEMM, DEQUANTIZE = SOURCES
KERNELS = (BINARY, INT8, LUT, GEMM, DEQUANTIZE)
"""Those of Hopper for the order for latency."""


def weight_case(bits: int, n: int, k: int, group_size: int) -> Any:
    """A row of a parametrized test of (bits, n, k, group_size)."""
    return pytest.param(bits, n, k, group_size, id=f"q{bits}-{n}x{k}-g{group_size}")


ODD_WEIGHTS = [
    weight_case(1, 257, 1000, 32),
    weight_case(2, 130, 777, 96),
    weight_case(3, 1000, 1536, 64),
    weight_case(4, 96, 256, 128),
    weight_case(4, 2064, 4608, -1),
    weight_case(5, 320, 1280, 128),
    weight_case(6, 40, 2304, 256),
    weight_case(7, 200, 1000, 64),
    weight_case(8, 72, 3000, 32),
]
"""Tiles cut off in N and K, short last groups, one tile, K too long for few stages."""
ODD_GRIDS = [
    weight_case(4, 257, 1000, 32),
    weight_case(4, 130, 777, 96),
    weight_case(4, 1000, 1536, 64),
    weight_case(4, 96, 256, 128),
    weight_case(4, 2064, 4608, -1),
    weight_case(4, 72, 3000, 256),
    weight_case(2, 257, 1000, 32),
    weight_case(2, 130, 777, 384),
    weight_case(2, 1000, 1536, 64),
    weight_case(2, 96, 256, 128),
    weight_case(2, 2064, 4608, -1),
    weight_case(5, 257, 1000, 32),
    weight_case(5, 320, 1280, 128),
    weight_case(6, 130, 777, 384),
    weight_case(6, 1000, 1536, 64),
    weight_case(7, 200, 1000, 128),
    weight_case(8, 257, 1000, 32),
    weight_case(8, 2064, 4608, -1),
]
"""The same of weights in equal steps."""


@dataclass(frozen=True)
class BcqWeight:
    stored: BcqTensors
    group_size: int
    in_features: int

    @property
    def out_features(self) -> int:
        return self.stored.signs.shape[1]

    def to(self, device: torch.device) -> BcqWeight:
        moved = {name: tensor.to(device) for name, tensor in self.stored.named().items()}
        return BcqWeight(BcqTensors.of(moved), self.group_size, self.in_features)

    def tiled(self, order: Order = Order.PLANES) -> BcqTiles:
        return tile(self.stored, self.in_features, self.group_size, order=order)

    def dequantized(self) -> Tensor:
        """[N, K] fp64."""
        return dequantize_stored(self.stored, self.in_features, self.group_size).double()


def random_weight(
    bits: int, n: int, k: int, group_size: int, *, offset: bool, scale_bits: int = 16, equal_steps: bool = False
) -> BcqWeight:
    """equal_steps: with the levels of a grid, fp16 scales only."""
    groups = group_count(group_size, k)
    signs = pack_bits(torch.randint(0, 2, (bits, n, k)))
    scales = torch.rand(bits, n, groups) * 0.02 + 0.001
    if equal_steps:
        scales = (scales[:1] / 8).half() * 2.0 ** torch.arange(bits).view(-1, 1, 1)
    constant = torch.randn(n, groups) * 0.01
    if scale_bits == 16:
        stored = BcqTensors(signs, scales.half(), constant.half() if offset else None)
    else:
        codes, shifts = torch.randint(0, 256, scales.shape), torch.randint(-128, 128, constant.shape)
        factors = (torch.rand(n, 1) * 8e-5 + 1e-5).half()
        stored = BcqTensors(signs, codes.to(torch.uint8), shifts.to(torch.int8) if offset else None, factors)
    return BcqWeight(stored, group_size, k)


def linear_arguments(weight: BcqWeight, bias: Tensor | None) -> tuple[Tensor | int | None, ...]:
    """What bcq_linear takes after x."""
    stored = weight.stored
    return stored.signs, stored.scales, stored.offset, bias, weight.group_size, stored.scale_factors


def prepared_arguments(
    tiles: BcqTiles, bias: Tensor | None, kernel: str = "auto"
) -> tuple[Tensor | int | str | bool | None, ...]:
    """What bcq_linear_prepared takes after x."""
    return tiles.tiles, tiles.scale_tiles, bias, tiles.out_features, tiles.group_size, kernel, False, tiles.factor_tiles
