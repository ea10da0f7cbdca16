from __future__ import annotations

import pytest
import torch
from torch import nn

from quantkit.formats.base import PackedWeight
from quantkit.formats.flatten import FlattenSpec
from quantkit.nn.clipping import ClipCount, count_clipping
from quantkit.nn.quantized_linear import QuantizedLinear


def _model() -> nn.Sequential:
    """A layer that holds |x| <= 254 in channel 0 and <= 127 in channel 1."""
    tensors = {
        "codes": torch.ones(4, 32, dtype=torch.int8),
        "source_channel": torch.tensor([0, 1, 0] + [0] * 29, dtype=torch.int32),
        "source_segment": torch.tensor([0, 0, 1] + [0] * 29, dtype=torch.int32),
        "weight_scale": torch.ones(1),
        "act_scale": torch.ones(1),
    }
    return nn.Sequential(
        QuantizedLinear.from_packed(PackedWeight(FlattenSpec(8, 8, 32), (4, 2), tensors, {}), None, torch.float32)
    )


def test_values_beyond_a_channels_slices_are_counted() -> None:
    model = _model()
    with count_clipping(model) as counts:
        model(torch.tensor([[254.0, 127.0], [-255.0, 127.4], [300.0, -128.0]]))
        model(torch.tensor([[0.0, 0.0]]))
    assert counts["0"] == ClipCount(seen=8, clipped=3)
    assert counts["0"].rate == pytest.approx(3 / 8)


def test_counting_stops_and_leaves_the_output_alone() -> None:
    model, x = _model(), torch.randn(3, 2) * 200
    before = model(x)
    with count_clipping(model) as counts:
        assert torch.equal(model(x), before)
    model(x)
    assert counts["0"].seen == 6
    assert ClipCount().rate == 0


def test_a_prepared_layer_is_counted_too() -> None:
    model = _model()
    for layer in model:
        assert isinstance(layer, QuantizedLinear)
        layer.prepare()
    with count_clipping(model) as counts:
        model(torch.tensor([[254.0, 127.0], [-255.0, 127.4], [300.0, -128.0]]))
    assert counts["0"] == ClipCount(seen=6, clipped=3)
