"""8-bit scales: the factor of every row, and what bcq and rtn lose by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit.errors import RecipeError
from quantkit.formats.base import PackedWeight
from quantkit.formats.bcq import BcqTensors
from quantkit.formats.table import dequantize, stored_bytes
from quantkit.methods import check_recipe
from quantkit.quantizers import rounding
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.bcq import quantizer as bcq
from quantkit.quantizers.bcq.coding import CodeShape, code_groups
from quantkit.quantizers.bcq.compensation import _refit_scales
from quantkit.quantizers.bcq.groups import SMALLEST_SCALE
from quantkit.quantizers.bcq.levels import Coding
from quantkit.quantizers.bcq.quantizer import BcqSettings
from quantkit.quantizers.bcq.scales import ScaleGrid, roomy_grid, row_grid
from quantkit.quantizers.rounding import RtnSettings
from quantkit.recipe import parse_recipe

# Relative loss over fp16 scales of the same groups on Gaussian weights, with slack of a factor of two.
CODING_LOSS = {2: 5e-4, 3: 2e-3, 4: 1e-2}
# The same in output error where compensation makes up for most of it; two searches end in different optima.
COMPENSATED_LOSS = 3e-2
FP32_RTOL = 1e-4
LARGEST_CODE = {"scales": 255, "offset": 127}


def _gaussian(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _layer(weight: Tensor) -> LayerInput:
    """The weight and the Hessian of inputs whose channels are correlated."""
    columns, generator = weight.shape[1], torch.Generator().manual_seed(1)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5 + 0.1
    x = torch.randn(4 * columns, columns, generator=generator) @ mixing
    return LayerInput("layer", weight, hessian=x.t() @ x / len(x))


def _relative_error(weight: Tensor, settings: BcqSettings) -> float:
    error = dequantize(bcq.quantize(LayerInput("layer", weight), settings)) - weight
    return (error.square().sum() / weight.square().sum()).item()


def _output_loss(layer: LayerInput, packed: PackedWeight) -> float:
    assert layer.hessian is not None
    residual = dequantize(packed) - layer.weight
    return ((residual @ layer.hessian) * residual).sum().item()


@pytest.mark.parametrize("size", [1e-9, 1e-5, 1.0, 1e4], ids=["underflow", "denormal", "usual", "large"])
def test_rounding_is_within_half_a_step(size: float) -> None:
    scales, offset = _gaussian(30, 7).abs().view(3, 10, 7) * size, _gaussian(10, 7, seed=1) * size
    grid = row_grid(scales, offset, torch.ones(7))
    assert grid.factors is not None
    assert torch.equal(grid.factors, grid.factors.half().float())
    half_step = grid.factors / 2 * (1 + FP32_RTOL)
    assert ((grid.round_scales(scales) - scales).abs() <= half_step).all()
    assert ((grid.round_offset(offset) - offset).abs() <= half_step).all()
    largest = scales.amax(dim=(0, 2))[:, None]
    assert (grid.factors <= torch.maximum(largest, 2.01 * offset.abs().amax(1, True)) / 255 * 1.2 + 2.0**-24).all()


def test_factors_lose_least_of_those_tried() -> None:
    scales, offset = _gaussian(64, 8).abs().view(4, 16, 8), torch.zeros(16, 8)
    importance = torch.rand(8, generator=torch.Generator().manual_seed(2)) + 0.1

    def loss(grid: ScaleGrid) -> Tensor:
        return ((grid.round_scales(scales) - scales).square().sum(dim=0) * importance).sum(dim=-1)

    assert (loss(row_grid(scales, offset, importance)) <= loss(roomy_grid(scales, offset, 1.0))).all()
    assert loss(row_grid(scales, offset, importance)).sum() < 0.9 * loss(roomy_grid(scales, offset, 1.0)).sum()


def test_rows_of_zeros_take_the_smallest_factor_and_stay_zero() -> None:
    grid = row_grid(torch.zeros(2, 3, 4), torch.zeros(3, 4), torch.ones(4))
    assert grid.factors is not None
    assert grid.factors.tolist() == [[SMALLEST_SCALE]] * 3
    assert not grid.round_scales(torch.zeros(2, 3, 4)).any()


def test_values_beyond_the_largest_code_become_it() -> None:
    grid = ScaleGrid(torch.tensor([[0.5]]))
    assert grid.round_scales(torch.tensor([[[1.3, 1000.0, -3.0]]])).tolist() == [[[1.5, 127.5, 0.0]]]
    assert grid.round_offset(torch.tensor([[-1000.0, -1.3, 1000.0]])).tolist() == [[-63.5, -1.5, 63.5]]


def test_stored_codes_give_the_rounded_numbers_back() -> None:
    scales, offset = _gaussian(12, 5).abs().view(3, 4, 5), _gaussian(4, 5, seed=1)
    grid = row_grid(scales, offset, torch.ones(5))
    rounded = grid.round_scales(scales), grid.round_offset(offset)
    stored: BcqTensors = grid.stored(torch.zeros(3, 4, 1, dtype=torch.uint8), *rounded)
    assert (stored.scales.dtype, stored.offset.dtype if stored.offset is not None else None) == (
        torch.uint8,
        torch.int8,
    )
    assert torch.equal(stored.decoded_scales(), rounded[0])
    decoded = stored.decoded_offset()
    assert decoded is not None
    assert torch.equal(decoded, rounded[1])


@pytest.mark.parametrize("bits", CODING_LOSS)
def test_coded_scales_lose_little_and_pay_for_finer_groups(bits: int) -> None:
    weight = _gaussian(64, 2048)
    coded = BcqSettings(weight_bits=bits, group_size=64, scale_bits=8)
    error = _relative_error(weight, coded)
    assert error <= _relative_error(weight, replace(coded, scale_bits=16)) * (1 + CODING_LOSS[bits])
    assert error < 0.97 * _relative_error(weight, BcqSettings(weight_bits=bits, group_size=128))  # of the same size


def test_no_row_is_worse_than_with_its_fitted_signs() -> None:
    weight, shape = _gaussian(40, 200) ** 3, CodeShape(3, 32, 8)

    def fit(values: Tensor, importance: Tensor) -> Coding:
        return bcq.solve_groups(values, importance, BcqSettings(weight_bits=3))

    ones = torch.ones(200)
    best = code_groups(weight, ones, shape, fit)
    plain = code_groups(weight, ones, replace(shape, scale_bits=16), fit)
    rounded = replace(plain, scales=best.grid.round_scales(plain.scales), offset=best.grid.round_offset(plain.offset))
    errors = [(coding.dequantize() - weight).square().sum(dim=1) for coding in (best, rounded)]
    assert (errors[0] <= errors[1] * (1 + FP32_RTOL)).all()
    assert errors[0].sum() < errors[1].sum()


@pytest.mark.parametrize("offset", [True, False], ids=["offset", "no-offset"])
def test_compensation_makes_up_for_coded_scales(offset: bool) -> None:
    layer, settings = _layer(_gaussian(24, 192)), BcqSettings(3, 32, offset, compensate=True)
    losses = [_output_loss(layer, bcq.quantize(layer, replace(settings, scale_bits=bits))) for bits in (16, 8)]
    assert losses[1] <= losses[0] * (1 + COMPENSATED_LOSS)


def test_rounding_takes_coded_scales_with_and_without_compensation() -> None:
    layer, settings = _layer(_gaussian(24, 192)), RtnSettings(3, 32)
    plain = [rounding.quantize(layer, replace(settings, scale_bits=bits)) for bits in (16, 8)]
    assert plain[1].report["weight_error"] <= plain[0].report["weight_error"] * (1 + CODING_LOSS[3])
    settings = replace(settings, compensate=True)
    losses = [_output_loss(layer, rounding.quantize(layer, replace(settings, scale_bits=bits))) for bits in (16, 8)]
    assert losses[1] <= losses[0] * (1 + COMPENSATED_LOSS)


def test_planes_of_negative_scale_are_turned() -> None:
    """Codes of the opposite signs: the refit's scales are negative, which codes cannot be."""
    weight, shape = _gaussian(16, 64), CodeShape(2, 32, 8)

    def fit(values: Tensor, importance: Tensor) -> Coding:
        return bcq.solve_groups(values, importance, BcqSettings(weight_bits=2))

    right = code_groups(weight, torch.ones(64), shape, fit)
    wrong = replace(right, codes=right.codes ^ 1)
    refits = [_refit_scales(weight, torch.eye(64), start, offset=True) for start in (right, wrong)]
    assert torch.equal(refits[1].codes, right.codes)
    losses = [(weight - refit.dequantize()).square().sum() for refit in refits]
    assert losses[1] <= losses[0] * (1 + CODING_LOSS[2])


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(4, 40),
        torch.full((4, 40), 0.03),
        torch.full((4, 40), -2.0),
        torch.tensor([[1.0], [0.0], [-1e-7], [1e-3]]).expand(4, 40).contiguous(),
        torch.cat([_gaussian(4, 32), torch.full((4, 32), 50.0)], dim=1),
    ],
    ids=["zeros", "constant", "negative", "mixed-rows", "constant-group"],
)
@pytest.mark.parametrize("method", [bcq, rounding], ids=["bcq", "rtn"])
def test_unusual_groups_come_back_within_half_a_code(weight: Tensor, method: object) -> None:
    settings = BcqSettings if method is bcq else RtnSettings
    quantize = bcq.quantize if method is bcq else rounding.quantize
    packed = quantize(LayerInput("layer", weight), settings(weight_bits=4, group_size=16, scale_bits=8))
    largest = weight.abs().amax(dim=1, keepdim=True)
    worst = (dequantize(packed) - weight)[:, -32:].abs()
    assert (worst <= largest / 127 + 2.0**-20).all()


