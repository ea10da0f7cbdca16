"""The ops ``quantkit::bipolar_linear`` and ``bipolar_prepared_linear``, and the arithmetic of bipolar-INT (3.2).

Three forms of the product of two code matrices, equal as integers:
    bitwise_product      the definition: a +-1 product per pair of planes, shifted by i + j and summed (Fig 2)
    popcount_product     what the kernels do: AND and popcount, planes of equal i + j in one accumulator, row sums
    integer_product      the fast twin: one exact floating-point product
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from quantkit.formats.bcq import ROW_WISE, group_width
from quantkit.formats.bipolar import (
    FLOAT_ACT_BITS,
    codes_to_values,
    dequantize_bipolar,
    largest_value,
    quantize_activations,
)
from quantkit.formats.planes import packed_width, unpack_codes
from quantkit.ops.bcq.op import bcq_linear
from quantkit.ops.bipolar.launch import multiply
from quantkit.ops.bipolar.layout import plane_row_sums, tile_weight, untile_weight
from quantkit.ops.registry import LIBRARY

LIBRARY.define(
    "bipolar_prepared_linear(Tensor x, Tensor tiles, Tensor row_sums, Tensor scales, Tensor act_clip, Tensor? bias, "
    "int act_bits, bool per_token) -> Tensor"
)
LIBRARY.define(
    "bipolar_linear(Tensor x, Tensor bit_planes, Tensor scales, Tensor? act_clip, Tensor? bias, "
    "int act_bits, int group_size, bool per_token) -> Tensor"
)

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


def bipolar_linear_reference(
    x: Tensor,
    bit_planes: Tensor,
    scales: Tensor,
    act_clip: Tensor | None,
    bias: Tensor | None,
    act_bits: int,
    group_size: int,
    per_token: bool,
) -> Tensor:
    """y = x W^T + bias: quantize x, multiply the integers exactly, scale in fp32 and round once to x's dtype.

    x [..., K], bit_planes [bits, N, ceil(K/8)], scales [N, G], act_clip [1] or None with act_bits 16 -> [..., N].
    """
    columns, weight_bits = x.shape[-1], bit_planes.shape[0]
    if act_clip is None or act_bits == FLOAT_ACT_BITS:
        weight = dequantize_bipolar(bit_planes, scales, columns, group_size)
        return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    x_codes, step = quantize_activations(x.reshape(-1, columns), act_clip, act_bits, per_token)
    x_values = codes_to_values(x_codes, act_bits)
    w_values = codes_to_values(unpack_codes(bit_planes, columns), weight_bits)
    bound, width = largest_value(act_bits) * largest_value(weight_bits), group_width(group_size, columns)
    y = torch.zeros(x_values.shape[0], w_values.shape[0], dtype=torch.float32, device=x.device)
    for group, start in enumerate(range(0, columns, width)):
        part = slice(start, start + width)
        y += integer_product(x_values[:, part], w_values[:, part], bound).float() * (step * scales[:, group].float())
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype).reshape(*x.shape[:-1], -1)


def bipolar_prepared_linear_reference(
    x: Tensor,
    tiles: Tensor,
    row_sums: Tensor,
    scales: Tensor,
    act_clip: Tensor,
    bias: Tensor | None,
    act_bits: int,
    per_token: bool,
) -> Tensor:
    """bipolar_linear of a per-channel weight in tile order (ops.bipolar_tiles): tiles, row_sums [N], scales [N, 1]."""
    bit_planes = untile_weight(tiles, row_sums.shape[0], packed_width(x.shape[-1]))
    return bipolar_linear_reference(x, bit_planes, scales, act_clip, bias, act_bits, ROW_WISE, per_token)


def _prepared_cuda(
    x: Tensor,
    tiles: Tensor,
    row_sums: Tensor,
    scales: Tensor,
    act_clip: Tensor,
    bias: Tensor | None,
    act_bits: int,
    per_token: bool,
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = multiply(rows, act_clip, (tiles, row_sums, scales), _typed(bias, x.dtype), act_bits, per_token)
    return y.reshape(*x.shape[:-1], -1)


def _linear_cuda(
    x: Tensor,
    bit_planes: Tensor,
    scales: Tensor,
    act_clip: Tensor | None,
    bias: Tensor | None,
    act_bits: int,
    group_size: int,
    per_token: bool,
) -> Tensor:
    """Canonical tensors on a GPU: tiled anew at each call; a model is prepared once when it is loaded.

    Per-group and weight-only weights are binary-coded weights with scales s 2**i, so the bcq kernels multiply them;
    activations are then rounded to their codes first and the product is in x's dtype.
    """
    columns = x.shape[-1]
    if act_clip is not None and group_width(group_size, columns) == columns:
        row_sums = plane_row_sums(bit_planes, columns)
        return _prepared_cuda(x, tile_weight(bit_planes), row_sums, scales, act_clip, bias, act_bits, per_token)
    rounded = x if act_clip is None else round_activations(x, act_clip, act_bits, per_token)
    return bcq_linear(rounded, bit_planes, bcq_scales(scales, bit_planes.shape[0]), None, bias, group_size)


def round_activations(x: Tensor, act_clip: Tensor, act_bits: int, per_token: bool) -> Tensor:
    """x [..., K] with every value replaced by the one its code stands for, in x's dtype."""
    codes, step = quantize_activations(x.reshape(-1, x.shape[-1]), act_clip, act_bits, per_token)
    return (codes_to_values(codes, act_bits).float() * step).to(x.dtype).reshape(x.shape)


def bcq_scales(scales: Tensor, weight_bits: int) -> Tensor:
    """Scales of the same weight in the bcq format: [N, G] -> [bits, N, G], plane i weighing 2**i (exact in fp16)."""
    powers = torch.tensor([1 << i for i in range(weight_bits)], dtype=scales.dtype, device=scales.device)
    return powers[:, None, None] * scales


def _typed(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


def _fake(x: Tensor, bit_planes: Tensor, *_rest: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], bit_planes.shape[1])


def _prepared_fake(x: Tensor, _tiles: Tensor, row_sums: Tensor, *_rest: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], row_sums.shape[0])


LIBRARY.impl("bipolar_linear", bipolar_linear_reference, "CPU")
LIBRARY.impl("bipolar_linear", _linear_cuda, "CUDA")
LIBRARY.impl("bipolar_prepared_linear", bipolar_prepared_linear_reference, "CPU")
LIBRARY.impl("bipolar_prepared_linear", _prepared_cuda, "CUDA")
torch.library.register_fake("quantkit::bipolar_linear", _fake, lib=LIBRARY)
torch.library.register_fake("quantkit::bipolar_prepared_linear", _prepared_fake, lib=LIBRARY)

bipolar_linear = torch.ops.quantkit.bipolar_linear.default
bipolar_prepared_linear = torch.ops.quantkit.bipolar_prepared_linear.default
