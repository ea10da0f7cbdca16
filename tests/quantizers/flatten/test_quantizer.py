from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit.errors import RecipeError, StatsError
from quantkit.formats.base import PackedWeight
from quantkit.formats.flatten import segment_capacity, unpack_codes
from quantkit.formats.table import dequantize
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.flatten.quantizer import flattened_activations, plan_layout, quantize
from quantkit.quantizers.flatten.settings import FlattenSettings
from quantkit.stats import HISTOGRAM_BINS, LayerStats

FP32_RTOL = 2e-5  # sums of a few hundred fp32 products against the same sum in integers

W8A8 = FlattenSettings(flatten=False, smoothing="none")
PLAIN = FlattenSettings(smoothing="none", max_flatten_ratio=100.0)


def stats_of(x: Tensor) -> LayerStats:
    """Statistics of rows x [tokens, K], all of them sampled."""
    return LayerStats(x.abs().amax(0), x.abs().mean(0), x.square().mean(0), torch.zeros(HISTOGRAM_BINS), x, len(x))


def _layer(channels: int = 40, outputs: int = 24, outlier: float = 50.0, seed: int = 0) -> LayerInput:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(96, channels, generator=generator)
    weight = torch.randn(outputs, channels, generator=generator) * 0.1
    x[:, 3] *= outlier
    weight[:, 7] *= 6
    return LayerInput("block.0.proj", weight, stats_of(x))


def _x(layer: LayerInput) -> Tensor:
    assert layer.stats is not None
    return layer.stats.sample


def _error(layer: LayerInput, packed: PackedWeight) -> float:
    exact = _x(layer) @ layer.weight.t()
    y = QuantizedLinear.from_packed(packed, None, torch.float32)(_x(layer))
    return ((y - exact).square().sum() / exact.square().sum()).item()


def _fake_quantized(packed: PackedWeight, x: Tensor) -> Tensor:
    """y in fp64 from rounded, clamped floats: no slices, no integers."""
    channels = packed.shape[1]
    tensors = packed.tensors
    smooth = tensors["smooth_scale"].double() if "smooth_scale" in tensors else torch.ones(channels)
    step = tensors["act_scale"].double().item()
    slices = segment_capacity(tensors["source_channel"], tensors["source_segment"], channels)
    limit = slices * (2 ** (packed.spec.act_bits - 1) - 1)
    rounded = torch.clamp((x.double() / smooth / step).round(), -limit, limit) * step * smooth
    return rounded @ dequantize(packed).double().t()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("smoothing", ["none", "sigmoid"])
def test_integer_arithmetic_agrees_with_fake_quantization(bits: int, smoothing: str) -> None:
    layer = _layer()
    packed = quantize(layer, replace(PLAIN, bits=bits, smoothing=smoothing))
    x = _x(layer) * 1.5  # beyond the calibrated maxima too
    y = QuantizedLinear.from_packed(packed, None, torch.float32)(x)
    expected = _fake_quantized(packed, x)
    # x * (1 / step) may fall on the other side of a tie than x / step; none does for this seed.
    torch.testing.assert_close(y.double(), expected, rtol=FP32_RTOL, atol=FP32_RTOL * expected.abs().max().item())


def test_outlier_channels_ruin_w8a8_and_not_flatten() -> None:
    layer = _layer(outlier=100.0)
    others = replace(layer, weight=layer.weight.clone())
    others.weight[:, 3] = 0  # what the outlier channel's own output would hide
    assert _error(others, quantize(others, W8A8)) > 50 * _error(others, quantize(others, PLAIN))


def test_flatten_reports_what_it_decided() -> None:
    layer = _layer()
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
    packed = quantize(_layer(), PLAIN)
    codes, channel = unpack_codes(packed.tensors["codes"]), packed.tensors["source_channel"]
    first = (channel == 3) & (packed.tensors["source_segment"] == 0)
    later = (channel == 3) & (packed.tensors["source_segment"] == 1)
    assert torch.equal(codes[:, first], codes[:, later])
    used = 40 + packed.report["extended_channels"]
    assert not codes[:, used:].any()


def test_column_limit_is_kept_and_told() -> None:
    layer = _layer(outlier=3000.0)
    packed = quantize(layer, replace(PLAIN, max_flatten_ratio=0.5))
    assert packed.report["extended_channels"] <= 20
    assert "thresholds raised" in packed.report["column_limit"]
    assert _error(layer, packed) < _error(layer, quantize(layer, replace(PLAIN, max_flatten_ratio=0.0))) * 2


