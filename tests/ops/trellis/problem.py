"""Weights in the trellis format for the tests of its kernels."""

from __future__ import annotations

import torch

from quantkit.formats.planes import pack_bits
from quantkit.formats.trellis import TrellisTensors
from quantkit.ops.trellis.layout import TrellisTiles, prepare_planes

SHAPES = ((48, 100), (208, 520), (576, 1000), (112, 333))  # N, K: rings of 48, 16 and 64 rows; odd tiles, an odd K
FILTERS = ((2, 6), (3, 5), (4, 4), (1, 8), (6, 2))


def stored_weight(n: int, k: int, bits: int, taps: int, device: str = "cpu") -> TrellisTensors:
    signs = pack_bits(torch.randint(0, 2, (bits, n, k)))
    scales, filter = (torch.rand(n, 1) * 0.02 + 0.01).half(), torch.randn(bits, taps) * 0.3
    return TrellisTensors(signs.to(device), scales.to(device), filter.to(device))


def tiles_of(stored: TrellisTensors, k: int) -> TrellisTiles:
    return TrellisTiles(prepare_planes(stored, k), stored.scales, stored.filter)
