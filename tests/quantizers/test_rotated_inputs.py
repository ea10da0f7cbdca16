"""Quantizing behind the rotation of inputs: what is coded, against which statistics, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.errors import RecipeError
from quantkit.formats.base import PackedWeight
from quantkit.formats.hadamard import rotate, unrotate
from quantkit.formats.table import dequantize
from quantkit.methods import check_recipe
from quantkit.nn.flatten_linear import takes_codes
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.quantizers import rounding
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.bcq import quantizer as bcq
from quantkit.quantizers.flatten import quantizer as flatten
from quantkit.quantizers.flatten.quantizer import flattened_activations
from quantkit.quantizers.flatten.settings import FlattenSettings
from quantkit.quantizers.rotated_inputs import rotated_inputs, rotated_stats
from quantkit.recipe import load_recipe
from quantkit.stats import LayerStats, magnitude_histogram

ROWS, COLUMNS = 24, 96
FP32_RTOL = 1e-5  # one product, and one of rotated operands

Case = tuple[Callable[[LayerInput, Any], PackedWeight], Any]
CASES: dict[str, Case] = {
    "bcq": (bcq.quantize, bcq.BcqSettings(2, 32)),
    "bcq-compensated": (bcq.quantize, bcq.BcqSettings(2, -1, scale_bits=8, compensate=True)),
    "rtn": (rounding.quantize, rounding.RtnSettings(3, 32)),
    "rtn-compensated": (rounding.quantize, rounding.RtnSettings(3, 32, compensate=True)),
}


def _layer(weight: Tensor | None = None) -> tuple[LayerInput, Tensor]:
    """A layer and inputs of it, whose channels hang together."""
    x = torch.randn(400, COLUMNS) @ (torch.eye(COLUMNS) + 0.1 * torch.randn(COLUMNS, COLUMNS))
    stats = LayerStats(x.abs().amax(0), x.abs().mean(0), x.square().mean(0), magnitude_histogram(x), x[:100], 400)
    weight = torch.randn(ROWS, COLUMNS) if weight is None else weight
    return LayerInput("layer", weight, stats, x.T @ x / len(x)), x


@pytest.mark.parametrize("case", CASES)
def test_the_codes_are_those_of_the_rotated_layer(case: str) -> None:
    quantize, settings = CASES[case]
    layer, x = _layer()
    found, expected = quantize(layer, replace(settings, rotate_inputs=True)), quantize(rotated_inputs(layer), settings)
    assert found.spec == replace(expected.spec, rotate_inputs=True)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())
    assert found.report["weight_error"] == pytest.approx(expected.report["weight_error"], rel=1e-3)
    linear = QuantizedLinear.from_packed(found, torch.randn(ROWS), torch.float32)
    y = rotate(x) @ dequantize(expected).T + linear.bias
    torch.testing.assert_close(linear(x), y, rtol=0, atol=FP32_RTOL * float(y.abs().max()))
    linear.prepare()
    torch.testing.assert_close(linear(x), y, rtol=0, atol=FP32_RTOL * float(y.abs().max()))
    assert all(torch.equal(linear.tensors[name], tensor) for name, tensor in found.tensors.items())


@pytest.mark.parametrize("more", [{}, {"bits": 4}, {"gptq": True}], ids=["int8", "int4", "gptq"])
def test_flattened_codes_are_those_of_the_rotated_layer(more: dict[str, Any]) -> None:
    """Without smoothing, which rotated inputs have none of whatever is set."""
    layer, x = _layer()
    settings = FlattenSettings(rotate_inputs=True, **more)
    plain, turned = FlattenSettings(smoothing="none", **more), replace(rotated_inputs(layer), hessian=None)
    features = flattened_activations(replace(layer, hessian=None), settings)(x)
    assert torch.equal(features, flattened_activations(turned, plain)(rotate(x)))
    hessian = features.T @ features / len(x)
    found, expected = (
        flatten.quantize(replace(own, hessian=hessian), used) for own, used in ((layer, settings), (turned, plain))
    )
    assert found.spec == replace(expected.spec, rotate_inputs=True)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())
    linear, behind = (QuantizedLinear.from_packed(each, torch.randn(ROWS), torch.float32) for each in (found, expected))
    behind.bias = linear.bias
    y = behind(rotate(x))
    assert torch.equal(linear(x), y)
    linear.prepare()
    assert torch.equal(linear(x), y)
    assert not takes_codes(linear.spec, linear.held)
    torch.testing.assert_close(dequantize(found), unrotate(dequantize(expected)))


def test_a_block_reaches_as_much_further_as_its_largest_channel_did() -> None:
    layer, _ = _layer()
    assert layer.stats is not None
    stats = replace(layer.stats, absmax=layer.stats.sample.abs().amax(0))
    stats.absmax[5] = 3 * stats.absmax[:32].max()  # of a block of 32
    vocabulary = stats.absmax.clone()
    vocabulary[70] = 10 * stats.absmax[64:].max()
    found = rotated_stats(replace(stats, vocabulary_absmax=vocabulary))
    seen = rotate(stats.sample).abs().amax(0)
    assert found.vocabulary_absmax is not None
    factors = found.absmax / seen, found.vocabulary_absmax / seen
    for factor, (block, times) in zip(factors, ((0, 3), (2, 10)), strict=True):
        torch.testing.assert_close(factor.view(3, 32)[block], torch.full((32,), float(times)))
        torch.testing.assert_close(factor.view(3, 32)[1], torch.ones(32))


def test_a_block_that_is_0_in_the_sample_reaches_as_far_as_a_single_channel() -> None:
    layer, _ = _layer()
    assert layer.stats is not None
    sample = layer.stats.sample.clone()
    sample[:, 32:64] = 0
    absmax = sample.abs().amax(0)
    absmax[40] = 8
    found = rotated_stats(replace(layer.stats, absmax=absmax, sample=sample))
    torch.testing.assert_close(found.absmax[32:64], torch.full((32,), 8 / 32**0.5))
    assert torch.equal(found.absmax[:32], rotate(sample).abs().amax(0)[:32])


@pytest.mark.parametrize("case", CASES)
def test_a_row_with_outliers_loses_less(case: str) -> None:
    quantize, settings = CASES[case]
    weight = torch.randn(ROWS, COLUMNS)
    weight[:, ::17] *= 12
    layer, x = _layer(weight)
    errors = []
    for on in (False, True):
        packed = quantize(layer, replace(settings, rotate_inputs=on))
        errors.append(float(((dequantize(packed) - weight) @ x.T).norm()))
    assert errors[1] < 0.8 * errors[0]


def test_the_rotated_hessian_is_that_of_rotated_inputs() -> None:
    layer, x = _layer()
    rotated, turned = rotated_inputs(layer), rotate(x)
    assert rotated.hessian is not None
    torch.testing.assert_close(rotated.hessian, turned.T @ turned / len(x), rtol=1e-4, atol=1e-4)
    assert rotated_inputs(layer) is rotated


def test_an_input_without_a_sample_counts_as_independent_channels() -> None:
    """As that of an expert that no token was routed to."""
    layer, _ = _layer()
    assert layer.stats is not None
    bare = replace(layer, stats=replace(layer.stats, sample=torch.empty(0, COLUMNS)))
    importance = rotated_inputs(bare).importance()
    expected = layer.stats.mean_square.view(-1, 32).mean(1).repeat_interleave(32)  # a block is 32 of 96 columns
    torch.testing.assert_close(importance, expected)


def test_an_input_without_a_sample_reaches_as_far_as_single_channels() -> None:
    """What an expert that no token was routed to may still be given."""
    layer, _ = _layer()
    assert layer.stats is not None
    far = torch.arange(1.0, COLUMNS + 1)
    bare = replace(layer.stats, sample=torch.empty(0, COLUMNS), absmax=torch.zeros(COLUMNS), vocabulary_absmax=far)
    found = rotated_stats(bare)
    assert found.vocabulary_absmax is not None
    torch.testing.assert_close(found.vocabulary_absmax[::32], torch.tensor([32.0, 64.0, 96.0]) / 32**0.5)
    assert not found.absmax.any()


@pytest.mark.parametrize(
    ("settings", "stored_specs"),
    [
        (bcq.BcqSettings(rotate_inputs=True), bcq.stored_specs),
        (rounding.RtnSettings(rotate_inputs=True), rounding.stored_specs),
        (FlattenSettings(rotate_inputs=True), flatten.stored_specs),
    ],
    ids=["bcq", "rtn", "flatten"],
)
def test_inputs_without_a_block_are_refused_before_the_work(settings: Any, stored_specs: Any) -> None:
    assert stored_specs(settings, (4, 16))[0].rotate_inputs
    with pytest.raises(RecipeError, match="multiple of 8, not 12"):
        stored_specs(settings, (4, 12))


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("bcq-w4-g128", ["rotate=sideways"], "rotate is 'sideways'; choose true, false or online"),
        ("flatten-o1", ["rotate=sideways"], "rotate is 'sideways'; choose true, false or online"),
        ("bipolar-w4a4", ["rotate=online"], "rotate is 'online'; method bipolar expects bool"),
        ("rtn-w4-g128", ["rotate=online", "zero=integer"], "takes no rotated inputs; set zero=free"),
        ("rtn-w4-g128", ["rotate_inputs=true", "zero=integer"], "takes no rotated inputs; set zero=free"),
        ("hqq-w4-g128", ["rotate=online"], "method hqq has no setting 'rotate'"),
    ],
    ids=["word", "flatten", "bipolar", "zero-online", "zero-inputs", "hqq"],
)
def test_impossible_settings_are_refused(recipe: str, settings: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_recipe(load_recipe(recipe, settings))