def test_clip_rate_counts_what_the_limit_clamps() -> None:
    layer = _layer(outlier=3000.0)
    packed = quantize(layer, replace(PLAIN, max_flatten_ratio=0.1))
    slices = segment_capacity(packed.tensors["source_channel"], packed.tensors["source_segment"], 40)
    above = _x(layer).abs() > (slices * 127 + 0.5) * packed.tensors["act_scale"]
    assert packed.report["clip_rate"] == pytest.approx(above.float().mean().item())


def test_run_time_smoothing_is_undone_by_the_weight() -> None:
    layer = _layer()
    packed = quantize(layer, replace(PLAIN, smoothing="smoothquant"))
    assert packed.spec.smooth
    torch.testing.assert_close(dequantize(packed), layer.weight, rtol=0, atol=0.02)


def test_folded_layers_are_not_smoothed_twice() -> None:
    layer = _layer()
    assert layer.stats is not None
    scale = torch.linspace(0.5, 2, 40)
    folded = LayerInput(layer.name, layer.weight * scale, layer.stats, folded_scale=scale)
    packed = quantize(folded, replace(PLAIN, smoothing="sigmoid"))
    assert not packed.spec.smooth
    y = QuantizedLinear.from_packed(packed, None, torch.float32)(_x(layer) / scale)
    exact = _x(layer) @ layer.weight.t()
    assert (y - exact).square().sum() < 1e-3 * exact.square().sum()


def test_mixed_takes_int4_below_the_limit_only() -> None:
    layer = _layer()
    ratio = quantize(layer, replace(PLAIN, bits="mixed")).report["kl_ratio"]
    for limit, bits in ((ratio * 1.001, 4), (ratio * 0.999, 8)):
        packed = quantize(layer, replace(PLAIN, bits="mixed", kl_ratio_limit=limit))
        assert (packed.spec.weight_bits, packed.spec.act_bits) == (bits, bits)


def _with_hessian(layer: LayerInput, settings: FlattenSettings) -> LayerInput:
    features = flattened_activations(layer, settings)(_x(layer))
    return replace(layer, hessian=features.t() @ features / features.shape[0])


def test_features_are_the_dequantized_codes() -> None:
    layer = _layer()
    settings = replace(PLAIN, gptq=True, smoothing="sigmoid")
    packed = quantize(_with_hessian(layer, settings), settings)
    features = flattened_activations(layer, settings)(_x(layer))
    module = QuantizedLinear.from_packed(packed, None, torch.float32)
    codes = unpack_codes(packed.tensors["codes"])[:, : features.shape[1]].float()
    y = features @ codes.t() * packed.tensors["weight_scale"]
    torch.testing.assert_close(module(_x(layer)), y, rtol=FP32_RTOL, atol=FP32_RTOL * y.abs().max().item())


@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act-order"])
def test_gptq_on_the_flattened_weight_beats_rounding(act_order: bool) -> None:
    mix = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    layer = _layer(outlier=1.0)
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(2)) @ mix + 0.1 * _x(layer).repeat(5, 1)[:400]
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
    layer = replace(_layer(), hessian=torch.full((100, 100), float("nan")))
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


def test_slices_reach_as_far_as_the_vocabulary_and_the_headroom_ask() -> None:
    layer = _layer()
    assert layer.stats is not None
    far = layer.stats.absmax * torch.linspace(1, 30, len(layer.stats.absmax))
    layer = replace(layer, stats=replace(layer.stats, vocabulary_absmax=far))
    for settings, reach in (
        (PLAIN, layer.stats.absmax),
        (replace(PLAIN, headroom=1.5), 1.5 * layer.stats.absmax),
        (replace(PLAIN, cover_vocabulary=True, headroom=1.5), 1.5 * far),
    ):
        layout = plan_layout(layer, settings)
        assert (layout.acts.capacity() >= reach - layout.acts.scale).all()
        # The paper's threshold follows the text alone, however far slices reach.
        assert layout.acts.threshold == pytest.approx(plan_layout(layer, PLAIN).acts.threshold)


def _of_a_longer_text(layer: LayerInput) -> LayerInput:
    """The sample is a quarter of the text, which reached twice as far; four times the text should, once more."""
    assert layer.stats is not None
    return replace(layer, stats=replace(layer.stats, absmax=2 * layer.stats.absmax, tokens=4 * layer.stats.tokens))


def test_a_channel_has_one_slice_more_where_a_longer_text_would_reach_beyond_its_last() -> None:
    layer, settings = _of_a_longer_text(_layer()), replace(PLAIN, threshold_multiplier=2.0)
    plain, longer = (plan_layout(layer, replace(settings, longer_text=factor)) for factor in (1.0, 4.0))
    beyond = 2 * plain.operands.act_absmax > plain.acts.capacity()
    assert 0 < beyond.sum() < len(beyond)
    assert torch.equal(longer.acts.slices, plain.acts.slices + beyond.long())


