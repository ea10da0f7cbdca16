"""Worked examples of the nuQmm paper."""

from __future__ import annotations

import pytest
import torch

from quantkit.formats.planes import pack_bits
from quantkit.ops.bcq.op import bcq_linear

# Eq 2: B in {-1, +1}^(4 x 4) and x; the products are worked by hand.
B = [[1, -1, -1, 1], [1, -1, 1, -1], [1, -1, -1, -1], [-1, 1, -1, 1]]
X = [1.2, -0.7, 0.3, 0.6]
BX = [2.2, 1.6, 1.0, -1.6]

# Table 1: key -> signs of x1, x2, x3, the first being the key's highest bit.
TABLE_1 = {
    0b000: (-1, -1, -1),
    0b001: (-1, -1, +1),
    0b010: (-1, +1, -1),
    0b011: (-1, +1, +1),
    0b100: (+1, -1, -1),
    0b101: (+1, -1, +1),
    0b110: (+1, +1, -1),
    0b111: (+1, +1, +1),
}

FP32_ATOL = 1e-6  # four additions of numbers around 1 in fp32


def _linear(x: torch.Tensor, signs: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    packed = torch.stack([pack_bits(plane) for plane in signs])
    return bcq_linear(x, packed, scales.half(), None, None, -1)


def test_equation_2_binary_matrix_times_vector() -> None:
    signs = (torch.tensor([B]) + 1) // 2
    y = _linear(torch.tensor([X]), signs, torch.ones(1, 4, 1))
    torch.testing.assert_close(y, torch.tensor([BX]), atol=FP32_ATOL, rtol=0)


def test_equation_1_two_planes_are_a_weighted_sum() -> None:
    signs = (torch.tensor([B, B]) + 1) // 2
    signs[1] = 1 - signs[1]  # the second plane is -B
    scales = torch.tensor([2.0, 0.5])[:, None, None].expand(2, 4, 1)
    y = _linear(torch.tensor([X]), signs, scales)
    torch.testing.assert_close(y, 1.5 * torch.tensor([BX]), atol=FP32_ATOL, rtol=0)


@pytest.mark.parametrize("key", TABLE_1, ids=lambda key: f"{key:03b}")
def test_table_1_every_pattern_of_three(key: int) -> None:
    x = torch.tensor([0.25, 0.5, 2.0])
    signs = torch.tensor([[[(key >> 2) & 1, (key >> 1) & 1, key & 1]]])
    expected = sum(sign * value for sign, value in zip(TABLE_1[key], x.tolist(), strict=True))
    assert _linear(x[None], signs, torch.ones(1, 1, 1)).item() == expected
