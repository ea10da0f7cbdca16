"""The rotation of inputs: orthogonal, exactly undone by its transpose, and what bounds a row's outliers."""

from __future__ import annotations

import pytest
import torch

from quantkit.errors import RecipeError
from quantkit.formats.hadamard import block_width, rotate, unrotate, unrotate_by_product

FP32_ATOL = 1e-5  # eight additions and a multiplication of values near 1


@pytest.mark.parametrize("columns", [8, 24, 576, 1408, 1536], ids="K{}".format)
def test_the_rotation_is_orthogonal_and_unrotate_is_its_inverse(columns: int) -> None:
    identity = torch.eye(columns)
    matrix = rotate(identity)
    torch.testing.assert_close(matrix @ matrix.T, identity, rtol=0, atol=FP32_ATOL)
    torch.testing.assert_close(unrotate(matrix), identity, rtol=0, atol=FP32_ATOL)


def test_a_product_of_rotated_operands_is_the_product() -> None:
    x, weight = torch.randn(5, 576, dtype=torch.float64), torch.randn(7, 576, dtype=torch.float64)
    got = rotate(x).double() @ rotate(weight).double().T
    torch.testing.assert_close(got, x @ weight.T, rtol=0, atol=1e-4)  # sums of 576 products, each rounded to fp32


@pytest.mark.parametrize("columns", [8, 24, 576, 1536])
def test_the_product_with_a_block_undoes_the_rotation(columns: int) -> None:
    x = torch.randn(2, 3, columns, requires_grad=True)
    expected = unrotate(x.detach())
    found = unrotate_by_product(x)
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=FP32_ATOL)
    (gradient,) = torch.autograd.grad(found, x, expected)
    torch.testing.assert_close(gradient, x.detach(), rtol=0, atol=FP32_ATOL)  # orthogonal


def test_blocks_stay_apart_and_an_outlier_is_spread_over_its_own() -> None:
    x = torch.zeros(1, 512)
    x[0, 300] = 16.0
    y = rotate(x)
    assert not y[0, :256].any()
    assert torch.equal(y[0, 256:].abs(), torch.ones(256))


def test_a_constant_row_is_spread_too() -> None:
    """Without signs all of it would be in the first column."""
    assert rotate(torch.ones(1, 256)).abs().max() < 4.0


def test_widths_are_powers_of_two_that_divide_k() -> None:
    assert [block_width(k) for k in (8, 24, 576, 1408, 4096)] == [8, 8, 64, 128, 256]
    with pytest.raises(RecipeError, match="not 12"):
        block_width(12)
