"""y = x W^T + bias for a weight in the ``flatten`` format: integer codes on both sides, int32 sums."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from quantkit.cuda.device import gpu_of
from quantkit.formats.base import Shape, Tensors
from quantkit.formats.flatten import FlattenSpec
from quantkit.nn.inputs import kernel_input
from quantkit.ops.flatten.layout import column_slots, tile_codes, untile_codes
from quantkit.ops.flatten.op import (
    flatten_quantize,
    flatten_quantize_tiles,
    int8_gemm,
    int8_gemm_requantize,
    int8_gemm_tiles,
    multiplier,
)
from quantkit.ops.flatten.plan import multiplies_int4

_INT4 = 4
_MADE_FOR_KERNELS = ("tiles", "multiplier", "slots", "slot_starts")


@dataclass(frozen=True)
class ActCodes:
    """An input [*leading, K] of ``dtype`` that is there as this layer's activation codes only, in tile order."""

    tiles: Tensor
    leading: tuple[int, ...]
    dtype: torch.dtype


def forward(spec: FlattenSpec, tensors: Tensors, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] -> [..., N] in x's dtype."""
    act_codes = flatten_quantize(
        kernel_input(spec, x),
        tensors["source_channel"],
        tensors["source_segment"],
        tensors["act_scale"],
        tensors.get("smooth_scale"),
        spec.act_bits,
    )
    return int8_gemm(act_codes, tensors["codes"], tensors["act_scale"], tensors["weight_scale"], bias, x.dtype)


def prepare(spec: FlattenSpec, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """The codes in tile order, INT4 still as nibbles, the multiplier of activations and the columns by channel."""
    rest = {name: tensor for name, tensor in tensors.items() if name != "codes"}
    factors = multiplier(tensors["act_scale"], tensors.get("smooth_scale"))
    slots, slot_starts = column_slots(tensors["source_channel"], tensors["source_segment"], shape[1])
    made = tile_codes(tensors["codes"], weight=True), factors, slots, slot_starts
    return {**dict(zip(_MADE_FOR_KERNELS, made, strict=True)), **rest}


def restore(spec: FlattenSpec, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """Exact inverse of prepare."""
    rest = {name: tensor for name, tensor in tensors.items() if name not in _MADE_FOR_KERNELS}
    return {"codes": untile_codes(tensors["tiles"], shape[0], spec.extended_channels, weight=True), **rest}


def prepared_forward(
    spec: FlattenSpec, tensors: Tensors, shape: Shape, x: Tensor | ActCodes, bias: Tensor | None
) -> Tensor:
    """As forward, on prepared tensors; x may be there as codes already."""
    if isinstance(x, Tensor):
        x = quantized(spec, tensors, shape, x)
    scales = tensors["act_scale"], tensors["weight_scale"]
    y = int8_gemm_tiles(x.tiles, tensors["tiles"], *scales, bias, prod(x.leading), shape[0], x.dtype)
    return y.reshape(*x.leading, shape[0])


def takes_codes(spec: FlattenSpec, tensors: Tensors) -> bool:
    """Whether another product can write this layer's activation codes.

    Not where it is not prepared, nor rotated inputs, which mix a product's tiles, nor nibbles: two columns of one byte
    may come from different blocks of threads.
    """
    return "tiles" in tensors and not (spec.rotate_inputs or _packs_activations(spec, tensors["tiles"].device))


def requantized_forward(
    source: tuple[FlattenSpec, Tensors, Shape, Tensor | None],
    x: Tensor,
    activation: str,
    target: tuple[FlattenSpec, Tensors],
) -> ActCodes:
    """activation(source(x)) as codes of the target, in one product.

    source: spec, prepared tensors, shape, bias. x: [..., K] of a type in REQUANTIZED_DTYPES. activation: a name of
    ACTIVATIONS. target: spec and prepared tensors, for which takes_codes holds.
    """
    spec, tensors, shape, bias = source
    acts, (target_spec, following) = quantized(spec, tensors, shape, x), target
    tiles = int8_gemm_requantize(
        acts.tiles,
        tensors["tiles"],
        tensors["act_scale"],
        tensors["weight_scale"],
        bias,
        prod(acts.leading),
        shape[0],
        x.dtype,
        activation,
        following["multiplier"],
        following["slots"],
        following["slot_starts"],
        target_spec.act_bits,
    )
    return ActCodes(tiles, acts.leading, x.dtype)


def quantized(spec: FlattenSpec, tensors: Tensors, shape: Shape, x: Tensor) -> ActCodes:
    """x [..., K] as codes of a layer, from its prepared tensors."""
    source, packed = (tensors["source_channel"], tensors["source_segment"]), _packs_activations(spec, x.device)
    flat = kernel_input(spec, x).reshape(-1, shape[1])
    tiles = flatten_quantize_tiles(flat, *source, tensors["multiplier"], spec.act_bits, packed)
    return ActCodes(tiles, tuple(x.shape[:-1]), x.dtype)


def _packs_activations(spec: FlattenSpec, where: torch.device) -> bool:
    """Whether activations go as nibbles too, for INT4 products."""
    both = spec.weight_bits == spec.act_bits == _INT4
    return both and where.type == "cuda" and multiplies_int4(gpu_of(where).architecture)
