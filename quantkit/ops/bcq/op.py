"""The ops ``quantkit::bcq_linear`` (canonical tensors) and ``quantkit::bcq_linear_prepared`` (tile order).

On the CPU both run the reference twin. On a GPU both run the kernels; the canonical op then builds the tile order on
every call, which is right but slow: modules prepare once at load. ``bcq_dequantize`` gives the weight itself.
fp16 and bf16 activations use the GEMV kernels; fp32 ones an fp32 weight and cuBLAS, so nothing is rounded.
``implementation``: a kernel by name, or the measured choice. ``settled``: no kernel still queued writes the weight.
Factors come with 8-bit scales and are None with fp16 ones. Each op has one Python function per signature; it puts
the tensors into a BcqTensors or BcqTiles, and what is behind it takes those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from quantkit.formats.bcq import BcqTensors, dequantize_stored
from quantkit.ops.bcq.autotune import choose
from quantkit.ops.bcq.launch import dequantize_tiles, product
from quantkit.ops.bcq.layout import BcqTiles, tile, untile
from quantkit.ops.epilogue import AS_IT_IS, Finish, finished
from quantkit.ops.registry import LIBRARY

AUTO = "auto"


def bcq_linear_reference(x: Tensor, stored: BcqTensors, bias: Tensor | None, group_size: int) -> Tensor:
    """y = x W^T + bias, W rebuilt from its planes in fp32 and rounded to x's dtype (nuQmm section 5.1)."""
    weight = dequantize_stored(stored, x.shape[-1], group_size)
    return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _product(
    x: Tensor,
    weight: BcqTiles,
    bias: Tensor | None,
    implementation: str,
    *,
    settled: bool,
    finish: Finish = AS_IT_IS,
) -> Tensor:
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    if not flat.shape[0]:
        return x.new_empty(*x.shape[:-1], weight.rows)
    if implementation == AUTO:
        implementation = choose(flat, weight.weight_bits, weight.rows, weight.group_size, weight.scale_bits)
    y = product(implementation, flat, weight, bias, settled=settled, finish=finish)
    return y.view(*x.shape[:-1], weight.rows)


def bcq_finished(x: Tensor, weight: BcqTiles, bias: Tensor | None, finish: Finish) -> Tensor:
    """``finish`` of x [..., K] W^T + bias, in the product's own kernel; the weight is settled, see above.

    Not an op: for generation under CUDA graphs.
    """
    if x.is_cuda:
        return _product(x, weight, bias, AUTO, settled=True, finish=finish)
    return finished(bcq_linear_reference(x, untile(weight), bias, weight.group_size), finish)


def _linear(
    x: Tensor,
    signs: Tensor,
    scales: Tensor,
    offset: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    scale_factors: Tensor | None = None,
) -> Tensor:
    stored = BcqTensors(signs, scales, offset, scale_factors)
    if x.is_cuda:
        return _product(x, tile(stored, x.shape[-1], group_size), bias, AUTO, settled=False)
    return bcq_linear_reference(x, stored, bias, group_size)


def _linear_prepared(
    x: Tensor,
    tiles: Tensor,
    scale_tiles: Tensor,
    bias: Tensor | None,
    out_features: int,
    group_size: int,
    implementation: str = AUTO,
    settled: bool = False,
    factor_tiles: Tensor | None = None,
) -> Tensor:
    weight = BcqTiles(tiles, scale_tiles, factor_tiles, out_features, x.shape[-1], group_size)
    if x.is_cuda:
        return _product(x, weight, bias, implementation, settled=settled)
    return bcq_linear_reference(x, untile(weight), bias, group_size)


def _dequantize(
    tiles: Tensor,
    scale_tiles: Tensor,
    out_features: int,
    in_features: int,
    group_size: int,
    dtype: torch.dtype,
    factor_tiles: Tensor | None = None,
) -> Tensor:
    weight = BcqTiles(tiles, scale_tiles, factor_tiles, out_features, in_features, group_size)
    if tiles.is_cuda:
        return dequantize_tiles(weight, dtype)
    return dequantize_stored(untile(weight), in_features, group_size).to(dtype)


def _register(name: str, schema: str, function: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    """Define an op, the function on the CPU and on a GPU, the fake for tracing; the callable op."""
    LIBRARY.define(name + schema)
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, function, device)
    torch.library.register_fake(f"quantkit::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.quantkit, name).default


bcq_linear = _register(
    "bcq_linear",
    "(Tensor x, Tensor signs, Tensor scales, Tensor? offset, Tensor? bias, int group_size, "
    "Tensor? scale_factors=None) -> Tensor",
    _linear,
    lambda x, signs, *_: x.new_empty(*x.shape[:-1], signs.shape[1]),
)
bcq_linear_prepared = _register(
    "bcq_linear_prepared",
    "(Tensor x, Tensor tiles, Tensor scale_tiles, Tensor? bias, int out_features, int group_size, "
    "str implementation='auto', bool settled=False, Tensor? factor_tiles=None) -> Tensor",
    _linear_prepared,
    lambda x, tiles, scale_tiles, bias, out_features, *_: x.new_empty(*x.shape[:-1], out_features),
)
bcq_dequantize = _register(
    "bcq_dequantize",
    "(Tensor tiles, Tensor scale_tiles, int out_features, int in_features, int group_size, ScalarType dtype, "
    "Tensor? factor_tiles=None) -> Tensor",
    _dequantize,
    lambda tiles, scale_tiles, rows, columns, group_size, dtype, *_: tiles.new_empty(rows, columns, dtype=dtype),
)
