"""Binary-coding format: w[n, k] = sum_i scales[i, n, k // g] * (2 * signs[i, n, k] - 1) + offset[n, k // g].

Source: nuQmm section 2.3 (Eq 1) and 3.1 (group-wise scales). A uniform (RTN, GPTQ) weight is the special case
scales[i] = step * 2**(i - 1); the offset then carries the zero point.
Deviation: the offset per group is not in nuQmm; ``offset: false`` gives the paper's own format. With ``scale_bits: 8``
scales and offsets are 8-bit codes that count in one factor of their row: w[n, k] = factor[n] * integer. The integer has
at most 12 bits and the factor 11, so the weight is exact in fp32, in whatever order it is summed.
The input may be rotated (formats/hadamard.py): the planes then hold W Q, and the product is with x Q.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.errors import RecipeError
from quantkit.formats.base import ADDED_LATER, Format, Shape, Tensors, TensorSpec
from quantkit.formats.hadamard import unrotate
from quantkit.formats.planes import BITS_PER_BYTE, MAX_BITS, packed_width, unpack_signs

ROW_WISE = -1
MOST_SCALE_CODE, MOST_OFFSET_CODE = 255, 127
CODE_BITS = 8
SCALE_BITS = (16, CODE_BITS)


@dataclass(frozen=True)
class BcqSpec:
    """weight_bits: q, 1-8 planes. group_size: g columns per scale, a multiple of 8, or -1 for the whole row;
    where K is not a multiple of g the last group is shorter. offset: whether a constant per group is stored.
    scale_bits: 16, or 8 for codes with a factor per row. rotate_inputs: whether x is rotated before the product."""

    weight_bits: int
    group_size: int
    offset: bool
    scale_bits: int = field(default=16, metadata=ADDED_LATER)
    rotate_inputs: bool = field(default=False, metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        check_weight_bits(self.weight_bits)
        check_group_size(self.group_size)
        check_scale_bits(self.scale_bits)


@dataclass(frozen=True)
class BcqTensors:
    """The stored tensors of one weight [N, K], G groups per row.

    signs: [bits, N, ceil(K/8)] uint8, see planes.py. scales: [bits, N, G] fp16, or uint8 codes.
    offset: [N, G] fp16, or int8 codes; None where none is stored.
    scale_factors: [N, 1] fp16, what the codes of a row count in; None with fp16 scales.
    """

    signs: Tensor
    scales: Tensor
    offset: Tensor | None = None
    scale_factors: Tensor | None = None

    @classmethod
    def of(cls, tensors: Tensors) -> BcqTensors:
        """The tensors by their stored names."""
        return cls(**tensors)

    def named(self) -> dict[str, Tensor]:
        """Inverse of ``of``: those that are stored."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def decoded_scales(self) -> Tensor:
        """[bits, N, G] fp32, exact."""
        return _decoded(self.scales, self.scale_factors)

    def decoded_offset(self) -> Tensor | None:
        """[N, G] fp32, exact."""
        return None if self.offset is None else _decoded(self.offset, self.scale_factors)


def _decoded(stored: Tensor, factors: Tensor | None) -> Tensor:
    return stored.float() if factors is None else stored.float() * factors.float()


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


def check_scale_bits(scale_bits: int) -> None:
    """Raise RecipeError unless scale_bits is 16 or 8."""
    if scale_bits not in SCALE_BITS:
        raise RecipeError(f"scale_bits is {scale_bits}; choose 16 (fp16 scales) or 8 (codes with a factor per row)")


def group_width(group_size: int, columns: int) -> int:
    """Columns per group of a row of ``columns``: group_size, or the whole row where that is shorter or -1."""
    return columns if group_size == ROW_WISE else min(group_size, columns)


def group_count(group_size: int, columns: int) -> int:
    """Groups per row, the last one possibly shorter."""
    return -(-columns // group_width(group_size, columns))


def bcq_tensors(spec: BcqSpec, shape: Shape) -> dict[str, TensorSpec]:
    """What is stored, by the names and shapes of BcqTensors."""
    rows, columns = shape
    groups = group_count(spec.group_size, columns)
    codes = spec.scale_bits == CODE_BITS
    tensors = {
        "signs": TensorSpec((spec.weight_bits, rows, packed_width(columns)), torch.uint8),
        "scales": TensorSpec((spec.weight_bits, rows, groups), torch.uint8 if codes else torch.float16),
    }
    if spec.offset:
        tensors["offset"] = TensorSpec((rows, groups), torch.int8 if codes else torch.float16)
    if codes:
        tensors["scale_factors"] = TensorSpec((rows, 1), torch.float16)
    return tensors


def dequantize_planes(signs: Tensor, scales: Tensor, offset: Tensor | None, columns: int, group_size: int) -> Tensor:
    """The weight [N, columns] fp32 that planes, decoded scales and offset stand for (nuQmm Eq 1).

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


def dequantize_stored(stored: BcqTensors, columns: int, group_size: int) -> Tensor:
    """The weight [N, columns] fp32 that the planes stand for: W Q where inputs are rotated."""
    return dequantize_planes(stored.signs, stored.decoded_scales(), stored.decoded_offset(), columns, group_size)


def _dequantize(spec: BcqSpec, tensors: Tensors, shape: Shape) -> Tensor:
    weight = dequantize_stored(BcqTensors.of(tensors), shape[1], spec.group_size)
    return unrotate(weight) if spec.rotate_inputs else weight


FORMAT = Format(spec=BcqSpec, tensors=bcq_tensors, dequantize=_dequantize, weight_bits=lambda spec: spec.weight_bits)
