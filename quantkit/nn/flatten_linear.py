"""y = x W^T + bias for a weight in the ``flatten`` format: integer codes on both sides, int32 sums."""

from __future__ import annotations

from torch import Tensor, device

from quantkit.formats.base import Shape, Tensors
from quantkit.formats.flatten import FlattenSpec
from quantkit.ops.flatten import (
    flatten_quantize,
    flatten_quantize_tiles,
    int8_gemm,
    int8_gemm_tiles,
    multiplier,
    tile_codes,
    untile_codes,
)
from quantkit.ops.flatten_kernels import LIBRARY_PRODUCT, device_path

_INT4 = 4


def forward(spec: FlattenSpec, tensors: Tensors, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] -> [..., N] in x's dtype."""
    act_codes = flatten_quantize(
        x,
        tensors["source_channel"],
        tensors["source_segment"],
        tensors["act_scale"],
        tensors.get("smooth_scale"),
        spec.act_bits,
    )
    return int8_gemm(act_codes, tensors["codes"], tensors["act_scale"], tensors["weight_scale"], bias, x.dtype)


def prepare(spec: FlattenSpec, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """The codes in tile order, INT4 still as nibbles, and the multiplier of activations.

    As they are where the library multiplies them.
    """
    codes = tensors["codes"]
    if codes.is_cuda and device_path(codes.device).kernel == LIBRARY_PRODUCT:
        return dict(tensors)
    rest = {name: tensor for name, tensor in tensors.items() if name != "codes"}
    factors = multiplier(tensors["act_scale"], tensors.get("smooth_scale"))
    return {"tiles": tile_codes(codes, weight=True), "multiplier": factors, **rest}


def restore(spec: FlattenSpec, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """Exact inverse of prepare."""
    if "tiles" not in tensors:
        return dict(tensors)
    rest = {name: tensor for name, tensor in tensors.items() if name not in ("tiles", "multiplier")}
    return {"codes": untile_codes(tensors["tiles"], shape[0], spec.extended_channels, weight=True), **rest}


def prepared_forward(spec: FlattenSpec, tensors: Tensors, shape: Shape, x: Tensor, bias: Tensor | None) -> Tensor:
    """As forward, on prepared tensors."""
    if "tiles" not in tensors:
        return forward(spec, tensors, x, bias)
    rows = x.reshape(-1, shape[1])
    act_tiles = flatten_quantize_tiles(
        rows,
        tensors["source_channel"],
        tensors["source_segment"],
        tensors["multiplier"],
        spec.act_bits,
        _packs_activations(spec, x.device),
    )
    scales = tensors["act_scale"], tensors["weight_scale"]
    y = int8_gemm_tiles(act_tiles, tensors["tiles"], *scales, bias, rows.shape[0], shape[0], x.dtype)
    return y.reshape(*x.shape[:-1], shape[0])


def _packs_activations(spec: FlattenSpec, where: device) -> bool:
    """Whether activations go as nibbles too, for INT4 products."""
    both = spec.weight_bits == spec.act_bits == _INT4
    return both and where.type == "cuda" and device_path(where).int4
