"""The ops of flattened INT8 and INT4 products: activations to codes, codes to y, and codes to the next layer's codes.

``flatten_quantize`` and ``int8_gemm`` take codes row by row; ``flatten_quantize_tiles``, ``int8_gemm_tiles`` and
``int8_gemm_requantize`` in the order that the kernels read (layout.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.cuda.device import gpu_of
from quantkit.formats.flatten import max_code, pack_nibbles, take_slices, unpack_codes
from quantkit.ops.activations import ACTIVATIONS
from quantkit.ops.bipolar.layout import BLOCK_ROWS
from quantkit.ops.flatten.exact import int8_product
from quantkit.ops.flatten.launch import Product, Requantization, multiply, quantize
from quantkit.ops.flatten.layout import (
    code_tiles,
    codes_per_line,
    column_map,
    column_slots,
    tile_codes,
    untile_codes,
)
from quantkit.ops.registry import define_op

_CUDA_MIN_ROWS = 32  # torch._int_mm on CUDA wants more than 16 rows
_CUDA_STEP = 8  # and a multiple of 8 rows of the weight


class FlattenQuantize(NamedTuple):
    """Codes [..., K_ext] int8 of activations x [..., K]: smooth, round and split (FlattenQuant Eq 1-3).

    source_channel, source_segment: [K_ext] int32, the first K being 0..K-1 and 0 (quantkit.formats.flatten).
    act_scale: [1] fp32. smooth_scale: [K] fp32. Values beyond a channel's last slice are clamped.
    """

    x: Tensor
    source_channel: Tensor
    source_segment: Tensor
    act_scale: Tensor
    smooth_scale: Tensor | None
    act_bits: int


class FlattenQuantizeTiles(NamedTuple):
    """FlattenQuantize of x [M, K] in tile order. multiplier: [1] or [K]. packed: INT4 codes as nibbles.

    The kernel leaves rows behind the last of a tile undefined.
    """

    x: Tensor
    source_channel: Tensor
    source_segment: Tensor
    multiplier: Tensor
    act_bits: int
    packed: bool


class Int8Gemm(NamedTuple):
    """y [..., N] = act_scale * weight_scale * (act_codes codes^T) + bias with exact int32 sums.

    act_codes: [..., K_ext] int8. codes: [N, K_ext] int8 or [N, K_ext / 2] uint8 nibbles. act_scale: [1] fp32.
    weight_scale: [1] or [N, 1] fp32. bias: [N]. Scales and bias are applied in fp32 before the cast to out_dtype.
    """

    act_codes: Tensor
    codes: Tensor
    act_scale: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    out_dtype: torch.dtype


class Int8GemmTiles(NamedTuple):
    """Int8Gemm of operands in tile order, the weight's rows in a weight's order: y [tokens, out_features]."""

    act_tiles: Tensor
    tiles: Tensor
    act_scale: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    tokens: int
    out_features: int
    out_dtype: torch.dtype


class Int8GemmRequantize(NamedTuple):
    """Codes of activation(y) for the next Linear, in byte tiles; y as Int8GemmTiles in ``dtype``, which is not written.

    activation: a name of ACTIVATIONS. multiplier, slots, slot_starts, act_bits: of the next Linear, see column_slots.
    The same roundings as in Int8GemmTiles, the activation function and FlattenQuantizeTiles one after the other.
    """

    act_tiles: Tensor
    tiles: Tensor
    act_scale: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    tokens: int
    out_features: int
    dtype: torch.dtype
    activation: str
    multiplier: Tensor
    slots: Tensor
    slot_starts: Tensor
    act_bits: int


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


def _sliced(q: Tensor, source_channel: Tensor, source_segment: Tensor, act_bits: int) -> Tensor:
    in_features, top = q.shape[-1], max_code(act_bits)
    tail = take_slices(q, source_channel[in_features:], source_segment[in_features:], top)
    return torch.cat((q.clamp_(-top, top).to(torch.int8), tail.to(torch.int8)), dim=-1)


def flatten_quantize_reference(op: FlattenQuantize) -> Tensor:
    """Integers held in fp32, cut into slices."""
    q = integer_activations(op.x, op.act_scale, op.smooth_scale)
    return _sliced(q, op.source_channel, op.source_segment, op.act_bits)


def _quantize_cuda(op: FlattenQuantize) -> Tensor:
    x = op.x.reshape(-1, op.x.shape[-1])
    codes = torch.empty(x.shape[0], op.source_channel.shape[0], dtype=torch.int8, device=x.device)
    _quantize_into(codes, x, op, multiplier(op.act_scale, op.smooth_scale))
    return codes.reshape(*op.x.shape[:-1], codes.shape[1])


def _quantize_into(codes: Tensor, x: Tensor, op: FlattenQuantize | FlattenQuantizeTiles, factors: Tensor) -> None:
    if x.shape[0]:
        source, gpu = (op.source_channel, op.source_segment), gpu_of(x.device)
        quantize(x, source, multiplier=factors, codes=codes, act_bits=op.act_bits, gpu=gpu)


def _quantize_tiles_reference(op: FlattenQuantizeTiles) -> Tensor:
    if not op.x.shape[0]:
        return _empty_codes(op)
    codes = _sliced(_rounded(op.x, op.multiplier), op.source_channel, op.source_segment, op.act_bits)
    return tile_codes(pack_nibbles(codes) if op.packed else codes)


def _quantize_tiles_cuda(op: FlattenQuantizeTiles) -> Tensor:
    tiles = _empty_codes(op)
    _quantize_into(tiles, op.x, op, op.multiplier)
    return tiles


def _empty_codes(op: FlattenQuantizeTiles) -> Tensor:
    return code_tiles(op.x.shape[0], op.source_channel.shape[0], op.packed, op.x.device)


def _scaled(total: Tensor, op: Int8Gemm) -> Tensor:
    y = total.float() * (op.act_scale * op.weight_scale.flatten())  # [M, N] times [1] or [N]
    return (y if op.bias is None else y + op.bias.float()).to(op.out_dtype).reshape(*op.act_codes.shape[:-1], -1)


def int8_gemm_reference(op: Int8Gemm) -> Tensor:
    """Exact int32 sums, scaled in fp32."""
    total = int8_product(op.act_codes.reshape(-1, op.act_codes.shape[-1]), unpack_codes(op.codes))
    return _scaled(total, op)


def _gemm_cuda(op: Int8Gemm) -> Tensor:
    """cuBLAS, whose INT8 product needs padded rows on both sides."""
    acts, weight = op.act_codes.reshape(-1, op.act_codes.shape[-1]), unpack_codes(op.codes)
    m, n = acts.shape[0], weight.shape[0]
    acts = pad(acts, (0, 0, 0, max(_CUDA_MIN_ROWS - m, 0))).contiguous()
    weight = pad(weight, (0, 0, 0, -n % _CUDA_STEP))
    return _scaled(torch._int_mm(acts, weight.t())[:m, :n], op)


def _gemm_tiles_reference(op: Int8GemmTiles) -> Tensor:
    if not op.tokens:
        return op.act_tiles.new_empty(0, op.out_features, dtype=op.out_dtype)
    act_codes, codes = (
        unpack_codes(untile_codes(held, count, held.shape[1] * codes_per_line(held.dtype), weight=held is op.tiles))
        for held, count in ((op.act_tiles, op.tokens), (op.tiles, op.out_features))
    )
    width = min(act_codes.shape[1], codes.shape[1])  # nibbles fill longer lines; what is behind K_ext is 0
    scales = op.act_scale, op.weight_scale
    return int8_gemm_reference(Int8Gemm(act_codes[:, :width], codes[:, :width], *scales, op.bias, op.out_dtype))


def _gemm_tiles_cuda(op: Int8GemmTiles) -> Tensor:
    y = torch.empty(op.tokens, op.out_features, dtype=op.out_dtype, device=op.act_tiles.device)
    if op.tokens:
        multiply(Product(op.act_tiles, op.tiles, (op.act_scale, op.weight_scale), op.bias, y))
    return y


def _requantize_reference(op: Int8GemmRequantize) -> Tensor:
    y = _gemm_tiles_reference(Int8GemmTiles(*op[:7], op.dtype))
    source = column_map(op.slots, op.out_features)
    codes = FlattenQuantizeTiles(ACTIVATIONS[op.activation].apply(y), *source, op.multiplier, op.act_bits, False)
    return _quantize_tiles_reference(codes)


def _requantize_cuda(op: Int8GemmRequantize) -> Tensor:
    codes, extended = _empty_next(op), op.out_features + op.slots.shape[1]
    if op.tokens:
        if extended % codes.shape[-1]:
            codes[:, -1].zero_()  # the kernel writes no column behind the last
        number, following = ACTIVATIONS[op.activation].number, (op.multiplier, op.slots, op.slot_starts, op.act_bits)
        requantization = Requantization(op.tokens, op.out_features, op.dtype, number, *following)
        scales = op.act_scale, op.weight_scale
        multiply(Product(op.act_tiles, op.tiles, scales, op.bias, codes, requantization))
    return codes


def _empty_next(op: Int8GemmRequantize) -> Tensor:
    return code_tiles(op.tokens, op.out_features + op.slots.shape[1], False, op.act_tiles.device)


_SAMPLE_SHAPES = ((1, 5, 24, 32), (7, 65, 130, 160), (150, 130, 70, 96))  # M, N, K, K_ext
_TILE_TOKENS = 2 * BLOCK_ROWS  # kernels leave rows behind the last of a tile undefined


def _quantize_samples() -> Iterator[FlattenQuantize]:
    for (tokens, _, in_features, extended), bits, smooth in product(_SAMPLE_SHAPES, (4, 8), (True, False)):
        extra = extended - in_features
        channel = torch.cat((torch.arange(in_features), torch.randint(0, in_features, (extra,)).sort().values)).int()
        segment = torch.cat((torch.zeros(in_features), torch.randint(0, 4, (extra,)))).int()
        x, smooth_scale = torch.randn(tokens, in_features) * 9, torch.rand(in_features) + 0.5
        dtype = torch.float16 if smooth else torch.float32
        yield FlattenQuantize(
            x.to(dtype), channel, segment, torch.tensor([0.2]), smooth_scale if smooth else None, bits
        )


def _quantize_tiles_samples() -> Iterator[FlattenQuantizeTiles]:
    for op in _quantize_samples():
        whole = op.x[:1].repeat(_TILE_TOKENS, 1) + torch.randn(_TILE_TOKENS, 1).to(op.x.dtype)
        factors = multiplier(op.act_scale, op.smooth_scale)
        for packed in {False, op.act_bits == 4}:
            yield FlattenQuantizeTiles(whole, op.source_channel, op.source_segment, factors, op.act_bits, packed)


def _gemm_samples() -> Iterator[Int8Gemm]:
    for (tokens, out_features, _, extended), bits in product(_SAMPLE_SHAPES, (4, 8)):
        top, scale = max_code(bits), torch.tensor([0.013])
        acts, codes = (torch.randint(-top, top + 1, (n, extended), dtype=torch.int8) for n in (tokens, out_features))
        stored, bias = pack_nibbles(codes) if bits == 4 else codes, torch.randn(out_features).half()
        row_scales = torch.rand(out_features, 1) * 0.02
        yield Int8Gemm(acts, stored, scale, scale, bias, torch.float16)
        yield Int8Gemm(acts, stored, scale, row_scales, bias, torch.float16)
        yield Int8Gemm(acts, stored, scale, scale, None, torch.float32)


def _gemm_tiles_samples() -> Iterator[Int8GemmTiles]:
    for op in _gemm_samples():
        sizes = op.act_codes.shape[0], op.codes.shape[0]
        tiles, scales = tile_codes(op.codes, weight=True), (op.act_scale, op.weight_scale)
        yield Int8GemmTiles(tile_codes(op.act_codes), tiles, *scales, op.bias, *sizes, op.out_dtype)
        if op.codes.dtype == torch.uint8:
            acts = tile_codes(pack_nibbles(op.act_codes))
            yield Int8GemmTiles(acts, tiles, *scales, op.bias, *sizes, op.out_dtype)


def _requantize_samples() -> Iterator[Int8GemmRequantize]:
    for op in _gemm_tiles_samples():
        if op.act_tiles.dtype == torch.int8 and op.out_dtype == torch.float16:
            n, tokens = op.out_features, op.act_tiles.shape[0] * BLOCK_ROWS
            channel = torch.cat((torch.arange(n), torch.randint(0, n, (27,)).sort().values)).int()
            segment = torch.cat((torch.zeros(n), torch.randint(1, 4, (27,)))).int()
            following = torch.full((1,), 90.0), *column_slots(channel, segment, n), 8
            yield Int8GemmRequantize(*op[:5], tokens, n, torch.float16, "relu", *following)


flatten_quantize = define_op(
    "flatten_quantize",
    FlattenQuantize,
    reference=flatten_quantize_reference,
    cuda=_quantize_cuda,
    fake=lambda op: op.x.new_empty(*op.x.shape[:-1], op.source_channel.shape[0], dtype=torch.int8),
    samples=_quantize_samples,
)
flatten_quantize_tiles = define_op(
    "flatten_quantize_tiles",
    FlattenQuantizeTiles,
    reference=_quantize_tiles_reference,
    cuda=_quantize_tiles_cuda,
    fake=_empty_codes,
    samples=_quantize_tiles_samples,
)
int8_gemm = define_op(
    "int8_gemm",
    Int8Gemm,
    reference=int8_gemm_reference,
    cuda=_gemm_cuda,
    fake=lambda op: op.act_codes.new_empty(*op.act_codes.shape[:-1], op.codes.shape[0], dtype=op.out_dtype),
    samples=_gemm_samples,
)
int8_gemm_tiles = define_op(
    "int8_gemm_tiles",
    Int8GemmTiles,
    reference=_gemm_tiles_reference,
    cuda=_gemm_tiles_cuda,
    fake=lambda op: op.act_tiles.new_empty(op.tokens, op.out_features, dtype=op.out_dtype),
    samples=_gemm_tiles_samples,
)
int8_gemm_requantize = define_op(
    "int8_gemm_requantize",
    Int8GemmRequantize,
    reference=_requantize_reference,
    cuda=_requantize_cuda,
    fake=_empty_next,
    samples=_requantize_samples,
)
