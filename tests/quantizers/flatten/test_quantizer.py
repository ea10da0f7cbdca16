from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantkit.errors import RecipeError, StatsError
from quantkit.formats.base import PackedWeight
from quantkit.formats.flatten import segment_capacity, unpack_codes
from quantkit.formats.table import dequantize
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.flatten.quantizer import flattened_activations, plan_layout, quantize
from quantkit.quantizers.flatten.settings import FlattenSettings
from tests.quantizers.flatten.layers import FP32_RTOL, PLAIN, fake_quantized, layer_of, sample_of, stats_of

W8A8 = FlattenSettings(flatten=False, smoothing="none")


def _error(layer: LayerInput, packed: PackedWeight) -> float:
    exact = sample_of(layer) @ layer.weight.t()
    y = QuantizedLinear.from_packed(packed, None, torch.float32)(sample_of(layer))
    return ((y - exact).square().sum() / exact.square().sum()).item()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("smoothing", ["none", "sigmoid"])
def test_integer_arithmetic_agrees_with_fake_quantization(bits: int, smoothing: str) -> None:
    layer = layer_of()
    packed = quantize(layer, replace(PLAIN, bits=bits, smoothing=smoothing))
    x = sample_of(layer) * 1.5  # beyond the calibrated maxima too
    y = QuantizedLinear.from_packed(packed, None, torch.float32)(x)
    expected = fake_quantized(packed, x)
    # x * (1 / step) may fall on the other side of a tie than x / step; none does for this seed.
    torch.testing.assert_close(y.double(), expected, rtol=FP32_RTOL, atol=FP32_RTOL * expected.abs().max().item())


def test_outlier_channels_ruin_w8a8_and_not_flatten() -> None:
    layer = layer_of(outlier=100.0)
    others = replace(layer, weight=layer.weight.clone())
    others.weight[:, 3] = 0  # what the outlier channel's own output would hide
    assert _error(others, quantize(others, W8A8)) > 50 * _error(others, quantize(others, PLAIN))


def test_flatten_reports_what_it_decided() -> None:
    layer = layer_of()
    packed = quantize(layer, PLAIN)
    layout = plan_layout(layer, PLAIN)
    report = packed.report
    assert report["extended_channels"] == int((layout.acts.slices * layout.weights.slices - 1).sum()) > 0
    assert report["flatten_ratio"] == report["extended_channels"] / 40
    assert report["act_threshold"] == pytest.approx(127 * packed.tensors["act_scale"].item(), rel=1e-6)
    assert report["clip_rate"] == 0
    assert report["output_error"] == pytest.approx(_error(layer, packed), rel=0.5)
    assert packed.spec.extended_channels % 32 == 0
    assert packed.spec.extended_channels - 40 - report["extended_channels"] in range(32)
    assert "column_limit" not in report


def test_repeated_columns_hold_equal_codes_and_padding_is_zero() -> None:
    packed = quantize(layer_of(), PLAIN)
    codes, channel = unpack_codes(packed.tensors["codes"]), packed.tensors["source_channel"]
    first = (channel == 3) & (packed.tensors["source_segment"] == 0)
    later = (channel == 3) & (packed.tensors["source_segment"] == 1)
    assert torch.equal(codes[:, first], codes[:, later])
    used = 40 + packed.report["extended_channels"]
    assert not codes[:, used:].any()


def test_column_limit_is_kept_and_told() -> None:
    layer = layer_of(outlier=3000.0)
    packed = quantize(layer, replace(PLAIN, max_flatten_ratio=0.5))
    assert packed.report["extended_channels"] <= 20
    assert "thresholds raised" in packed.report["column_limit"]
    assert _error(layer, packed) < _error(layer, quantize(layer, replace(PLAIN, max_flatten_ratio=0.0))) * 2


def test_clip_rate_counts_what_the_limit_clamps() -> None:
    layer = layer_of(outlier=3000.0)
    packed = quantize(layer, replace(PLAIN, max_flatten_ratio=0.1))
    slices = segment_capacity(packed.tensors["source_channel"], packed.tensors["source_segment"], 40)
    above = sample_of(layer).abs() > (slices * 127 + 0.5) * packed.tensors["act_scale"]
    assert packed.report["clip_rate"] == pytest.approx(above.float().mean().item())


def test_run_time_smoothing_is_undone_by_the_weight() -> None:
    layer = layer_of()
    packed = quantize(layer, replace(PLAIN, smoothing="smoothquant"))
    assert packed.spec.smooth
    torch.testing.assert_close(dequantize(packed), layer.weight, rtol=0, atol=0.02)


