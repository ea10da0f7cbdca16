"""The kernels that tuning calls in every step against its own functions for a CPU, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.ops.solve import codes as kernels
from quantkit.ops.solve.instances import CODED_COLUMNS
from quantkit.tuning import codes as reference

BITS = [pytest.param(bits, marks=pytest.mark.sanitize) if bits in (1, 4, 8) else bits for bits in range(1, 9)]
# N, K, width: narrow groups; a last one of fewer columns; rows of one group, in parts, the last of a single column
SHAPES = ((7, 96, 32), (33, 203, 64), (5, 2 * CODED_COLUMNS + 1, 2 * CODED_COLUMNS + 1), (129, 576, 576))
ROUNDING = 1e-5  # a sum of nine numbers of size 1 in another order
SUM_RTOL, SUM_ATOL = 1e-4, 1e-3  # sums of up to a thousand numbers of size 1 in another order


def _coding(bits: int, rows: int, groups: int) -> tuple[Tensor, Tensor]:
    """Scales of which some groups' are not nested, one negative and one zero, and offsets."""
    halved = torch.tensor([0.5**i for i in range(bits)])[:, None, None]
    scales = halved * (1 + torch.rand(bits, rows, groups)) * 0.5
    scales[0, ::5] *= -1
    scales[-1, 1] = 0
    return scales, 0.1 * torch.randn(rows, groups)


@pytest.mark.cuda
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "columns", "width"), SHAPES)
def test_codes_are_the_nearest_and_their_weight_is_the_cpus(bits: int, rows: int, columns: int, width: int) -> None:
    latent, (scales, offset) = torch.randn(rows, columns), _coding(bits, rows, -(-columns // width))
    found, again = (kernels.nearest_codes(latent.cuda(), scales.cuda(), offset.cuda(), width) for _ in range(2))
    assert all(map(torch.equal, found, again))
    codes, weight = (each.cpu() for each in found)
    _, expected = reference.nearest_codes(latent, scales, offset, width)
    distance = (weight - latent).abs()  # of two levels that are as near, either may be chosen
    torch.testing.assert_close(distance, (expected - latent).abs(), rtol=0, atol=ROUNDING)
    of_codes = reference.weight_of(codes, scales, offset, width)
    torch.testing.assert_close(weight, of_codes, rtol=0, atol=ROUNDING)
    assert torch.equal(kernels.weight_of(found[0], scales.cuda(), offset.cuda(), width), found[1])


@pytest.mark.cuda
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "columns", "width"), SHAPES)
def test_gradients_are_the_cpus(bits: int, rows: int, columns: int, width: int) -> None:
    gradient, codes = torch.randn(columns, rows).t(), torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8)
    found, again = (kernels.gradients_of_groups(gradient.cuda(), codes.cuda(), bits, width) for _ in range(2))
    assert all(map(torch.equal, found, again))
    for own, expected in zip(found, reference.gradients_of_groups(gradient, codes, bits, width), strict=True):
        torch.testing.assert_close(own.cpu(), expected, rtol=SUM_RTOL, atol=SUM_ATOL)