def test_a_row_of_zeros_between_others_stays_zero() -> None:
    weight = _gaussian(3, 64)
    weight[1] = 0
    packed = bcq.quantize(LayerInput("layer", weight), BcqSettings(weight_bits=3, group_size=16, scale_bits=8))
    assert not dequantize(packed)[1].any()


def test_same_weight_gives_the_same_bytes_of_the_promised_size() -> None:
    layer = _layer(_gaussian(16, 128))
    settings = BcqSettings(2, 32, compensate=True, scale_bits=8)
    runs = [bcq.quantize(layer, settings) for _ in range(2)]
    assert all(torch.equal(runs[0].tensors[name], runs[1].tensors[name]) for name in runs[0].tensors)
    written = sum(tensor.numel() * tensor.element_size() for tensor in runs[0].tensors.values())
    assert written == stored_bytes(runs[0].spec, (16, 128)) == 16 * (128 * (2 + 24 / 32) + 16) / 8


@pytest.mark.parametrize("method", ["bcq", "rtn"])
@pytest.mark.parametrize("value", [4, 0, True, "8", 8.0], ids=repr)
def test_recipes_take_16_or_8_only(value: object, method: str) -> None:
    recipe = parse_recipe({"schema": 1, "method": method, "settings": {"scale_bits": value}}, name="own", where="here")
    with pytest.raises(RecipeError, match="scale_bits"):
        check_recipe(recipe)
