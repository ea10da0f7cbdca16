"""The ops ``quantkit::flatten_quantize`` (activations to codes) and ``quantkit::int8_gemm`` (codes to y).

Each has a twin on codes in the order that the kernels read (ops.bipolar_tiles): ``flatten_quantize_tiles`` and
``int8_gemm_tiles``. A line of 128 bytes holds 128 INT8 codes (int8 tensors) or 256 INT4 codes (uint8).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.formats.flatten import max_code, pack_nibbles, take_slices, unpack_codes
from quantkit.ops.bipolar.layout import tile_lines, tile_weight, untile_lines, untile_weight
from quantkit.ops.flatten.exact import int8_product
from quantkit.ops.flatten.launch import code_tiles, launch_quantize, multiply
from quantkit.ops.registry import LIBRARY

LIBRARY.define(
    "flatten_quantize(Tensor x, Tensor source_channel, Tensor source_segment, Tensor act_scale,"
    " Tensor? smooth_scale, int act_bits) -> Tensor"
)
LIBRARY.define(
    "int8_gemm(Tensor act_codes, Tensor codes, Tensor act_scale, Tensor weight_scale, Tensor? bias,"
    " ScalarType out_dtype) -> Tensor"
)
LIBRARY.define(
    "flatten_quantize_tiles(Tensor x, Tensor source_channel, Tensor source_segment, Tensor multiplier,"
    " int act_bits, bool packed) -> Tensor"
)
LIBRARY.define(
    "int8_gemm_tiles(Tensor act_tiles, Tensor tiles, Tensor act_scale, Tensor weight_scale, Tensor? bias,"
    " int rows, int channels, ScalarType out_dtype) -> Tensor"
)

_CUDA_MIN_ROWS = 32  # torch._int_mm on CUDA wants more than 16 rows
_CUDA_STEP = 8  # and a multiple of 8 rows of the weight


def multiplier(act_scale: Tensor, smooth_scale: Tensor | None) -> Tensor:
    """1 / (act_scale * smooth_scale) in fp32, which makes x into steps: [K], or [1] without smoothing."""
    return (act_scale if smooth_scale is None else act_scale * smooth_scale).reciprocal()


def integer_activations(x: Tensor, act_scale: Tensor, smooth_scale: Tensor | None) -> Tensor:
    """q = round(x * multiplier), half to even; integers held in fp32.

    x: [..., K]. NaN gives 0 and Inf the largest float, which the slices clamp.
    """
    return _rounded(x, multiplier(act_scale, smooth_scale))


def _rounded(x: Tensor, factors: Tensor) -> Tensor:
    return (x.float() * factors).round_().nan_to_num_(nan=0.0)


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
    return _sliced(integer_activations(x, act_scale, smooth_scale), source_channel, source_segment, act_bits)


def _sliced(q: Tensor, source_channel: Tensor, source_segment: Tensor, act_bits: int) -> Tensor:
    channels, top = q.shape[-1], max_code(act_bits)
    tail = take_slices(q, source_channel[channels:], source_segment[channels:], top)
    return torch.cat((q.clamp_(-top, top).to(torch.int8), tail.to(torch.int8)), dim=-1)


def tile_codes(codes: Tensor, *, weight: bool = False) -> Tensor:
    """Codes [rows, K_ext] int8 or [rows, K_ext / 2] uint8 nibbles in tile order.

    weight: the rows in the order that weights have in their tiles.
    """
    return (tile_weight if weight else tile_lines)(codes.view(torch.uint8)[None]).view(codes.dtype)


def untile_codes(tiles: Tensor, rows: int, columns: int, *, weight: bool = False) -> Tensor:
    """Exact inverse of tile_codes; columns: K_ext."""
    width = columns // 2 if tiles.dtype == torch.uint8 else columns
    return (untile_weight if weight else untile_lines)(tiles.view(torch.uint8), rows, width)[0].view(tiles.dtype)


def flatten_quantize_cuda(
    x: Tensor,
    source_channel: Tensor,
    source_segment: Tensor,
    act_scale: Tensor,
    smooth_scale: Tensor | None,
    act_bits: int,
) -> Tensor:
    """As flatten_quantize_reference, in one kernel. Raises KernelError for other types than fp16, bf16 and fp32."""
    rows = x.reshape(-1, x.shape[-1])
    codes = torch.empty(rows.shape[0], source_channel.shape[0], dtype=torch.int8, device=x.device)
    if rows.shape[0]:
        factors = multiplier(act_scale, smooth_scale)
        launch_quantize(rows, (source_channel, source_segment), factors, codes, act_bits)
    return codes.reshape(*x.shape[:-1], codes.shape[1])


def flatten_quantize_tiles_reference(
    x: Tensor, source_channel: Tensor, source_segment: Tensor, multiplier: Tensor, act_bits: int, packed: bool
) -> Tensor:
    """flatten_quantize of x [M, K] in tile order; multiplier: [1] or [K]; packed: INT4 codes as nibbles."""
    if not x.shape[0]:
        return code_tiles(0, source_channel.shape[0], packed, x.device)
    codes = _sliced(_rounded(x, multiplier), source_channel, source_segment, act_bits)
    return tile_codes(pack_nibbles(codes) if packed else codes)


def flatten_quantize_tiles_cuda(
    x: Tensor, source_channel: Tensor, source_segment: Tensor, multiplier: Tensor, act_bits: int, packed: bool
) -> Tensor:
    """As flatten_quantize_tiles_reference, in one kernel; rows behind the last of a tile are left undefined."""
    tiles = code_tiles(x.shape[0], source_channel.shape[0], packed, x.device)
    if x.shape[0]:
        launch_quantize(x, (source_channel, source_segment), multiplier, tiles, act_bits)
    return tiles


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
    total = int8_product(rows, unpack_codes(codes))
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


def int8_gemm_tiles_reference(
    act_tiles: Tensor,
    tiles: Tensor,
    act_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    rows: int,
    channels: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """int8_gemm of operands in tile order, the weight's rows in a weight's order; returns [rows, channels]."""
    if not rows:
        return act_tiles.new_empty(0, channels, dtype=out_dtype)
    act_codes, codes = (
        unpack_codes(untile_codes(held, count, _columns(held), weight=held is tiles))
        for held, count in ((act_tiles, rows), (tiles, channels))
    )
    width = min(act_codes.shape[1], codes.shape[1])  # nibbles fill longer lines; what is behind K_ext is 0
    return int8_gemm_reference(act_codes[:, :width], codes[:, :width], act_scale, weight_scale, bias, out_dtype)


def _columns(tiles: Tensor) -> int:
    return tiles.shape[1] * tiles.shape[-1] * (2 if tiles.dtype == torch.uint8 else 1)


def int8_gemm_tiles_cuda(
    act_tiles: Tensor,
    tiles: Tensor,
    act_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    rows: int,
    channels: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """As int8_gemm_tiles_reference, on the GPU's kernel (ops.flatten_kernels)."""
    y = torch.empty(rows, channels, dtype=out_dtype, device=act_tiles.device)
    if rows:
        multiply(act_tiles, tiles, (act_scale, weight_scale), bias, y)
    return y


