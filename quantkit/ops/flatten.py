"""The ops ``quantkit::flatten_quantize`` (activations to codes) and ``quantkit::int8_gemm`` (codes to y)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.formats.flatten import max_code, take_slices, unpack_codes
from quantkit.ops.library import LIBRARY

LIBRARY.define(
    "flatten_quantize(Tensor x, Tensor source_channel, Tensor source_segment, Tensor act_scale,"
    " Tensor? smooth_scale, int act_bits) -> Tensor"
)
LIBRARY.define(
    "int8_gemm(Tensor act_codes, Tensor codes, Tensor act_scale, Tensor weight_scale, Tensor? bias,"
    " ScalarType out_dtype) -> Tensor"
)

_CUDA_MIN_ROWS = 32  # torch._int_mm on CUDA wants more than 16 rows
_CUDA_STEP = 8  # and a multiple of 8 rows of the weight


def integer_activations(x: Tensor, act_scale: Tensor, smooth_scale: Tensor | None) -> Tensor:
    """q = round(x * m), half to even, m[k] = 1 / (act_scale * smooth_scale[k]) in fp32; integers held in fp32.

    x: [..., K]. NaN gives 0 and Inf the largest float, which the slices clamp.
    """
    step = act_scale if smooth_scale is None else act_scale * smooth_scale
    return (x.float() * step.reciprocal()).round_().nan_to_num_(nan=0.0)


def flatten_quantize_reference(
    x: Tensor,
    source_channel: Tensor,
    source_segment: Tensor,
    act_scale: Tensor,
    smooth_scale: Tensor | None,
    act_bits: int,
) -> Tensor:
    """Smooth, round and split activations (FlattenQuant Eq 1-3): x [..., K] -> codes [..., K_ext] int8.

    source_channel, source_segment: [K_ext] int32, the first K being 0..K-1 and 0 (quantkit.formats.flatten).
    Values beyond a channel's last slice are clamped.
    """
    channels, top = x.shape[-1], max_code(act_bits)
    q = integer_activations(x, act_scale, smooth_scale)
    tail = take_slices(q, source_channel[channels:], source_segment[channels:], top)
    return torch.cat((q.clamp_(-top, top).to(torch.int8), tail.to(torch.int8)), dim=-1)


def _scaled(total: Tensor, act_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = total.float() * (act_scale * weight_scale)
    return (y if bias is None else y + bias.float()).to(dtype)


def int8_gemm_reference(
    act_codes: Tensor,
    codes: Tensor,
    act_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """y = act_scale * weight_scale * (act_codes codes^T) + bias with exact int32 sums.

    act_codes: [..., K_ext] int8. codes: [N, K_ext] int8 or [N, K_ext / 2] uint8 nibbles. bias: [N].
    Returns [..., N]; scale and bias are applied in fp32 before the cast to out_dtype.
    """
    rows = act_codes.reshape(-1, act_codes.shape[-1])
    total = torch._int_mm(rows, unpack_codes(codes).t())
    return _scaled(total, act_scale, weight_scale, bias, out_dtype).reshape(*act_codes.shape[:-1], -1)


def int8_gemm_cuda(
    act_codes: Tensor,
    codes: Tensor,
    act_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """As int8_gemm_reference on cuBLAS, whose INT8 product needs padded rows on both sides."""
    rows, weight = act_codes.reshape(-1, act_codes.shape[-1]), unpack_codes(codes)
    m, n = rows.shape[0], weight.shape[0]
    rows = pad(rows, (0, 0, 0, max(_CUDA_MIN_ROWS - m, 0))).contiguous()
    weight = pad(weight, (0, 0, 0, -n % _CUDA_STEP))
    total = torch._int_mm(rows, weight.t())[:m, :n]
    return _scaled(total, act_scale, weight_scale, bias, out_dtype).reshape(*act_codes.shape[:-1], -1)


def _fake_quantize(
    x: Tensor,
    source_channel: Tensor,
    source_segment: Tensor,
    act_scale: Tensor,
    smooth_scale: Tensor | None,
    act_bits: int,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], source_channel.shape[0], dtype=torch.int8)


def _fake_gemm(
    act_codes: Tensor,
    codes: Tensor,
    act_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return act_codes.new_empty(*act_codes.shape[:-1], codes.shape[0], dtype=out_dtype)


LIBRARY.impl("flatten_quantize", flatten_quantize_reference, "CPU")
LIBRARY.impl("flatten_quantize", flatten_quantize_reference, "CUDA")
LIBRARY.impl("int8_gemm", int8_gemm_reference, "CPU")
LIBRARY.impl("int8_gemm", int8_gemm_cuda, "CUDA")
torch.library.register_fake("quantkit::flatten_quantize", _fake_quantize, lib=LIBRARY)
torch.library.register_fake("quantkit::int8_gemm", _fake_gemm, lib=LIBRARY)

flatten_quantize = torch.ops.quantkit.flatten_quantize.default
int8_gemm = torch.ops.quantkit.int8_gemm.default