def test_folded_layers_are_not_smoothed_twice() -> None:
    layer = layer_of()
    assert layer.stats is not None
    scale = torch.linspace(0.5, 2, 40)
    folded = LayerInput(layer.name, layer.weight * scale, layer.stats, folded_scale=scale)
    packed = quantize(folded, replace(PLAIN, smoothing="sigmoid"))
    assert not packed.spec.smooth
    y = QuantizedLinear.from_packed(packed, None, torch.float32)(sample_of(layer) / scale)
    exact = sample_of(layer) @ layer.weight.t()
    assert (y - exact).square().sum() < 1e-3 * exact.square().sum()


def test_mixed_takes_int4_below_the_limit_only() -> None:
    layer = layer_of()
    ratio = quantize(layer, replace(PLAIN, bits="mixed")).report["kl_ratio"]
    for limit, bits in ((ratio * 1.001, 4), (ratio * 0.999, 8)):
        packed = quantize(layer, replace(PLAIN, bits="mixed", kl_ratio_limit=limit))
        assert (packed.spec.weight_bits, packed.spec.act_bits) == (bits, bits)


def _with_hessian(layer: LayerInput, settings: FlattenSettings) -> LayerInput:
    features = flattened_activations(layer, settings)(sample_of(layer))
    return replace(layer, hessian=features.t() @ features / features.shape[0])


def test_features_are_the_dequantized_codes() -> None:
    layer = layer_of()
    settings = replace(PLAIN, gptq=True, smoothing="sigmoid")
    packed = quantize(_with_hessian(layer, settings), settings)
    features = flattened_activations(layer, settings)(sample_of(layer))
    module = QuantizedLinear.from_packed(packed, None, torch.float32)
    codes = unpack_codes(packed.tensors["codes"])[:, : features.shape[1]].float()
    y = features @ codes.t() * packed.tensors["weight_scale"]
    torch.testing.assert_close(module(sample_of(layer)), y, rtol=FP32_RTOL, atol=FP32_RTOL * y.abs().max().item())


@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act-order"])
def test_gptq_on_the_flattened_weight_beats_rounding(act_order: bool) -> None:
    mix = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    layer = layer_of(outlier=1.0)
    x = (
        torch.randn(400, 6, generator=torch.Generator().manual_seed(2)) @ mix
        + 0.1 * sample_of(layer).repeat(5, 1)[:400]
    )
    layer = replace(layer, stats=stats_of(x))
    settings = replace(PLAIN, bits=4, gptq=True, act_order=act_order)
    compensated = quantize(_with_hessian(layer, settings), settings)
    assert compensated.report["damping"] == 0.01
    features = flattened_activations(layer, settings)(x)
    exact = plan_layout(layer, settings).acts.dequantized(x) @ layer.weight.t()
    errors = []
    for packed in (compensated, quantize(layer, replace(PLAIN, bits=4))):
        codes = unpack_codes(packed.tensors["codes"])[:, : features.shape[1]].float()
        weight_scale, act_scale = packed.tensors["weight_scale"], packed.tensors["act_scale"]
        assert act_scale.item() == pytest.approx(plan_layout(layer, settings).acts.scale)
        errors.append((features @ codes.t() * weight_scale - exact).square().sum())
    assert errors[0] < 0.8 * errors[1]


def test_hopeless_hessian_names_the_layer() -> None:
    layer = replace(layer_of(), hessian=torch.full((100, 100), float("nan")))
    with pytest.raises(StatsError, match=r"block\.0\.proj.*NaN"):
        quantize(layer, replace(PLAIN, gptq=True))


def test_constant_activations_are_exact() -> None:
    layer = LayerInput("proj", torch.randn(8, 32), stats_of(torch.full((16, 32), -3.0)))
    packed = quantize(layer, PLAIN)
    assert packed.report["extended_channels"] >= 0
    y = QuantizedLinear.from_packed(packed, None, torch.float32)(torch.full((1, 32), -3.0))
    expected = torch.full((1, 32), -3.0) @ dequantize(packed).t()
    torch.testing.assert_close(y, expected, rtol=FP32_RTOL, atol=FP32_RTOL * expected.abs().max().item())


