"""Two seeded flatten layers with an activation function between, as operands of int8_gemm_requantize."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats.flatten import max_code, pack_nibbles
from quantkit.ops.activations import ACTIVATIONS
from quantkit.ops.flatten.layout import column_slots, tile_codes, untile_codes
from quantkit.ops.flatten.op import flatten_quantize_tiles, int8_gemm_requantize, int8_gemm_tiles

SHAPES = [(1, 5, 32), (7, 65, 160), (65, 96, 96), (65, 130, 416), (130, 257, 288), (300, 520, 640)]
"""M, N and K_ext of the second layer, whose last line of 128 columns is full or not."""

_DEPTH = 96  # K_ext of the first layer
_DIFFERING = 1e-4  # of the codes, by one, where tanh, erf or exp decide the last bit of y


class RequantizeProblem:
    """x codes [M, 96], weight codes [N, 96] and the second layer's map: repeated slices, padding, saturation."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        act_bits: int = 8,
        weight_bits: int = 8,
        smooth: bool = False,
        row_scales: bool = False,
    ):
        self.tokens, self.out_features, self.extended = shape
        self.dtype, self.act_bits = dtype, act_bits
        top = max_code(weight_bits)
        self.acts = torch.randint(-top, top + 1, (self.tokens, _DEPTH), dtype=torch.int8, device=device)
        self.codes = torch.randint(-top, top + 1, (self.out_features, _DEPTH), dtype=torch.int8, device=device)
        self.acts[self.tokens // 2] = 0
        self.nibbles = weight_bits == 4
        self.act_scale = torch.tensor([2.0 / top**2], device=device)
        self.weight_scale = torch.tensor([0.11], device=device)
        if row_scales:
            self.weight_scale = self.weight_scale * (torch.rand(self.out_features, 1, device=device) + 0.5)
        self.bias = torch.randn(self.out_features, device=device).to(dtype)
        self.bias[0], self.bias[-1] = 60.0, -60.0  # beyond the last slice on one side
        extra = self.extended - self.out_features
        channel = torch.randint(0, self.out_features, (extra,)).sort().values
        channel[-1:] = 0  # padding
        self.channel = torch.cat((torch.arange(self.out_features), channel)).int().to(device)
        self.segment = torch.cat((torch.zeros(self.out_features), torch.randint(0, 4, (extra,)))).int().to(device)
        self.multiplier = (torch.rand(self.out_features if smooth else 1, device=device) + 0.5) * max_code(act_bits)

    def operands(self, packed_acts: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        acts, codes = (pack_nibbles(c) if packed else c for c, packed in self._held(packed_acts))
        return tile_codes(acts), tile_codes(codes, weight=True), self.act_scale, self.weight_scale, self.bias

    def _held(self, packed_acts: bool) -> tuple[tuple[Tensor, bool], tuple[Tensor, bool]]:
        return (self.acts, packed_acts), (self.codes, self.nibbles)

    def slots(self) -> tuple[Tensor, Tensor]:
        return column_slots(self.channel, self.segment, self.out_features)

    def apart(self, activation: str, tiles: Tensor) -> Tensor:
        """|difference| of code tiles from those of the three ops one by one, up to the end of the lines."""
        y = int8_gemm_tiles(*self.operands(), self.tokens, self.out_features, self.dtype)
        between = ACTIVATIONS[activation].apply(y)
        expected = flatten_quantize_tiles(between, self.channel, self.segment, self.multiplier, self.act_bits, False)
        one, other = (untile_codes(t, self.tokens, t.shape[1] * t.shape[-1]).int() for t in (tiles, expected))
        return (one - other).abs()

    def fused(self, activation: str) -> Tensor:
        rest = self.tokens, self.out_features, self.dtype, activation, self.multiplier, *self.slots(), self.act_bits
        return int8_gemm_requantize(*self.operands(), *rest)


def assert_same_codes(apart: Tensor, activation: str) -> None:
    """Equal behind ReLU; elsewhere one in ten thousand may be off by one, as GPU libraries differ in the last bit."""
    if ACTIVATIONS[activation].exact or not apart.is_cuda:
        assert not apart.any()
    else:
        assert apart.max() <= 1
        assert (apart > 0).sum() <= 1 + _DIFFERING * apart.numel()
