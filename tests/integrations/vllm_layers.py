"""Stored Linears of every format in layers that stand in for vLLM's."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.config import CheckpointConfig, StoredLayer, config_to_json
from quantkit.formats.bcq import BcqSpec
from quantkit.formats.bipolar import BipolarSpec
from quantkit.formats.flatten import FlattenSpec
from quantkit.formats.table import FORMATS, format_name
from quantkit.formats.trellis import TrellisSpec
from quantkit.nn.table import LINEARS
from tests.formats.test_shard import random_tensors
from tests.integrations import vllm_stub

K, Q_ROWS, KV_ROWS, TOKENS = 128, 64, 32, 5
BCQ, BCQ3 = BcqSpec(4, 64, True), BcqSpec(3, 32, True)
WEIGHT_ONLY = {
    "bcq": BCQ,
    "bcq-row": BcqSpec(2, -1, False),
    "bcq-scales8": BcqSpec(4, 64, True, scale_bits=8),
    "bipolar": BipolarSpec(3, 16, 64),
    "trellis": TrellisSpec(2, 4),
    "trellis-no-filter": TrellisSpec(1, 6),  # of the quantizer's
}
QUANTIZED_ACTS = {
    "bipolar-w4a8": BipolarSpec(4, 8),
    "bipolar-w4a8-codes": BipolarSpec(4, 8, 32, scale_bits=8),
    "bipolar-w4a8-one-code": BipolarSpec(4, 8, 128, scale_bits=8),
    "flatten": FlattenSpec(8, 8, 160),
    "flatten-w4a4": FlattenSpec(4, 4, 160),
    "flatten-smooth": FlattenSpec(8, 8, 160, smooth=True),
}
ROTATED = {
    "bcq-rotated": BcqSpec(3, -1, True, scale_bits=8, rotate_inputs=True),
    "flatten-rotated": FlattenSpec(8, 8, 160, rotate_inputs=True),
}
SPECS = {**WEIGHT_ONLY, **QUANTIZED_ACTS, **ROTATED}
CUT_AT_ANY_ROW = {name: spec for name, spec in SPECS.items() if not isinstance(spec, TrellisSpec)}
FP32_RTOL, FP32_ATOL = 1e-4, 1e-3  # sums of 128 products in another order
QKV = "model.layers.0.self_attn.qkv_proj"
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
Stored = dict[str, tuple[Any, dict[str, Tensor]]]  # spec (None: floating point) and tensors of each Linear


def stored(name: str, spec: Any, shape: tuple[int, int]) -> Stored:
    if spec is None:
        return {name: (None, {"weight": torch.randn(shape)})}
    return {name: (spec, random_tensors(spec, shape))}


def attention(specs: tuple[Any, Any, Any]) -> Stored:
    linears: Stored = {}
    for name, spec, rows in zip(("q", "k", "v"), specs, (Q_ROWS, KV_ROWS, KV_ROWS), strict=True):
        linears |= stored(f"model.layers.0.self_attn.{name}_proj", spec, (rows, K))
    return linears


def config_of(linears: Stored, **more: Any) -> Any:
    from quantkit.integrations.vllm.config import QuantkitConfig

    layers = {
        name: StoredLayer(spec, shape_of(spec, tensors))
        for name, (spec, tensors) in linears.items()
        if spec is not None
    }
    document = config_to_json(CheckpointConfig(layers, (), {"recipe": "test", "calibration": None}, **more))
    config = QuantkitConfig.from_config(json.loads(json.dumps(document)))
    config.packed_modules_mapping = FUSED
    return config


def shape_of(spec: Any, tensors: dict[str, Tensor]) -> tuple[int, int]:
    first = next(iter(tensors.values()))
    if isinstance(spec, FlattenSpec):
        return first.shape[0], K
    return first.shape[-2], first.shape[-1] * (1 if spec is None else 8)


def weight_of(spec: Any, tensors: dict[str, Tensor]) -> Tensor:
    if spec is None:
        return tensors["weight"]
    return FORMATS[format_name(spec)].dequantize(spec, tensors, shape_of(spec, tensors))


def product_of(spec: Any, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    if spec is None:
        return x @ tensors["weight"].T
    return LINEARS[format_name(spec)].forward(spec, tensors, x, None)


def built(
    config: Any, prefix: str, rows: list[int], total: int, k: int = K, in_features: int = K, **place: int
) -> tuple[Any, Any]:
    layer = vllm_stub.LinearBase(**place)
    method = config.get_quant_method(layer, prefix)
    method.create_weights(layer, k, rows, in_features, total, torch.float32, weight_loader=None)
    return layer, method


def loaded_attention(linears: Stored, **place: int) -> tuple[Any, Any]:
    """The fused layer on one rank."""
    ranks, replicas = place.get("ranks", 1), place.get("replicas", 1)
    rows = [Q_ROWS // ranks, KV_ROWS * replicas // ranks, KV_ROWS * replicas // ranks]
    layer, method = built(config_of(linears), QKV, rows, sum(rows) * ranks, **place)
    for shard_id, (_, tensors) in zip("qkv", linears.values(), strict=True):
        vllm_stub.feed(layer, tensors, shard_id)
    method.process_weights_after_loading(layer)
    return layer, method
