"""Bipolar-INT format: an n-bit code u stands for the odd integer 2 u - (2**n - 1), every bit counting as +1 or -1.

    value = sum_i (2 b_i - 1) 2**i = 2 u - (2**n - 1)          (Bipolar-INT Eq 1)
    w[n, k] = scales[n, k // g] * value(code[n, k])

Symmetric, without a sign bit and without a zero: 1 bit is {-1, +1}, 2 bits {-3, -1, 1, 3}. Bit i of every code is
stored in plane i, the planes one after the other (section 4.1: decomposition, reassembly, concatenation).
Beyond the paper, activations may have a zero point z per token: a code then stands for 2 u - 2 z, which is the bipolar
value plus a number of the token's own, and the product grows by that number times the row sum of W. And their input may
be rotated (formats/hadamard.py): the planes then hold W Q. With ``scale_bits: 8`` the scales of a row are codes that
count in one factor of it:

    w[n, k] = scale_factors[n] * (scales[n, k // g] * value(code[n, k]))

The integer in brackets is a signed byte: scales are at most 127 // (2**weight_bits - 1). So a row's product is one sum
of integers, whatever the groups.
Deviation: planes are packed into bytes, not into 32-bit words; four of them are the paper's word on any little-endian
machine, and a row needs no padding to 32 columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.errors import RecipeError, StatsError
from quantkit.formats.base import ADDED_LATER, Format, Shape, Tensors, TensorSpec
from quantkit.formats.bcq import (
    CODE_BITS,
    check_group_size,
    check_scale_bits,
    check_weight_bits,
    group_count,
    group_width,
)
from quantkit.formats.hadamard import rotate, unrotate
from quantkit.formats.planes import MAX_BITS, packed_width, unpack_codes

FLOAT_ACT_BITS = 16
PER_TOKEN, PER_TENSOR = "per_token", "per_tensor"
LARGEST_BYTE = 127
"""Of a scale code times a value."""
MOST_CODED_BITS = 6
"""Weight bits of scale codes: from 7 on there would be one code, 1, or none."""
_INT32_SUMS = 1 << 31


@dataclass(frozen=True)
class ActCoding:
    """What activations become. bits: of a code. per_token, zero, rotated: as BipolarSpec says."""

    bits: int
    per_token: bool = True
    zero: bool = False
    rotated: bool = False


@dataclass(frozen=True)
class BipolarSpec:
    """weight_bits: 1-8. act_bits: 1-8, or 16 for activations left in floating point (weight only).

    group_size: columns per weight scale, a multiple of 8, or -1 for one scale per row (per channel).
    act_granularity: ``per_token`` (range taken from each row of x as it comes) or ``per_tensor`` (fixed range).
    act_zero: whether each token has a zero point. rotate_inputs: whether x is rotated before it is quantized.
    scale_bits: 16, or 8 for codes with a factor per row, which up to 6 weight bits can have.
    """

    weight_bits: int
    act_bits: int
    group_size: int = -1
    act_granularity: str = PER_TOKEN
    act_zero: bool = field(default=False, metadata=ADDED_LATER)
    rotate_inputs: bool = field(default=False, metadata=ADDED_LATER)
    scale_bits: int = field(default=16, metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        check_weight_bits(self.weight_bits)
        check_scale_bits(self.scale_bits)
        if self.coded and self.weight_bits > MOST_CODED_BITS:
            raise RecipeError(
                f"scale_bits {CODE_BITS} takes weight_bits from 1 to {MOST_CODED_BITS}, not {self.weight_bits}, as a "
                "scale times a value must fit a byte; choose fewer weight_bits, or scale_bits 16"
            )
        check_act_bits(self.act_bits)
        check_group_size(self.group_size)
        check_act_granularity(self.act_granularity)
        if self.act_bits == FLOAT_ACT_BITS and (self.act_zero or self.rotate_inputs):
            raise RecipeError("act_zero and rotate_inputs are for quantized activations; choose act_bits from 1 to 8")
        if self.act_zero and self.act_granularity != PER_TOKEN:
            raise RecipeError(f"act_zero takes each token's own range; choose act_granularity {PER_TOKEN}")

    @property
    def coded(self) -> bool:
        """Whether scales are codes with a factor per row."""
        return self.scale_bits == CODE_BITS

    @property
    def coding(self) -> ActCoding:
        """What activations become."""
        return ActCoding(self.act_bits, self.act_granularity == PER_TOKEN, self.act_zero, self.rotate_inputs)


def check_act_bits(act_bits: int) -> None:
    """Raise RecipeError unless act_bits is 1-8 or 16."""
    if act_bits != FLOAT_ACT_BITS and not 1 <= act_bits <= MAX_BITS:
        raise RecipeError(f"act_bits is {act_bits}; choose 1 to {MAX_BITS}, or {FLOAT_ACT_BITS} for weight only")


def check_act_granularity(act_granularity: str) -> None:
    """Raise RecipeError unless act_granularity is per_token or per_tensor."""
    if act_granularity not in (PER_TOKEN, PER_TENSOR):
        raise RecipeError(f"act_granularity is {act_granularity!r}; choose {PER_TOKEN} or {PER_TENSOR}")


def check_exact(weight_bits: int, act_bits: int, columns: int, act_zero: bool = False, coded: bool = False) -> None:
    """Raise RecipeError where a sum of ``columns`` products may leave int32, the accumulator of every kernel.

    coded: with scale codes kernels add up twice the bytes.
    """
    largest = 2 * LARGEST_BYTE if coded else largest_value(weight_bits)
    if largest * largest_act(act_bits, act_zero) * columns >= _INT32_SUMS:
        raise RecipeError(f"W{weight_bits}A{act_bits} over {columns} columns may overflow 32-bit sums; use fewer bits")


def largest_value(bits: int) -> int:
    """2**bits - 1: the largest value, the negated smallest value and the largest code of a width."""
    return (1 << bits) - 1


def largest_scale(weight_bits: int) -> int:
    """The largest scale code of a width."""
    return LARGEST_BYTE // largest_value(weight_bits)


def largest_act(act_bits: int, act_zero: bool) -> int:
    """The largest magnitude of an activation's value: with a zero point the range may lie on one side of zero."""
    return largest_value(act_bits) * (2 if act_zero else 1)


