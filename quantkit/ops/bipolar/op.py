"""The ops ``quantkit::bipolar_linear`` and ``bipolar_prepared_linear``, and the arithmetic of bipolar-INT (3.2).

Three forms of the product of two code matrices, equal as integers:
    bitwise_product      the definition: a +-1 product per pair of planes, shifted by i + j and summed (Fig 2)
    popcount_product     what the kernels do: AND and popcount, planes of equal i + j in one accumulator, row sums
    integer_product      the fast twin: one exact floating-point product
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from quantkit.formats.bcq import ROW_WISE, group_count, group_width
from quantkit.formats.bipolar import (
    FLOAT_ACT_BITS,
    LARGEST_BYTE,
    ActCoding,
    act_values,
    codes_to_values,
    decoded_scales,
    dequantize_bipolar,
    largest_act,
    largest_scale,
    largest_value,
)
from quantkit.formats.hadamard import NARROWEST_BLOCK
from quantkit.formats.planes import pack_codes, packed_width, unpack_codes
from quantkit.ops.bcq.op import bcq_linear
from quantkit.ops.bipolar.launch import multiply
from quantkit.ops.bipolar.layout import LINE_BYTES, untile_scales, untile_weight
from quantkit.ops.bipolar.product import Weight
from quantkit.ops.bipolar.weight import takes_tiles, tiled_weight
from quantkit.ops.registry import define_op

_FLOAT32_EXACT = 1 << 24  # integers up to here are exact in fp32, so a product whose partial sums stay below is too


def _planes(codes: Tensor, bits: int) -> list[Tensor]:
    return [((codes >> i) & 1).float() for i in range(bits)]


def bitwise_product(x_codes: Tensor, w_codes: Tensor, act_bits: int, weight_bits: int) -> Tensor:
    """Y = X W^T by decomposition, 1-bit products and recovery, as the paper states them (section 3.2, Fig 2).

    x_codes: [M, K] uint8. w_codes: [N, K] uint8. Returns [M, N] int64.
    """
    total = torch.zeros(x_codes.shape[0], w_codes.shape[0], dtype=torch.int64, device=x_codes.device)
    for j, x_plane in enumerate(_planes(x_codes, act_bits)):
        for i, w_plane in enumerate(_planes(w_codes, weight_bits)):
            partial = (2 * x_plane - 1) @ (2 * w_plane - 1).T
            total += partial.to(torch.int64) << (i + j)
    return total


def popcount_product(x_codes: Tensor, w_codes: Tensor, act_bits: int, weight_bits: int) -> Tensor:
    """The same product through AND and popcount, as the tensor cores compute it.

    With X = 2 U_x - c_x and W = 2 U_w - c_w:  Y = 4 U_x.U_w - 2 c_w rowsum(U_x) - 2 c_x rowsum(U_w) + K c_x c_w,
    and U_x.U_w = sum_l 2**l acc_l with one accumulator for all pairs of planes with i + j = l.
    x_codes: [M, K] uint8. w_codes: [N, K] uint8. Returns [M, N] int64.
    """
    x_planes, w_planes = _planes(x_codes, act_bits), _planes(w_codes, weight_bits)
    dot = torch.zeros(x_codes.shape[0], w_codes.shape[0], dtype=torch.int64, device=x_codes.device)
    for level in range(act_bits + weight_bits - 1):
        pairs = [(j, level - j) for j in range(act_bits) if 0 <= level - j < weight_bits]
        merged = sum(x_planes[j] @ w_planes[i].T for j, i in pairs)
        assert isinstance(merged, Tensor)
        dot += merged.to(torch.int64) << level
    c_x, c_w = largest_value(act_bits), largest_value(weight_bits)
    x_sums, w_sums = x_codes.sum(1, dtype=torch.int64), w_codes.sum(1, dtype=torch.int64)
    return 4 * dot - 2 * c_w * x_sums[:, None] - 2 * c_x * w_sums[None, :] + x_codes.shape[1] * c_x * c_w


def integer_product(x_values: Tensor, w_values: Tensor, largest_product: int) -> Tensor:
    """X W^T of integer matrices, exact: fp32 while every partial sum stays below 2**24, else fp64.

    x_values: [M, K] integer. w_values: [N, K] integer. largest_product: bound on |x * w|.
    Returns [M, N] fp32 or fp64 holding integers.
    """
    exact = x_values.shape[1] * largest_product <= _FLOAT32_EXACT
    dtype = torch.float32 if exact else torch.float64
    return x_values.to(dtype) @ w_values.to(dtype).T


class BipolarLinear(NamedTuple):
    """y [..., N] = x [..., K] W^T + bias of canonical tensors.

    bit_planes: [bits, N, ceil(K/8)] uint8. scales: [N, G] fp16. act_clip: [1], or None with act_bits 16. bias: [N].
    act_zero: each token has a zero point. rotate_inputs: the planes are of W Q, x is multiplied by Q (hadamard.py).
    scale_factors: [N, 1] fp16, in which scales, [N, G] uint8, count; or None.
    """

    x: Tensor
    bit_planes: Tensor
    scales: Tensor
    act_clip: Tensor | None
    bias: Tensor | None
    act_bits: int
    group_size: int
    per_token: bool
    act_zero: bool = False
    rotate_inputs: bool = False
    scale_factors: Tensor | None = None


class BipolarPreparedLinear(NamedTuple):
    """BipolarLinear of a weight in tile order (layout.py), with one scale per output feature or scale codes.

    tiles: see layout.tile_weight. row_sums: [N] int32. scales: [N, 1] fp16. scale_tiles: of a Weight, or None.
    """

    x: Tensor
    tiles: Tensor
    row_sums: Tensor
    scales: Tensor
    act_clip: Tensor
    bias: Tensor | None
    act_bits: int
    per_token: bool
    act_zero: bool = False
    rotate_inputs: bool = False
    scale_tiles: Tensor | None = None


def bipolar_linear_reference(op: BipolarLinear) -> Tensor:
    """Quantize x, multiply the integers exactly, scale in fp32, add the bias in x's dtype, round once to x's dtype."""
    x, (in_features, weight_bits) = op.x, (op.x.shape[-1], op.bit_planes.shape[0])
    if op.act_clip is None or op.act_bits == FLOAT_ACT_BITS:
        scales = decoded_scales(op.scales, op.scale_factors)
        weight = dequantize_bipolar(op.bit_planes, scales, in_features, op.group_size)
        return linear(x, weight.to(x.dtype), None if op.bias is None else op.bias.to(x.dtype))
    x_values, step = act_values(x.reshape(-1, in_features), op.act_clip, _coding(op))
    w_values = codes_to_values(unpack_codes(op.bit_planes, in_features), weight_bits)
    scales, width, largest = op.scales, group_width(op.group_size, in_features), largest_value(weight_bits)
    if op.scale_factors is not None:
        w_values = w_values * scales.repeat_interleave(width, dim=1)[:, :in_features]
        scales, width, largest = op.scale_factors, in_features, LARGEST_BYTE
    bound = largest_act(op.act_bits, op.act_zero) * largest
    y = torch.zeros(x_values.shape[0], w_values.shape[0], dtype=torch.float32, device=x.device)
    for group, start in enumerate(range(0, in_features, width)):
        part = slice(start, start + width)
        y += integer_product(x_values[:, part], w_values[:, part], bound).float() * (step * scales[:, group].float())
    if op.bias is not None:
        y += op.bias.to(x.dtype).float()
    return y.to(x.dtype).reshape(*x.shape[:-1], -1)


def _coding(op: BipolarLinear | BipolarPreparedLinear) -> ActCoding:
    return ActCoding(op.act_bits, op.per_token, op.act_zero, op.rotate_inputs)


def bipolar_prepared_linear_reference(op: BipolarPreparedLinear) -> Tensor:
    """bipolar_linear_reference of the weight that the tiles were made from."""
    out_features, in_features = op.row_sums.shape[0], op.x.shape[-1]
    scales, factors, group_size = op.scales, None, ROW_WISE
    if op.scale_tiles is not None:
        scales = untile_scales(op.scale_tiles, out_features, LINE_BYTES, in_features)
        factors, group_size = op.scales, LINE_BYTES
    plain = BipolarLinear(
        op.x,
        untile_weight(op.tiles, out_features, packed_width(in_features)),
        scales,
        op.act_clip,
        op.bias,
        op.act_bits,
        group_size,
        op.per_token,
        op.act_zero,
        op.rotate_inputs,
        factors,
    )
    return bipolar_linear_reference(plain)


def _prepared_linear_cuda(op: BipolarPreparedLinear, *, weights_ready: bool = True) -> Tensor:
    x = op.x.reshape(-1, op.x.shape[-1])
    weight = Weight(op.tiles, op.row_sums, op.scales, op.scale_tiles)
    bias = None if op.bias is None else op.bias.to(x.dtype)
    y = multiply(x, op.act_clip, weight, bias=bias, coding=_coding(op), weights_ready=weights_ready)
    return y.reshape(*op.x.shape[:-1], -1)


def _linear_cuda(op: BipolarLinear) -> Tensor:
    """Canonical tensors on a GPU: tiled anew at each call; a model is prepared once when it is loaded.

    Other weights, weight-only or per group, are binary-coded ones with scales s 2**i, so the bcq kernels multiply them;
    activations are then rounded to their codes first and the product is in x's dtype.
    """
    in_features, coded = op.x.shape[-1], op.scale_factors is not None
    if op.act_clip is not None and takes_tiles(op.act_bits, op.group_size, in_features, coded=coded):
        return _prepared_linear_cuda(_prepared(op, op.act_clip), weights_ready=False)
    rounded = op.x if op.act_clip is None else round_activations(op, op.act_clip)
    scales = bcq_scales(op.scales, op.bit_planes.shape[0])
    return bcq_linear(rounded, op.bit_planes, scales, None, op.bias, op.group_size, op.scale_factors)


def _prepared(op: BipolarLinear, act_clip: Tensor) -> BipolarPreparedLinear:
    """The same of the weight in tile order."""
    weight = tiled_weight(op.bit_planes, op.scales, op.scale_factors, op.group_size, op.x.shape[-1])
    return BipolarPreparedLinear(
        op.x,
        weight.tiles,
        weight.row_sums,
        weight.scales,
        act_clip,
        op.bias,
        op.act_bits,
        op.per_token,
        op.act_zero,
        op.rotate_inputs,
        weight.scale_tiles,
    )


def round_activations(op: BipolarLinear, act_clip: Tensor) -> Tensor:
    """x [..., K] as the product sees it, in x's dtype: rotated, and every value the one that its code stands for."""
    values, step = act_values(op.x.reshape(-1, op.x.shape[-1]), act_clip, _coding(op))
    return (values.float() * step).to(op.x.dtype).reshape(op.x.shape)