def test_rotated_inputs_have_no_slices_for_a_longer_text() -> None:
    layer, settings = _of_a_longer_text(_layer(channels=64)), replace(PLAIN, rotate_inputs=True)
    plain, longer = (plan_layout(layer, replace(settings, longer_text=factor)) for factor in (1.0, 4.0))
    assert torch.equal(longer.acts.slices, plain.acts.slices)


ROWS = replace(PLAIN, row_scales=True)


def _uneven_layer() -> LayerInput:
    """Rows of W from 1 to 0.01, and one of zeros."""
    layer = _layer()
    sizes = torch.logspace(0, -2, len(layer.weight))[:, None]
    sizes[5] = 0
    return replace(layer, weight=layer.weight * sizes)


@pytest.mark.parametrize(
    "settings",
    [
        replace(ROWS, column_price=0.01),
        replace(ROWS, max_flatten_ratio=0.2),
        replace(ROWS, clip=True),
        replace(ROWS, flatten=False),
        replace(ROWS, bits=4),
        replace(ROWS, bits="mixed"),
        replace(ROWS, rotate_inputs=False, gptq=True),
    ],
    ids=["priced", "limited", "clipped", "whole", "int4", "mixed", "gptq"],
)
def test_every_row_has_its_own_scale_and_fills_its_codes(settings: FlattenSettings) -> None:
    layer = _uneven_layer()
    if settings.gptq:
        features = flattened_activations(layer, settings)(_x(layer))
        layer = replace(layer, hessian=features.t() @ features)
    packed = quantize(layer, settings)
    codes, top = unpack_codes(packed.tensors["codes"]), 2 ** (packed.spec.weight_bits - 1) - 1
    assert packed.spec.row_scales
    assert packed.tensors["weight_scale"].shape == (len(layer.weight), 1)
    largest = codes.abs().amax(dim=1)
    used = layer.weight.abs().amax(dim=1) > 0
    # GPTQ moves errors to later columns, so the largest weight's code may be another.
    assert (largest[used] >= (top // 2 if settings.gptq else top)).all()
    assert not largest[~used].any()
    assert (packed.tensors["weight_scale"] > 0).all()
    torch.testing.assert_close(
        QuantizedLinear.from_packed(packed, None, torch.float32)(_x(layer)).double(),
        _fake_quantized(packed, _x(layer)) if not settings.gptq else _flattened(packed, layer, settings),
        rtol=FP32_RTOL,
        atol=FP32_RTOL,
    )


def _flattened(packed: PackedWeight, layer: LayerInput, settings: FlattenSettings) -> Tensor:
    """y in fp64 of the flattened operands: GPTQ rounds every column for itself."""
    features = flattened_activations(layer, settings)(_x(layer)).double()
    codes = unpack_codes(packed.tensors["codes"]).double()[:, : features.shape[1]]
    return features @ (codes * packed.tensors["weight_scale"].double()).t()


def test_row_scales_lose_less_where_rows_differ() -> None:
    layer = _uneven_layer()
    one, own = (quantize(layer, settings) for settings in (PLAIN, ROWS))
    exact = _x(layer) @ layer.weight.t()
    errors = []
    for packed in (one, own):
        y = QuantizedLinear.from_packed(packed, None, torch.float32)(_x(layer))
        errors.append(((y - exact).square().sum(0) / exact.square().sum(0).clamp_min(1e-12))[-1].item())
    assert errors[1] < 0.05 * errors[0]  # of the smallest row, which one scale leaves few codes
    assert own.report["extended_channels"] <= one.report["extended_channels"]


def test_a_higher_price_buys_fewer_columns_and_a_larger_error() -> None:
    layer = _layer(channels=96)
    packed = [quantize(layer, replace(PLAIN, column_price=price)) for price in (1e-4, 0.05, 100.0)]
    columns = [one.report["extended_channels"] for one in packed]
    errors = [one.report["output_error"] for one in packed]
    assert columns == sorted(columns, reverse=True)
    assert columns[0] > columns[-1]
    assert errors == sorted(errors)


def test_priced_columns_stay_within_the_limit() -> None:
    packed = quantize(_layer(channels=96), FlattenSettings(smoothing="none", column_price=1e-6, max_flatten_ratio=0.1))
    assert packed.report["extended_channels"] <= 9


@pytest.mark.parametrize(
    "bad", [{"headroom": 0.9}, {"longer_text": 0.5}, {"column_price": -1.0}], ids=lambda bad: next(iter(bad))
)
def test_impossible_room_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match="choose"):
        FlattenSettings(**bad)  # type: ignore[arg-type]


def _spiky_layer() -> LayerInput:
    """A channel that a few tokens drive far beyond all others."""
    layer = _layer(outlier=1.0)
    x = _x(layer).clone()
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
    layer = _layer(outlier=1.0)
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
