from __future__ import annotations

import pytest
import torch

from quantkit.errors import RecipeError
from quantkit.formats.table import dequantize
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.rounding import RtnSettings, fit_integer_zero, fit_uniform, quantize

# Clipped asymmetric round-to-nearest on Gaussian weights, g = 128, with 5 % slack for the sample.
GAUSSIAN_BOUNDS = {2: 0.143, 3: 0.0365, 4: 0.0095}


@pytest.mark.parametrize("bits", GAUSSIAN_BOUNDS)
def test_gaussian_weights_reach_the_known_error(bits: int) -> None:
    packed = quantize(LayerInput("layer", torch.randn(64, 1024)), RtnSettings(weight_bits=bits))
    assert packed.report["weight_error"] <= GAUSSIAN_BOUNDS[bits]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_uniform_weights_are_imported_exactly_into_planes(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (4, 48))
    codes[:, ::16], codes[:, 1::16] = 0, 2**bits - 1  # every group spans its whole grid
    weight = codes * 0.125 - 0.5
    packed = quantize(LayerInput("layer", weight), RtnSettings(weight_bits=bits, group_size=16, clip=False))
    assert torch.equal(dequantize(packed), weight)


def test_planes_hold_what_rounding_gives() -> None:
    weight = torch.randn(4, 64)
    grid = fit_uniform(weight, torch.ones_like(weight), 3, symmetric=False, clip=True)
    packed = quantize(LayerInput("layer", weight), RtnSettings(weight_bits=3, group_size=64))
    torch.testing.assert_close(dequantize(packed), grid.levels(grid.round(weight)), rtol=0, atol=1e-6)


def test_clipping_lowers_the_error_of_heavy_tails() -> None:
    weight = torch.randn(16, 256) ** 3
    errors = [
        quantize(LayerInput("layer", weight), RtnSettings(weight_bits=3, clip=clip)).report["weight_error"]
        for clip in (False, True)
    ]
    assert errors[1] < errors[0]


def test_symmetric_grid_mirrors_at_zero() -> None:
    values = torch.randn(8, 32)
    grid = fit_uniform(values, torch.ones_like(values), 4, symmetric=True, clip=True)
    assert torch.equal(grid.offset, torch.zeros(8))
    assert torch.equal(grid.levels(15 - grid.round(values)), -grid.levels(grid.round(values)))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_integer_zeros_are_levels_and_stored_exactly(bits: int, clip: bool) -> None:
    values = torch.randn(64, 32) + torch.linspace(-3, 3, 64)[:, None]
    grid = fit_integer_zero(values, torch.ones_like(values), bits, clip=clip)
    assert torch.equal(grid.half_step.half().float(), grid.half_step)
    assert torch.equal(grid.offset.half().float(), grid.offset)
    zero = (2**bits - 1 - grid.offset / grid.half_step) / 2
    assert torch.equal(zero, zero.round())
    assert zero.min() >= 0
    assert zero.max() <= 2**bits - 1
    assert torch.equal(grid.levels(zero[:, None]), torch.zeros(64, 1))


@pytest.mark.parametrize(("bits", "growth"), [(2, 1.4), (3, 1.25), (4, 1.15), (8, 1.3)])
def test_integer_zeros_cost_little(bits: int, growth: float) -> None:
    """A zero point moves by half a step at most; at 8 bits the step itself keeps few digits."""
    layer = LayerInput("layer", torch.randn(64, 1024))
    free, integer = (
        quantize(layer, RtnSettings(weight_bits=bits, zero=zero)).report["weight_error"] for zero in ("free", "integer")
    )
    assert integer <= growth * free


def test_impossible_zeros_are_refused() -> None:
    with pytest.raises(RecipeError, match="zero is 'none'; choose free or integer"):
        RtnSettings(zero="none")
    with pytest.raises(RecipeError, match="needs scale_bits: 16"):
        RtnSettings(zero="integer", scale_bits=8)