@pytest.mark.parametrize("settings", [PLAIN, FlattenSettings()], ids=["plain", "smooth"])
@pytest.mark.parametrize(
    ("value", "match"), [(0.0, "zero"), (float("nan"), "NaN"), (float("inf"), "Inf")], ids=["zero", "nan", "inf"]
)
def test_undefined_activations_name_the_layer(settings: FlattenSettings, value: float, match: str) -> None:
    stats = stats_of(torch.randn(16, 32))
    broken = replace(stats, absmax=torch.full((32,), value), mean_square=torch.full((32,), value))
    with pytest.raises(StatsError, match=rf"layers\.4\.fc1.*{match}"):
        quantize(LayerInput("layers.4.fc1", torch.randn(8, 32), broken), settings)


def test_all_zero_weight_names_the_layer() -> None:
    with pytest.raises(StatsError, match=r"layers\.4\.fc1: weight.*zero"):
        quantize(LayerInput("layers.4.fc1", torch.zeros(8, 32), stats_of(torch.randn(16, 32))), PLAIN)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bits", 3),
        ("bits", "half"),
        ("smoothing", "yes"),
        ("smoothing_strength", 1.5),
        ("threshold_multiplier", 0.0),
        ("max_flatten_ratio", -0.1),
        ("pad_channels_to", 24),
        ("kl_combine", "min"),
        ("kl_bins", 1),
        ("damping", 0.0),
    ],
)
def test_impossible_settings_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(RecipeError, match=key):
        FlattenSettings(**{key: value})  # type: ignore[arg-type]


def test_a_higher_price_buys_fewer_columns_and_a_larger_error() -> None:
    layer = layer_of(channels=96)
    packed = [quantize(layer, replace(PLAIN, column_price=price)) for price in (1e-4, 0.05, 100.0)]
    columns = [one.report["extended_channels"] for one in packed]
    errors = [one.report["output_error"] for one in packed]
    assert columns == sorted(columns, reverse=True)
    assert columns[0] > columns[-1]
    assert errors == sorted(errors)


def test_priced_columns_stay_within_the_limit() -> None:
    packed = quantize(
        layer_of(channels=96), FlattenSettings(smoothing="none", column_price=1e-6, max_flatten_ratio=0.1)
    )
    assert packed.report["extended_channels"] <= 9


def _spiky_layer() -> LayerInput:
    """A channel that a few tokens drive far beyond all others."""
    layer = layer_of(outlier=1.0)
    x = sample_of(layer).clone()
    x[::24, 3] = 400.0
    return replace(layer, stats=stats_of(x))


def test_clip_clamps_rare_values_where_that_costs_least() -> None:
    """One piece per channel, a few rows lost: every token counts alike, so the others' steps matter more."""
    layer = _spiky_layer()
    whole, clipped = (quantize(layer, replace(W8A8, clip=clip)) for clip in (False, True))
    assert clipped.report["clip_rate"] > 0
    assert clipped.report["extended_channels"] == 0
    assert clipped.report["output_error"] < 0.5 * whole.report["output_error"]  # 0.04 of the rows are lost, not all


@pytest.mark.parametrize("flatten", [False, True], ids=["one-piece", "sliced"])
def test_clip_never_raises_the_error_on_the_sample(flatten: bool) -> None:
    layer = layer_of(outlier=1.0)
    settings = FlattenSettings(smoothing="none", flatten=flatten, max_flatten_ratio=0.0)
    whole, clipped = (quantize(layer, replace(settings, clip=clip)) for clip in (False, True))
    assert clipped.report["output_error"] <= whole.report["output_error"]


def test_clip_keeps_within_the_columns_allowed() -> None:
    """With a few columns to spend the spikes are covered by slices, not clamped."""
    layer = _spiky_layer()
    settings = FlattenSettings(smoothing="none", clip=True, max_flatten_ratio=0.25)
    sliced = quantize(layer, settings)
    assert 0 < sliced.report["flatten_ratio"] <= settings.max_flatten_ratio
    assert sliced.report["output_error"] < quantize(layer, replace(W8A8, clip=True)).report["output_error"]


def test_few_columns_cut_the_one_channel_that_stands_out() -> None:
    """One spiky channel among forty: thresholds near the mean of the maxima would cut many, or none is affordable."""
    layer = _spiky_layer()
    settings = FlattenSettings(smoothing="none", column_price=1.0, max_flatten_ratio=0.25)
    near, far = (quantize(layer, replace(settings, few_columns=few)) for few in (False, True))
    assert far.report["extended_channels"] <= 0.25 * layer.weight.shape[1]
    assert far.report["clip_rate"] == 0
    assert far.report["output_error"] < 0.5 * quantize(layer, W8A8).report["output_error"]
    assert far.report["output_error"] <= near.report["output_error"]
