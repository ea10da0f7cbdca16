"""Layers that the tests of the flatten quantizer share, and what their products should give."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats.base import PackedWeight
from quantkit.formats.flatten import segment_capacity
from quantkit.formats.table import dequantize
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.flatten.settings import FlattenSettings
from quantkit.stats import HISTOGRAM_BINS, LayerStats

FP32_RTOL = 2e-5  # sums of a few hundred fp32 products against the same sum in integers

PLAIN = FlattenSettings(smoothing="none", max_flatten_ratio=100.0)


def stats_of(x: Tensor) -> LayerStats:
    """Statistics of rows x [tokens, K], all of them sampled."""
    return LayerStats(x.abs().amax(0), x.abs().mean(0), x.square().mean(0), torch.zeros(HISTOGRAM_BINS), x, len(x))


def layer_of(channels: int = 40, outputs: int = 24, outlier: float = 50.0, seed: int = 0) -> LayerInput:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(96, channels, generator=generator)
    weight = torch.randn(outputs, channels, generator=generator) * 0.1
    x[:, 3] *= outlier
    weight[:, 7] *= 6
    return LayerInput("block.0.proj", weight, stats_of(x))


def sample_of(layer: LayerInput) -> Tensor:
    assert layer.stats is not None
    return layer.stats.sample


def fake_quantized(packed: PackedWeight, x: Tensor) -> Tensor:
    """y in fp64 from rounded, clamped floats: no slices, no integers."""
    channels = packed.shape[1]
    tensors = packed.tensors
    smooth = tensors["smooth_scale"].double() if "smooth_scale" in tensors else torch.ones(channels)
    step = tensors["act_scale"].double().item()
    slices = segment_capacity(tensors["source_channel"], tensors["source_segment"], channels)
    limit = slices * (2 ** (packed.spec.act_bits - 1) - 1)
    rounded = torch.clamp((x.double() / smooth / step).round(), -limit, limit) * step * smooth
    return rounded @ dequantize(packed).double().t()