def codes_to_values(codes: Tensor, bits: int) -> Tensor:
    """The odd integers that codes stand for (Eq 1): uint8 [...] -> int16 [...]."""
    return codes.to(torch.int16) * 2 - largest_value(bits)


def values_to_codes(values: Tensor, bits: int) -> Tensor:
    """Exact inverse of codes_to_values: odd integers [...] -> uint8 codes [...].

    Raises StatsError for a value that is even or out of range: bipolar-INT has no code for it.
    """
    limit = largest_value(bits)
    if not bool(((values.remainder(2) == 1) & (values.abs() <= limit)).all()):
        raise StatsError(f"bipolar-INT of {bits} bits holds the odd integers from {-limit} to {limit} only")
    return ((values + limit) // 2).to(torch.uint8)


def nearest_codes(x: Tensor, step: Tensor, bits: int) -> Tensor:
    """The codes whose values times step lie nearest to x, clipped to the range; ties go up in even columns, else down.

    x: [..., K] floating point. step: > 0 or 0 (then x is 0 or clipped to nothing), broadcastable to x.
    Returns uint8 codes [..., K]. Every operation is one correctly rounded fp32 operation, so that a kernel that does
    the same ones gets the same codes. Zero has no code: it is a tie, and a row of zeros (after a ReLU most of x)
    becomes +1, -1, +1, ... steps, whose errors cancel in the sum over K instead of adding up.
    """
    limit = float(largest_value(bits))
    divisor = torch.where(step > 0, step, torch.ones_like(step))
    scaled = (x.float() / divisor + limit) * 0.5
    codes = (scaled + 0.5).floor_()
    codes[..., 1::2] = (scaled[..., 1::2] - 0.5).ceil_()
    return codes.clamp_(0.0, limit).to(torch.uint8)


def step_of_range(clip: Tensor, bits: int) -> Tensor:
    """The step at which the largest value stands for ``clip``: fp32."""
    clip = clip.float()
    return clip / torch.full_like(clip, largest_value(bits))  # by a number, GPUs multiply with its rounded inverse


def quantize_activations(x: Tensor, act_clip: Tensor, act_bits: int, per_token: bool) -> tuple[Tensor, Tensor]:
    """Codes and steps of activations.

    x: [M, K]. act_clip: [1], see bipolar_tensors.
    Returns codes [M, K] uint8 and step [M, 1] fp32; a row of zeros has step 0.
    """
    x = x.float()
    clip = x.abs().amax(dim=1, keepdim=True) * act_clip if per_token else act_clip.float().expand(x.shape[0], 1)
    step = step_of_range(clip, act_bits)
    return nearest_codes(x, step, act_bits), step


def quantize_with_zero(x: Tensor, act_clip: Tensor, act_bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, steps and zero points of activations whose range reaches from each row's least to its largest value.

    x: [M, K]. act_clip: [1], the fraction of both ends that is kept. The range always holds 0, which is exact.
    Returns codes u [M, K] uint8, step [M, 1] fp32 and zero [M, 1] int32 in 0 .. 2**act_bits - 1: x is near
    step * 2 * (u - zero). Ties go up in even columns, else down. Kernels repeat every operation bit for bit.
    """
    x, limit = x.float(), largest_value(act_bits)
    above = x.amax(dim=1, keepdim=True).clamp_min(0.0) * act_clip
    below = (-x).amax(dim=1, keepdim=True).clamp_min(0.0) * act_clip
    reach = above + below
    step = reach / torch.full_like(reach, 2 * limit)
    divisor = torch.where(step > 0, step, torch.ones_like(step))
    zero = torch.where(step > 0, (below / divisor * 0.5).round(), torch.zeros_like(step)).clamp_(0, limit)
    half = (x / divisor + 2.0 * zero) * 0.5
    codes = half.floor()
    rest = half - codes
    codes[..., ::2] += rest[..., ::2] >= 0.5
    codes[..., 1::2] += rest[..., 1::2] > 0.5
    return codes.clamp_(0.0, limit).to(torch.uint8), step, zero.to(torch.int32)


def act_values(x: Tensor, act_clip: Tensor, coding: ActCoding) -> tuple[Tensor, Tensor]:
    """The integers [M, K] int16 that activations x [M, K] become, and the step [M, 1] fp32 that they count."""
    x = rotate(x) if coding.rotated else x
    if coding.zero:
        codes, step, zero = quantize_with_zero(x, act_clip, coding.bits)
        return 2 * (codes.to(torch.int16) - zero.to(torch.int16)), step
    codes, step = quantize_activations(x, act_clip, coding.bits, coding.per_token)
    return codes_to_values(codes, coding.bits), step


def bipolar_tensors(spec: BipolarSpec, shape: Shape) -> dict[str, TensorSpec]:
    """bit_planes [bits, N, ceil(K/8)] uint8, scales [N, G] fp16 and, with quantized activations, act_clip [1] fp32.

    With scale codes scales are uint8, and scale_factors [N, 1] fp16 stand beside them. act_clip: the fraction of each
    token's absmax (per_token) or the absolute value (per_tensor) that is the end of the range.
    """
    rows, columns = shape
    by_group = rows, group_count(spec.group_size, columns)
    tensors = {"bit_planes": TensorSpec((spec.weight_bits, rows, packed_width(columns)), torch.uint8)}
    if spec.coded:
        tensors["scales"] = TensorSpec(by_group, torch.uint8, largest_scale(spec.weight_bits))
        tensors["scale_factors"] = TensorSpec((rows, 1), torch.float16)
    else:
        tensors["scales"] = TensorSpec(by_group, torch.float16)
    if spec.act_bits != FLOAT_ACT_BITS:
        tensors["act_clip"] = TensorSpec((1,), torch.float32)
    return tensors


def decoded_scales(scales: Tensor, scale_factors: Tensor | None) -> Tensor:
    """Stored scales [N, G], or codes with factors [N, 1], as fp32: exact."""
    return scales.float() if scale_factors is None else scales.float() * scale_factors.float()


def dequantize_bipolar(bit_planes: Tensor, scales: Tensor, columns: int, group_size: int) -> Tensor:
    """The weight [N, columns] fp32 that planes [bits, N, ceil(columns/8)] and decoded scales [N, G] stand for."""
    values = codes_to_values(unpack_codes(bit_planes, columns), bit_planes.shape[0])
    width = group_width(group_size, columns)
    return values.float() * scales.float().repeat_interleave(width, dim=-1)[:, :columns]


def _dequantize(spec: BipolarSpec, tensors: Tensors, shape: Shape) -> Tensor:
    scales = decoded_scales(tensors["scales"], tensors.get("scale_factors"))
    weight = dequantize_bipolar(tensors["bit_planes"], scales, shape[1], spec.group_size)
    return unrotate(weight) if spec.rotate_inputs else weight


FORMAT = Format(
    spec=BipolarSpec,
    tensors=bipolar_tensors,
    dequantize=_dequantize,
    weight_bits=lambda spec: spec.weight_bits,
    act_bits=lambda spec: spec.act_bits,
)
