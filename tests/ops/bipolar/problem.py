"""Seeded operands of a bipolar-INT product, for the tests of its kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats.bipolar import largest_value
from quantkit.formats.planes import pack_codes
from quantkit.ops.bipolar.launch import Activations, quantize_tiles
from quantkit.ops.bipolar.layout import plane_row_sums, tile_weight
from quantkit.ops.bipolar.op import bipolar_linear_reference, bipolar_prepared_linear


class Problem:
    """Seeded operands on both devices, and what the reference makes of them."""

    def __init__(self, shape: tuple[int, int, int], weight_bits: int, act_bits: int, dtype: torch.dtype):
        rows, channels, self.columns = shape
        self.name = f"w{weight_bits}a{act_bits} {rows}x{channels}x{self.columns}"
        self.weight_bits, self.act_bits = weight_bits, act_bits
        self.x = torch.randn(rows, self.columns).to(dtype)
        codes = torch.randint(0, 1 << weight_bits, (channels, self.columns), dtype=torch.uint8)
        self.planes = pack_codes(codes, weight_bits)
        self.scales = (torch.rand(channels, 1) * 0.01 + 0.001).half()
        self.clip, self.bias = torch.tensor([0.8]), torch.randn(channels).to(dtype)
        self.limits = (largest_value(act_bits), largest_value(weight_bits))

    def expected(self) -> Tensor:
        """The reference's result, on the CPU."""
        return bipolar_linear_reference(self.x, self.planes, self.scales, self.clip, self.bias, self.act_bits, -1, True)

    def weight(self) -> tuple[Tensor, Tensor, Tensor]:
        """Prepared: tiles, row sums, scales."""
        tiles = tile_weight(self.planes.cuda())
        return tiles, plane_row_sums(self.planes, self.columns).cuda(), self.scales.cuda()

    def activations(self, as_bytes: bool) -> Activations:
        """Quantized on the GPU."""
        return quantize_tiles(self.x.cuda(), self.clip.cuda(), self.act_bits, per_token=True, as_bytes=as_bytes)

    def output(self) -> Tensor:
        """Room for y, poisoned: an element that is not written shows."""
        return torch.full((self.x.shape[0], self.planes.shape[1]), float("nan"), dtype=self.x.dtype, device="cuda")

    def run_op(self) -> Tensor:
        """The whole op on the GPU."""
        tiles, sums, scales = self.weight()
        return bipolar_prepared_linear(
            self.x.cuda(), tiles, sums, scales, self.clip.cuda(), self.bias.cuda(), self.act_bits, True
        )
