"""The filters of trellis codes, found for a Gaussian of variance 1."""

from __future__ import annotations

import torch
from torch import Tensor

FILTERS: dict[tuple[int, int], tuple[tuple[float, ...], ...]] = {
    (2, 4): (
        (0.47571, 0.25526, -0.27255, 0.45395),
        (0.43878, -0.22219, -0.21805, -0.52544),
    ),
    (2, 6): (
        (-0.26736, 0.29382, 0.31405, 0.21180, -0.10267, 0.49730),
        (0.36199, -0.27854, -0.01670, -0.09181, 0.12998, 0.61275),
    ),
    (3, 3): (
        (0.74431, -0.19494, -0.30201),
        (0.55292, 0.14270, 0.26313),
        (0.30399, -0.11761, 0.46502),
    ),
    (3, 5): (
        (-0.15390, -0.49419, -0.12931, -0.27560, 0.41558),
        (-0.25547, 0.63929, -0.01540, 0.11333, 0.22283),
        (0.32495, 0.21824, -0.08680, -0.16559, 0.20939),
    ),
    (4, 2): (
        (-0.63327, 0.49872),
        (-0.25538, -0.79142),
        (0.33180, 0.16990),
        (-0.14323, -0.39161),
    ),
    (4, 4): (
        (0.63698, 0.21066, -0.17998, 0.26450),
        (-0.43469, -0.40842, 0.34438, 0.07009),
        (-0.10248, 0.36714, -0.11131, 0.14598),
        (0.24388, -0.07979, 0.10542, -0.16950),
    ),
}
"""By weight_bits and taps, the taps of every plane."""


def filter_for(weight_bits: int, taps: int) -> Tensor:
    """[weight_bits, taps] fp32. Raises KeyError where there is none."""
    return torch.tensor(FILTERS[weight_bits, taps], dtype=torch.float32)