def _fake_quantize(
    x: Tensor,
    source_channel: Tensor,
    source_segment: Tensor,
    act_scale: Tensor,
    smooth_scale: Tensor | None,
    act_bits: int,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], source_channel.shape[0], dtype=torch.int8)


def _fake_quantize_tiles(
    x: Tensor, source_channel: Tensor, source_segment: Tensor, multiplier: Tensor, act_bits: int, packed: bool
) -> Tensor:
    return code_tiles(x.shape[0], source_channel.shape[0], packed, x.device)


def _fake_gemm_tiles(
    act_tiles: Tensor,
    tiles: Tensor,
    act_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    rows: int,
    channels: int,
    out_dtype: torch.dtype,
) -> Tensor:
    return act_tiles.new_empty(rows, channels, dtype=out_dtype)


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
LIBRARY.impl("flatten_quantize", flatten_quantize_cuda, "CUDA")
LIBRARY.impl("flatten_quantize_tiles", flatten_quantize_tiles_reference, "CPU")
LIBRARY.impl("flatten_quantize_tiles", flatten_quantize_tiles_cuda, "CUDA")
LIBRARY.impl("int8_gemm", int8_gemm_reference, "CPU")
LIBRARY.impl("int8_gemm", int8_gemm_cuda, "CUDA")
LIBRARY.impl("int8_gemm_tiles", int8_gemm_tiles_reference, "CPU")
LIBRARY.impl("int8_gemm_tiles", int8_gemm_tiles_cuda, "CUDA")
torch.library.register_fake("quantkit::flatten_quantize", _fake_quantize, lib=LIBRARY)
torch.library.register_fake("quantkit::flatten_quantize_tiles", _fake_quantize_tiles, lib=LIBRARY)
torch.library.register_fake("quantkit::int8_gemm", _fake_gemm, lib=LIBRARY)
torch.library.register_fake("quantkit::int8_gemm_tiles", _fake_gemm_tiles, lib=LIBRARY)

flatten_quantize = torch.ops.quantkit.flatten_quantize.default
flatten_quantize_tiles = torch.ops.quantkit.flatten_quantize_tiles.default
int8_gemm = torch.ops.quantkit.int8_gemm.default
int8_gemm_tiles = torch.ops.quantkit.int8_gemm_tiles.default
