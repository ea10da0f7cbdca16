"""The bipolar-INT quantizer: clip ranges, widths, granularities."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantkit.assets import recipe_names
from quantkit.errors import RecipeError, StatsError
from quantkit.formats.base import PackedWeight
from quantkit.formats.bipolar import largest_scale
from quantkit.formats.table import FORMATS, dequantize
from quantkit.methods import check_recipe
from quantkit.ops.bipolar.op import bipolar_linear
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.bipolar import (
    BipolarSettings,
    needs_stats,
    quantize,
    scale_factors,
    stored_specs,
    weight_scales,
)
from quantkit.recipe import load_recipe
from quantkit.stats import LayerStats

ROWS, COLUMNS = 24, 72


def _layer(outlier: float = 1.0) -> LayerInput:
    sample = torch.randn(64, COLUMNS)
    sample[:, 3] *= outlier
    stats = LayerStats(
        absmax=sample.abs().amax(0),
        mean_abs=sample.abs().mean(0),
        mean_square=sample.square().mean(0),
        histogram=torch.zeros(1, dtype=torch.int64),
        sample=sample,
        tokens=64,
    )
    return LayerInput("layer", torch.randn(ROWS, COLUMNS) * 0.05, stats)


def _output_error(layer: LayerInput, packed: PackedWeight) -> float:
    assert layer.stats is not None
    x, spec = layer.stats.sample, packed.spec
    y = bipolar_linear(
        x,
        packed.tensors["bit_planes"],
        packed.tensors["scales"],
        packed.tensors.get("act_clip"),
        None,
        spec.act_bits,
        spec.group_size,
        spec.act_granularity == "per_token",
        spec.act_zero,
        spec.rotate_inputs,
        packed.tensors.get("scale_factors"),
    )
    expected = x @ layer.weight.T
    return ((y - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("granularity", ["per_token", "per_tensor"])
@pytest.mark.parametrize("scale_bits", [16, 8], ids="s{}".format)
@pytest.mark.parametrize("group_size", [-1, 32], ids="g{}".format)
def test_tensors_match_the_format(granularity: str, scale_bits: int, group_size: int) -> None:
    settings = BipolarSettings(3, 4, group_size, granularity, scale_bits=scale_bits)
    packed = quantize(_layer(), settings)
    declared = FORMATS["bipolar"].tensors(packed.spec, packed.shape)
    assert {n: (t.shape, t.dtype) for n, t in packed.tensors.items()} == {
        n: (t.shape, t.dtype) for n, t in declared.items()
    }
    assert dequantize(packed).shape == (ROWS, COLUMNS)


def test_error_falls_as_bits_rise() -> None:
    layer = _layer()
    errors = [_output_error(layer, quantize(layer, BipolarSettings(bits, bits))) for bits in (1, 2, 4, 8)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02  # 8 bits: a step of range / 255


@pytest.mark.parametrize("granularity", ["per_token", "per_tensor"])
@pytest.mark.parametrize("bits", [1, 2, 4], ids="{}-bit".format)
def test_search_beats_absmax(bits: int, granularity: str) -> None:
    layer = _layer(outlier=20.0)
    searched = quantize(layer, BipolarSettings(bits, bits, act_granularity=granularity))
    plain = quantize(layer, BipolarSettings(bits, bits, act_granularity=granularity, search=False))
    assert _output_error(layer, searched) < _output_error(layer, plain)


def test_factors_hold_multiples_exactly_and_rows_of_zeros() -> None:
    scales = torch.tensor([[0.5, 1.0, 4.0, 0.0], [0.0, 0.0, 0.0, 0.0], [2.0**-24, 0.0, 0.0, 0.0]]).half()
    assert scale_factors(scales, 4).flatten().tolist() == [0.5, 0.0, 2.0**-24]  # codes up to 8


@pytest.mark.parametrize("search", [False, True], ids=["nearest", "search"])
@pytest.mark.parametrize("bits", [2, 4, 6], ids="{}-bit".format)
def test_scale_codes_are_in_their_range_and_none_is_lost(bits: int, search: bool) -> None:
    weight = torch.randn(20, 64) * torch.rand(20, 8).repeat_interleave(8, 1)
    weight[0, 16:24] = 1e-4  # far below what code 1 is
    weight[1, 8:16], weight[2] = 0.0, 0.0
    settings = BipolarSettings(bits, 16, 8, search=search, scale_bits=8)
    stored = weight_scales(weight, None, settings)
    fp16 = weight_scales(weight, None, replace(settings, scale_bits=16))["scales"]
    assert torch.equal(stored["scales"] == 0, fp16 == 0)
    assert stored["scales"].max() <= largest_scale(bits)
    ratio = fp16.float() / stored["scale_factors"].float().clamp_min(1e-9)
    off = (stored["scales"] - ratio.clamp(max=largest_scale(bits))).abs()
    assert off.max() < 1  # one of the two codes around it


@pytest.mark.parametrize("gptq", [False, True], ids=["nearest", "gptq"])
def test_groups_with_scale_codes_lose_less_than_rows(gptq: bool) -> None:
    """Groups whose magnitudes differ by up to four, of which the least have two or three codes to choose from."""
    layer = _layer()
    spread = torch.linspace(0.25, 1.0, 9).repeat_interleave(8)
    assert layer.stats is not None
    hessian = layer.stats.sample.T @ layer.stats.sample / len(layer.stats.sample)
    layer = replace(layer, weight=layer.weight * spread, hessian=hessian)
    settings = BipolarSettings(4, 8, gptq=gptq)
    row, fp16, coded = (
        _output_error(layer, quantize(layer, replace(settings, group_size=g, scale_bits=bits)))
        for g, bits in ((-1, 16), (8, 16), (8, 8))
    )
    assert fp16 < coded < 0.95 * row


def test_rotated_inputs_spread_an_outlier() -> None:
    layer = _layer(outlier=50.0)
    plain, rotated = (quantize(layer, BipolarSettings(8, 4, rotate_inputs=on)) for on in (False, True))
    assert _output_error(layer, rotated) < 0.6 * _output_error(layer, plain)
    assert rotated.report["weight_error"] < 2 * plain.report["weight_error"]  # both in the columns of the model


def test_a_zero_point_halves_the_error_of_inputs_without_a_sign() -> None:
    layer = _layer()
    assert layer.stats is not None
    layer = replace(layer, stats=replace(layer.stats, sample=layer.stats.sample.relu()))
    plain, zero = (quantize(layer, BipolarSettings(8, 4, act_zero=on)) for on in (False, True))
    assert _output_error(layer, zero) < 0.6 * _output_error(layer, plain)


def test_gptq_of_a_rotated_layer_uses_the_rotated_hessian() -> None:
    layer = _layer()
    assert layer.stats is not None
    mixed = layer.stats.sample @ (torch.eye(COLUMNS) + 0.2 * torch.randn(COLUMNS, COLUMNS))
    layer = replace(layer, stats=replace(layer.stats, sample=mixed), hessian=mixed.T @ mixed / len(mixed))
    settings = BipolarSettings(3, 8, rotate_inputs=True, act_zero=True)
    plain, compensated = (quantize(layer, replace(settings, gptq=gptq)) for gptq in (False, True))
    assert _output_error(layer, compensated) < 0.9 * _output_error(layer, plain)


def test_inputs_that_cannot_be_rotated_are_refused_before_the_work() -> None:
    with pytest.raises(RecipeError, match="multiple of 8, not 12"):
        stored_specs(BipolarSettings(rotate_inputs=True), (4, 12))


def test_one_bit_scale_is_near_the_mean_magnitude() -> None:
    """For uncorrelated inputs the best 1-bit scale is mean |w|, the classical result."""
    layer = LayerInput("layer", torch.randn(8, 4096))
    packed = quantize(layer, BipolarSettings(1, 16))
    expected = layer.weight.abs().mean(dim=1)
    torch.testing.assert_close(packed.tensors["scales"][:, 0].float(), expected, rtol=0.06, atol=0)  # an eighth octave


@pytest.mark.cuda
@pytest.mark.parametrize("granularity", ["per_token", "per_tensor"])
@pytest.mark.parametrize("search", [True, False])
def test_what_is_stored_stays_on_the_gpu_of_the_layer(granularity: str, search: bool) -> None:
    layer = _layer()
    packed = quantize(
        replace(layer, weight=layer.weight.cuda()), BipolarSettings(act_granularity=granularity, search=search)
    )
    assert {name: tensor.device.type for name, tensor in packed.tensors.items()} == dict.fromkeys(
        packed.tensors, "cuda"
    )


def test_weight_only_needs_no_statistics() -> None:
    assert not needs_stats(BipolarSettings(4, 16))
    assert needs_stats(BipolarSettings(4, 8))
    assert "act_clip" not in quantize(LayerInput("layer", torch.randn(4, 16)), BipolarSettings(4, 16)).tensors


def test_quantized_activations_without_statistics_are_refused() -> None:
    with pytest.raises(StatsError, match=r"model\.fc: quantized activations need"):
        quantize(LayerInput("model.fc", torch.randn(4, 16)), BipolarSettings(4, 8))


def test_a_row_of_zeros_stays_zero() -> None:
    layer = LayerInput("layer", torch.zeros(3, 16))
    assert torch.equal(dequantize(quantize(layer, BipolarSettings(2, 16))), torch.zeros(3, 16))


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(RecipeError, match="act_bits is 12"):
        BipolarSettings(act_bits=12)


def test_gptq_lowers_the_output_error() -> None:
    layer = _layer()
    assert layer.stats is not None
    mixed = layer.stats.sample @ (torch.eye(COLUMNS) + 0.2 * torch.randn(COLUMNS, COLUMNS))
    layer = replace(layer, stats=replace(layer.stats, sample=mixed), hessian=mixed.T @ mixed / len(mixed))
    plain, compensated = (quantize(layer, BipolarSettings(3, 16, gptq=gptq)) for gptq in (False, True))
    assert _output_error(layer, compensated) < 0.9 * _output_error(layer, plain)


def _hessian_loss(layer: LayerInput, packed: PackedWeight) -> float:
    """What GPTQ lowers: tr(D H D^T), D the error of the weight."""
    assert layer.hessian is not None
    difference = dequantize(packed) - layer.weight
    return ((difference @ layer.hessian) * difference).sum().item()


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
def test_act_order_lowers_the_loss_of_gptq(rotated: bool) -> None:
    """On more tokens than the sample has: ranges by the whole Hessian, and large columns first."""
    layer = _layer()
    tokens = torch.randn(4096, COLUMNS) @ (torch.eye(COLUMNS) + 0.2 * torch.randn(COLUMNS, COLUMNS))
    tokens *= torch.linspace(0.2, 3.0, COLUMNS)
    layer = replace(layer, hessian=tokens.T @ tokens / len(tokens))
    settings = BipolarSettings(4, 8, gptq=True, act_zero=True, rotate_inputs=rotated)
    plain, ordered = (quantize(layer, replace(settings, act_order=order)) for order in (False, True))
    assert _hessian_loss(layer, ordered) < 0.95 * _hessian_loss(layer, plain)


def test_act_order_without_gptq_is_refused() -> None:
    with pytest.raises(RecipeError, match="set gptq=true"):
        BipolarSettings(4, 8, act_order=True)


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("bipolar-")])
def test_shipped_recipes_are_valid(name: str) -> None:
    check_recipe(load_recipe(name))
