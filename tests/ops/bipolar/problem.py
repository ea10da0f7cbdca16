"""Seeded operands of a bipolar-INT product, for the tests of its kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit.cuda.device import gpu_of
from quantkit.formats.bipolar import ActCoding, largest_scale
from quantkit.formats.planes import pack_codes
from quantkit.ops.bipolar.fused import FusedPlan, fused_launch, fused_tensors
from quantkit.ops.bipolar.launch import expand, quantize_tiles
from quantkit.ops.bipolar.layout import CHUNK_BYTES, LINE_BYTES, untile_lines
from quantkit.ops.bipolar.op import bipolar_linear, bipolar_prepared_linear
from quantkit.ops.bipolar.product import Activations, Product, Weight
from quantkit.ops.bipolar.weight import tiled_weight


def lines_of(tiles: Tensor, count: int, *, as_bytes: bool) -> Tensor:
    """Rows in the order of columns, with what is behind K: [planes, count, bytes] on the CPU.

    Byte b of chunk c of a line of bytes is of column 8 b + c.
    """
    lines = untile_lines(tiles, count, tiles.shape[1] * LINE_BYTES).cpu()
    if not as_bytes:
        return lines
    return lines.unflatten(-1, (-1, LINE_BYTES // CHUNK_BYTES, CHUNK_BYTES)).transpose(-1, -2).flatten(-3)


def hopper_only() -> None:
    """Skip the test on another GPU."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("warpgroup products need compute capability 9.0")


def run(product: Product, plan: FusedPlan) -> Tensor:
    """y of a layout of the fused product; the product's own is left alone."""
    product = replace(product, y=torch.full_like(product.y, float("nan")))
    gpu = gpu_of(product.y.device)
    fused_launch(product, gpu, fused_tensors(product, gpu, plan), plan).run()
    return product.y


class Problem:
    """Seeded operands on both devices, and what the reference makes of them.

    coded: with scale codes, of groups of 128 or 256 columns.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        weight_bits: int,
        act_bits: int,
        dtype: torch.dtype,
        *,
        zero: bool = False,
        rotated: bool = False,
        coded: bool = False,
    ):
        m, n, self.in_features = shape
        self.weight_bits, self.act_bits = weight_bits, act_bits
        self.coding = ActCoding(act_bits, True, zero, rotated)
        self.x = torch.randn(m, self.in_features).to(dtype)
        codes = torch.randint(0, 1 << weight_bits, (n, self.in_features), dtype=torch.uint8)
        self.planes = pack_codes(codes, weight_bits)
        self.scales, self.factors, self.group_size = (torch.rand(n, 1) * 0.01 + 0.001).half(), None, -1
        if coded:
            self.group_size = LINE_BYTES * (1 + (weight_bits + m) % 2)
            groups = -(-self.in_features // self.group_size)
            self.factors = self.scales
            self.scales = torch.randint(0, largest_scale(weight_bits) + 1, (n, groups), dtype=torch.uint8)
        self.clip, self.bias = torch.tensor([0.8]), torch.randn(n).to(dtype)

    def expected(self) -> Tensor:
        """The reference's result, on the CPU."""
        rest = self.act_bits, self.group_size, True, self.coding.zero, self.coding.rotated, self.factors
        return bipolar_linear(self.x, self.planes, self.scales, self.clip, self.bias, *rest)

    def weight(self) -> Weight:
        """Prepared, of planes."""
        factors = None if self.factors is None else self.factors.cuda()
        return tiled_weight(self.planes.cuda(), self.scales.cuda(), factors, self.group_size, self.in_features)

    def activations(self, as_bytes: bool) -> Activations:
        """Quantized on the GPU."""
        return quantize_tiles(self.x.cuda(), self.clip.cuda(), self.coding, as_bytes=as_bytes)

    def output(self) -> Tensor:
        """Room for y, poisoned: an element that is not written shows."""
        return torch.full((self.x.shape[0], self.planes.shape[1]), float("nan"), dtype=self.x.dtype, device="cuda")

    def product(self, as_bytes: bool, *, expanded: bool = True) -> Product:
        """Operands on the GPU, of planes or bytes, with room for y. expanded: whether W too is in bytes then."""
        weight, bits = self.weight(), (self.act_bits, self.weight_bits)
        if as_bytes and expanded:
            weight = expand(weight, self.in_features)
        acts, y, zero = self.activations(as_bytes), self.output(), self.coding.zero
        return Product(acts, weight, self.bias.cuda(), y, self.in_features, bits, zero)

    def run_op(self) -> Tensor:
        """The whole op on the GPU."""
        given = self.weight()
        coding = self.act_bits, True, self.coding.zero, self.coding.rotated, given.scale_tiles
        stored = given.tiles, given.row_sums, given.scales
        return bipolar_prepared_linear(self.x.cuda(), *stored, self.clip.cuda(), self.bias.cuda(), *coding)
