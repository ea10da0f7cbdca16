"""Flattened per-tensor format: static INT8 or INT4 codes of W whose large input channels are split over columns.

Both operands of y = x W^T are signed integers times one scale each (FlattenQuant section 4.1, Eq 1-4):

    y[m, n] = act_scale * weight_scale * sum_c a[m, c] * codes[n, c],      c = 0 .. K_ext - 1

Deviation: with row_scales every output feature has a scale of its own, weight_scale[n].

Column c carries input channel k = source_channel[c]. With q = round(x[m, k] / (smooth_scale[k] * act_scale)) and
Q = 2**(act_bits - 1) - 1, its activation code is the source_segment[c]-th slice of q, Q wide, with q's sign:

    a[m, c] = sign(q) * clamp(|q| - Q * source_segment[c], 0, Q)

so the slices of one channel add up to q until they are all full; there |x| is clamped. Q * act_scale is the
truncation threshold T. The weight is split offline in the same way and each of its slices has its own columns:
a channel with n_x activation slices and n_w weight slices takes n_x * n_w columns.

Column order: c < K is channel c, first slice of both; then the extended columns, by channel; then padding, which is
channel 0 against zero codes, up to a multiple of the recipe's pad_channels_to.

The input may be rotated (formats/hadamard.py): x and W above are then x Q and W Q.

Deviation: Eq 3 is written for x >= 0 (X mod T, floor(X / T)); the sign is carried by every slice here, so that
-x gives the negated codes of x. Splitting the rounded integer q instead of x is the same thing, as T is a whole
number (Q) of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.errors import RecipeError
from quantkit.formats.base import ADDED_LATER, Format, Shape, Tensors, TensorSpec
from quantkit.formats.hadamard import unrotate

FLATTEN_BITS = (4, 8)
COLUMN_STEP = 32  # K_ext is a multiple of this: whole words of nibbles and whole tiles of every integer matmul
_MAX_PRODUCT = 127 * 127
MAX_COLUMNS = (2**31 - 1) // _MAX_PRODUCT // COLUMN_STEP * COLUMN_STEP  # any sum of products fits in int32


@dataclass(frozen=True)
class FlattenSpec:
    """weight_bits, act_bits: 4 or 8. extended_channels: K_ext, all columns of the flattened operands with padding.
    smooth: whether a smooth_scale per input channel is applied at run time (it was not folded into the model).
    rotate_inputs: whether x is rotated before all of this. row_scales: whether every row of W has its own scale."""

    weight_bits: int
    act_bits: int
    extended_channels: int
    smooth: bool = False
    rotate_inputs: bool = field(default=False, metadata=ADDED_LATER)
    row_scales: bool = field(default=False, metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        for bits in (self.weight_bits, self.act_bits):
            if bits not in FLATTEN_BITS:
                raise RecipeError(f"flatten stores INT4 or INT8, not {bits} bits")
        if self.extended_channels % COLUMN_STEP or not 0 < self.extended_channels <= MAX_COLUMNS:
            raise RecipeError(
                f"flatten needs extended_channels to be a multiple of {COLUMN_STEP} up to {MAX_COLUMNS} "
                f"(int32 sums), got {self.extended_channels}"
            )


def max_code(bits: int) -> int:
    """Largest code of a symmetric signed integer, 2**(bits - 1) - 1 (Eq 1)."""
    return 2 ** (bits - 1) - 1


def padded_columns(columns: int, step: int = COLUMN_STEP) -> int:
    """``columns`` rounded up to a multiple of ``step``."""
    return -(-columns // step) * step


def flatten_tensors(spec: FlattenSpec, shape: Shape) -> dict[str, TensorSpec]:
    """codes [N, K_ext] int8 or [N, K_ext / 2] uint8; source_channel, source_segment [K_ext] int32;
    weight_scale fp32 (1,), or (N, 1) with row_scales; act_scale (1,) fp32; smooth_scale [K] fp32 where applied at run
    time."""
    rows, columns = shape
    width = spec.extended_channels
    packed = spec.weight_bits == 4
    tensors = {
        "codes": TensorSpec((rows, width // 2 if packed else width), torch.uint8 if packed else torch.int8),
        "source_channel": TensorSpec((width,), torch.int32),
        "source_segment": TensorSpec((width,), torch.int32),
        "weight_scale": TensorSpec((rows, 1) if spec.row_scales else (1,), torch.float32),
        "act_scale": TensorSpec((1,), torch.float32),
    }
    if spec.smooth:
        tensors["smooth_scale"] = TensorSpec((columns,), torch.float32)
    return tensors


def check_columns(spec: FlattenSpec, tensors: Tensors, shape: Shape) -> None:
    """Check the map from columns to input channels, by which the kernels read the activations.

    Raises ValueError for a channel or a slice that does not exist, or where column c < K is not channel c.
    """
    channels, segments, columns = tensors["source_channel"], tensors["source_segment"], shape[1]
    for name, values, stop in (("source_channel", channels, columns), ("source_segment", segments, len(segments))):
        low, high = (int(bound) for bound in values.aminmax())
        if low < 0 or high >= stop:
            raise ValueError(f"{name} holds {low if low < 0 else high}; only 0 to {stop - 1} exist")
    in_order = torch.arange(columns, dtype=channels.dtype, device=channels.device)
    if not torch.equal(channels[:columns], in_order) or bool(segments[:columns].any()):
        raise ValueError(f"source_channel does not begin with the channels 0 to {columns - 1} in order")


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., C] int8 in -8..7, C even -> [..., C / 2] uint8: two's complement, column 2 b in byte b's low nibble."""
    nibbles = codes.to(torch.uint8) & 0xF
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of pack_nibbles: [..., C / 2] uint8 -> [..., C] int8 in -8..7."""
    low = (packed << 4).view(torch.int8) >> 4  # the arithmetic shift extends the sign
    high = packed.view(torch.int8) >> 4
    return torch.stack((low, high), dim=-1).flatten(-2)


def unpack_codes(codes: Tensor) -> Tensor:
    """The stored codes, packed (uint8) or not (int8), as [N, K_ext] int8."""
    return unpack_nibbles(codes) if codes.dtype == torch.uint8 else codes


def take_slices(integers: Tensor, source_channel: Tensor, segment: Tensor, top: int) -> Tensor:
    """The slice of each column: sign(q) * clamp(|q| - top * segment, 0, top).

    integers: q [..., K], any float dtype, rounded or not. source_channel, segment: [C]. Returns [..., C].
    """
    q, full = integers.index_select(-1, source_channel), segment * top
    # Both halves count a first slice of the right sign only, as the other one is clamped to 0.
    return (q - full).clamp_(0, top) + (q + full).clamp_(-top, 0)


def segment_capacity(source_channel: Tensor, source_segment: Tensor, channels: int) -> Tensor:
    """[K] int32: activation slices that each input channel has, n_x; above n_x * T its values are clamped."""
    slices = torch.ones(channels, dtype=torch.int32, device=source_channel.device)
    return slices.scatter_reduce(0, source_channel.long(), source_segment + 1, reduce="amax")


def _dequantize(spec: FlattenSpec, tensors: Tensors, shape: Shape) -> Tensor:
    """The weight that inputs below the threshold meet: the sum of each channel's first-slice columns, rotated back.

    Columns of later slices repeat it, except under GPTQ, which rounds every column for itself.
    """
    rows, columns = shape
    first = tensors["source_segment"] == 0
    codes = unpack_codes(tensors["codes"])[:, first].float()
    weight = torch.zeros(rows, columns, dtype=torch.float32, device=codes.device)
    weight.index_add_(1, tensors["source_channel"][first], codes)
    weight *= tensors["weight_scale"]
    if spec.smooth:
        weight = weight / tensors["smooth_scale"]
    return unrotate(weight) if spec.rotate_inputs else weight


FORMAT = Format(
    spec=FlattenSpec,
    tensors=flatten_tensors,
    dequantize=_dequantize,
    weight_bits=lambda spec: spec.weight_bits,
    act_bits=lambda spec: spec.act_bits,
    indices=("source_channel", "source_segment"),
    check_indices=check_columns,
)
