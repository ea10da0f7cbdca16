"""Binary-coding format: w[n, k] = sum_i scales[i, n, k // g] * (2 * signs[i, n, k] - 1) + offset[n, k // g].

Source: nuQmm section 2.3 (Eq 1) and 3.1 (group-wise scales). A uniform (RTN, GPTQ) weight is the special case
scales[i] = step * 2**(i - 1); the offset then carries the zero point.
Deviation: the offset per group is not in nuQmm; ``offset: false`` gives the paper's own format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import RecipeError
from quantkit.formats.base import Format, Shape, Tensors, TensorSpec
from quantkit.formats.planes import BITS_PER_BYTE, MAX_BITS, packed_width, unpack_signs

ROW_WISE = -1


@dataclass(frozen=True)
class BcqSpec:
    """weight_bits: q, 1-8 planes. group_size: g columns per scale, a multiple of 8, or -1 for the whole row;
    where K is not a multiple of g the last group is shorter. offset: whether a constant per group is stored."""

    weight_bits: int
    group_size: int
    offset: bool

    def __post_init__(self) -> None:
        check_weight_bits(self.weight_bits)
        check_group_size(self.group_size)


def check_weight_bits(weight_bits: int) -> None:
    """Raise RecipeError unless 1 <= weight_bits <= 8."""
    if not 1 <= weight_bits <= MAX_BITS:
        raise RecipeError(f"weight_bits is {weight_bits}; choose 1 to {MAX_BITS}")


def check_group_size(group_size: int) -> None:
    """Raise RecipeError unless group_size is a positive multiple of 8, or -1 (one group per row)."""
    if group_size != ROW_WISE and (group_size <= 0 or group_size % BITS_PER_BYTE):
        raise RecipeError(
            f"group_size is {group_size}; choose a multiple of {BITS_PER_BYTE}, or {ROW_WISE} for one group per row"
        )


def group_width(group_size: int, columns: int) -> int:
    """Columns per group of a row of ``columns``: group_size, or the whole row where that is shorter or -1."""
    return columns if group_size == ROW_WISE else min(group_size, columns)


def group_count(group_size: int, columns: int) -> int:
    """Groups per row, the last one possibly shorter."""
    return -(-columns // group_width(group_size, columns))


def bcq_tensors(spec: BcqSpec, shape: Shape) -> dict[str, TensorSpec]:
    """signs [bits, N, ceil(K/8)] uint8, scales [bits, N, G] fp16, offset [N, G] fp16 where stored."""
    rows, columns = shape
    groups = group_count(spec.group_size, columns)
    tensors = {
        "signs": TensorSpec((spec.weight_bits, rows, packed_width(columns)), torch.uint8),
        "scales": TensorSpec((spec.weight_bits, rows, groups), torch.float16),
    }
    if spec.offset:
        tensors["offset"] = TensorSpec((rows, groups), torch.float16)
    return tensors


def dequantize_planes(signs: Tensor, scales: Tensor, offset: Tensor | None, columns: int, group_size: int) -> Tensor:
    """The weight [N, columns] fp32 that planes, scales and offset stand for (nuQmm Eq 1).

    signs: [bits, N, ceil(columns/8)] uint8. scales: [bits, N, G]. offset: [N, G] or None.
    """
    width = group_width(group_size, columns)
    whole = columns // width
    weight = torch.zeros(signs.shape[1], columns, dtype=torch.float32, device=signs.device)
    # [N, groups, g] views: the groups of full width, then the shorter last one where there is one
    spans = [(slice(0, whole), slice(0, whole * width), width)]
    if columns % width:
        spans.append((slice(whole, None), slice(whole * width, None), columns % width))
    for plane, scale in zip(signs, scales.float(), strict=True):
        values = unpack_signs(plane, columns)
        for groups, span, wide in spans:
            part = weight[:, span].unflatten(1, (-1, wide))
            part.addcmul_(values[:, span].unflatten(1, (-1, wide)), scale[:, groups, None])
    if offset is not None:
        for groups, span, wide in spans:
            weight[:, span].unflatten(1, (-1, wide)).add_(offset[:, groups, None].float())
    return weight


def _dequantize(spec: BcqSpec, tensors: Tensors, shape: Shape) -> Tensor:
    return dequantize_planes(tensors["signs"], tensors["scales"], tensors.get("offset"), shape[1], spec.group_size)


FORMAT = Format(spec=BcqSpec, tensors=bcq_tensors, dequantize=_dequantize, weight_bits=lambda spec: spec.weight_bits)