def bcq_scales(scales: Tensor, weight_bits: int) -> Tensor:
    """Scales of the same weight in the bcq format: [N, G] -> [bits, N, G], plane i weighing 2**i (exact in fp16; codes
    stay below 256)."""
    powers = torch.exp2(torch.arange(weight_bits, device=scales.device)).to(scales.dtype)  # no copy: graphs hold it
    return powers[:, None, None] * scales


_SAMPLE_SHAPES = ((1, 5, 40), (7, 65, 1030), (70, 130, 264))  # M, N, K: few tokens for the GEMV, and many
_SAMPLE_GROUP = 64
_SAMPLE_BITS = ((1, 2), (3, 4), (4, 8))  # of weight and activations: binary products, INT8 products
_CODED_BITS = ((1, 2), (4, 8), (6, 8))  # with scale codes
_SAMPLE_EXPANDED = ((257, 70, 264), (8, 8))  # many tokens of many planes, which are expanded in memory on any GPU


def _linear_samples() -> Iterator[BipolarLinear]:
    cases = [*product(_SAMPLE_SHAPES, _SAMPLE_BITS), _SAMPLE_EXPANDED]
    for (tokens, out_features, in_features), (weight_bits, act_bits) in cases:
        codes = torch.randint(0, 1 << weight_bits, (out_features, in_features), dtype=torch.uint8)
        planes, x = pack_codes(codes, weight_bits), torch.randn(tokens, in_features)
        clip, bias = torch.tensor([0.7]), torch.randn(out_features)
        scales = (torch.rand(out_features, 1) * 0.01 + 0.001).half()
        row_wise = BipolarLinear(x, planes, scales, clip, bias, act_bits, ROW_WISE, True)
        yield row_wise
        yield row_wise._replace(x=x.half(), bias=None, per_token=False)
        yield row_wise._replace(act_zero=True)
        if in_features % NARROWEST_BLOCK == 0:
            yield row_wise._replace(x=x.half(), bias=None, rotate_inputs=True)
            yield row_wise._replace(x=x.bfloat16(), act_zero=True, rotate_inputs=True)
        grouped = scales.expand(-1, -(-in_features // _SAMPLE_GROUP)).contiguous()
        by_group = row_wise._replace(x=x.half(), scales=grouped, bias=None, group_size=_SAMPLE_GROUP)
        yield by_group
        yield by_group._replace(act_clip=None, bias=bias.half(), act_bits=FLOAT_ACT_BITS)
    for (tokens, out_features, in_features), bits in product(_SAMPLE_SHAPES, _CODED_BITS):
        yield from _coded_samples(tokens, out_features, in_features, *bits)


def _coded_samples(
    tokens: int, out_features: int, in_features: int, weight_bits: int, act_bits: int
) -> Iterator[BipolarLinear]:
    codes = torch.randint(0, 1 << weight_bits, (out_features, in_features), dtype=torch.uint8)
    for group_size in (LINE_BYTES, ROW_WISE, _SAMPLE_GROUP):
        by_group = out_features, group_count(group_size, in_features)
        coded = BipolarLinear(
            torch.randn(tokens, in_features),
            pack_codes(codes, weight_bits),
            torch.randint(1, largest_scale(weight_bits) + 1, by_group, dtype=torch.uint8),
            torch.tensor([0.7]),
            torch.randn(out_features),
            act_bits,
            group_size,
            True,
            scale_factors=(torch.rand(out_features, 1) * 1e-3 + 1e-4).half(),
        )
        yield coded
        yield coded._replace(x=coded.x.half(), bias=None, per_token=False)
        yield coded._replace(act_zero=True)
        if in_features % NARROWEST_BLOCK == 0:
            yield coded._replace(x=coded.x.bfloat16(), act_zero=True, rotate_inputs=True)
        yield coded._replace(x=coded.x.half(), act_clip=None, act_bits=FLOAT_ACT_BITS)


def _prepared_linear_samples() -> Iterator[BipolarPreparedLinear]:
    for op in _linear_samples():
        coded = op.scale_factors is not None
        if op.act_clip is not None and takes_tiles(op.act_bits, op.group_size, op.x.shape[-1], coded=coded):
            yield _prepared(op, op.act_clip)


bipolar_linear = define_op(
    "bipolar_linear",
    BipolarLinear,
    reference=bipolar_linear_reference,
    cuda=_linear_cuda,
    fake=lambda op: op.x.new_empty(*op.x.shape[:-1], op.bit_planes.shape[1]),
    samples=_linear_samples,
)
bipolar_prepared_linear = define_op(
    "bipolar_prepared_linear",
    BipolarPreparedLinear,
    reference=bipolar_prepared_linear_reference,
    cuda=_prepared_linear_cuda,
    fake=lambda op: op.x.new_empty(*op.x.shape[:-1], op.row_sums.shape[0]),
    samples=_prepared_linear_samples,
)
