"""Weights with a scale for each row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit.formats.base import PackedWeight
from quantkit.formats.flatten import unpack_codes
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.flatten.quantizer import flattened_activations, quantize
from quantkit.quantizers.flatten.settings import FlattenSettings
from tests.quantizers.flatten.layers import FP32_RTOL, PLAIN, fake_quantized, layer_of, sample_of

ROWS = replace(PLAIN, row_scales=True)


def _uneven_layer() -> LayerInput:
    """Rows of W from 1 to 0.01, and one of zeros."""
    layer = layer_of()
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
        features = flattened_activations(layer, settings)(sample_of(layer))
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
        QuantizedLinear.from_packed(packed, None, torch.float32)(sample_of(layer)).double(),
        fake_quantized(packed, sample_of(layer)) if not settings.gptq else _flattened(packed, layer, settings),
        rtol=FP32_RTOL,
        atol=FP32_RTOL,
    )


def _flattened(packed: PackedWeight, layer: LayerInput, settings: FlattenSettings) -> Tensor:
    """y in fp64 of the flattened operands: GPTQ rounds every column for itself."""
    features = flattened_activations(layer, settings)(sample_of(layer)).double()
    codes = unpack_codes(packed.tensors["codes"]).double()[:, : features.shape[1]]
    return features @ (codes * packed.tensors["weight_scale"].double()).t()


def test_row_scales_lose_less_where_rows_differ() -> None:
    layer = _uneven_layer()
    one, own = (quantize(layer, settings) for settings in (PLAIN, ROWS))
    exact = sample_of(layer) @ layer.weight.t()
    errors = []
    for packed in (one, own):
        y = QuantizedLinear.from_packed(packed, None, torch.float32)(sample_of(layer))
        errors.append(((y - exact).square().sum(0) / exact.square().sum(0).clamp_min(1e-12))[-1].item())
    assert errors[1] < 0.05 * errors[0]  # of the smallest row, which one scale leaves few codes
    assert own.report["extended_channels"] <= one.report["extended_channels"]
