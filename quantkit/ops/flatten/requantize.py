"""The op ``quantkit::int8_gemm_requantize``: a product whose result goes on as the next Linear's codes, y unwritten.

It is int8_gemm_tiles, an activation function and flatten_quantize_tiles in one, with the same roundings in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.ops.activations import ACTIVATIONS
from quantkit.ops.flatten.launch import Following, code_tiles, multiply
from quantkit.ops.flatten.op import flatten_quantize_tiles_reference, int8_gemm_tiles_reference
from quantkit.ops.registry import LIBRARY

LIBRARY.define(
    "int8_gemm_requantize(Tensor act_tiles, Tensor tiles, Tensor act_scale, Tensor weight_scale, Tensor? bias,"
    " int rows, int channels, ScalarType dtype, str activation, Tensor multiplier, Tensor slots, Tensor slot_starts,"
    " int act_bits) -> Tensor"
)

_RUN_CHANNELS = 32  # of a warp in kernels/flatten/int8_requantize.cuh


def column_slots(source_channel: Tensor, source_segment: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """The columns behind the first K, by channel: slots [3, K_ext - K] and slot_starts [ceil(K / 32) + 1], int32.

    source_channel, source_segment: [K_ext] int32 (quantkit.formats.flatten). channels: K.
    Rows of slots: column, channel (rising), segment. slot_starts[i]: the first slot of channels from 32 i on.
    """
    channel, order = source_channel[channels:].sort(stable=True)
    slots = torch.stack((order.int() + channels, channel, source_segment[channels:][order]))
    runs = torch.arange(-(-channels // _RUN_CHANNELS) + 1, dtype=torch.int32, device=channel.device)
    return slots, torch.searchsorted(channel, runs * _RUN_CHANNELS, out_int32=True)


def column_map(slots: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Inverse of column_slots: source_channel, source_segment [K_ext] int32."""
    channel = torch.arange(channels + slots.shape[1], dtype=torch.int32, device=slots.device)
    segment, (column, *rest) = torch.zeros_like(channel), slots
    channel[column.long()], segment[column.long()] = rest
    return channel, segment


def int8_gemm_requantize_reference(
    act_tiles: Tensor,
    tiles: Tensor,
    act_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    rows: int,
    channels: int,
    dtype: torch.dtype,
    activation: str,
    multiplier: Tensor,
    slots: Tensor,
    slot_starts: Tensor,
    act_bits: int,
) -> Tensor:
    """Codes of activation(y) for the next Linear, in byte tiles; y [rows, channels] as int8_gemm_tiles in ``dtype``.

    activation: a name of ACTIVATIONS. multiplier, slots, slot_starts, act_bits: of the next Linear, see column_slots.
    """
    y = int8_gemm_tiles_reference(act_tiles, tiles, act_scale, weight_scale, bias, rows, channels, dtype)
    source = column_map(slots, channels)
    return flatten_quantize_tiles_reference(ACTIVATIONS[activation].apply(y), *source, multiplier, act_bits, False)


def int8_gemm_requantize_cuda(
    act_tiles: Tensor,
    tiles: Tensor,
    act_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    rows: int,
    channels: int,
    dtype: torch.dtype,
    activation: str,
    multiplier: Tensor,
    slots: Tensor,
    slot_starts: Tensor,
    act_bits: int,
) -> Tensor:
    """As int8_gemm_requantize_reference, in one kernel; rows behind the last of a tile are left undefined.

    Raises KernelError for another dtype than fp16 and bf16.
    """
    columns = channels + slots.shape[1]
    codes = code_tiles(rows, columns, False, act_tiles.device)
    if rows:
        if columns % codes.shape[-1]:
            codes[:, -1].zero_()  # the kernel writes no column behind the last
        number = ACTIVATIONS[activation].number
        following = Following(rows, channels, dtype, number, multiplier, slots, slot_starts, act_bits)
        multiply(act_tiles, tiles, (act_scale, weight_scale), bias, codes, following)
    return codes


def _fake_requantize(
    act_tiles: Tensor,
    tiles: Tensor,
    act_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    rows: int,
    channels: int,
    dtype: torch.dtype,
    activation: str,
    multiplier: Tensor,
    slots: Tensor,
    slot_starts: Tensor,
    act_bits: int,
) -> Tensor:
    return code_tiles(rows, channels + slots.shape[1], False, act_tiles.device)


LIBRARY.impl("int8_gemm_requantize", int8_gemm_requantize_reference, "CPU")
LIBRARY.impl("int8_gemm_requantize", int8_gemm_requantize_cuda, "CUDA")
torch.library.register_fake("quantkit::int8_gemm_requantize", _fake_requantize, lib=LIBRARY)

int8_gemm_requantize = torch.ops.quantkit.int8_gemm_requantize.default
