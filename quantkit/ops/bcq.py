"""The ops ``quantkit::bcq_linear`` (canonical tensors) and ``quantkit::bcq_linear_prepared`` (tile order).

On the CPU both run the reference twin. On a GPU both run the kernels; the canonical op then builds the tile order on
every call, which is right but slow: modules prepare once at load. ``bcq_dequantize`` gives the weight itself.
fp16 and bf16 activations use the GEMV kernels; fp32 ones an fp32 weight and cuBLAS, so nothing is rounded.
``implementation``: a kernel by name, or the measured choice. ``settled``: no kernel still queued writes the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from quantkit.formats.bcq import dequantize_planes
from quantkit.ops.bcq_choice import choose
from quantkit.ops.bcq_cuda import dequantize_tiles, product
from quantkit.ops.bcq_tiles import tile_scales, tile_signs, untile
from quantkit.ops.library import LIBRARY

AUTO = "auto"

LIBRARY.define(
    "bcq_linear(Tensor x, Tensor signs, Tensor scales, Tensor? offset, Tensor? bias, int group_size) -> Tensor"
)
LIBRARY.define(
    "bcq_linear_prepared(Tensor x, Tensor tiles, Tensor scale_tiles, Tensor? bias, int out_features, "
    "int group_size, str implementation='auto', bool settled=False) -> Tensor"
)
LIBRARY.define(
    "bcq_dequantize(Tensor tiles, Tensor scale_tiles, int out_features, int in_features, int group_size, "
    "ScalarType dtype) -> Tensor"
)


def bcq_linear_reference(
    x: Tensor, signs: Tensor, scales: Tensor, offset: Tensor | None, bias: Tensor | None, group_size: int
) -> Tensor:
    """y = x W^T + bias, W rebuilt from its planes in fp32 and rounded to x's dtype (nuQmm section 5.1)."""
    weight = dequantize_planes(signs, scales, offset, x.shape[-1], group_size)
    return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _linear_cuda(
    x: Tensor, signs: Tensor, scales: Tensor, offset: Tensor | None, bias: Tensor | None, group_size: int
) -> Tensor:
    return _prepared_cuda(
        x, tile_signs(signs), tile_scales(scales, offset, group_size, x.shape[-1]), bias, signs.shape[1], group_size
    )


def _prepared_reference(
    x: Tensor,
    tiles: Tensor,
    scale_tiles: Tensor,
    bias: Tensor | None,
    out_features: int,
    group_size: int,
    implementation: str = AUTO,
    settled: bool = False,
) -> Tensor:
    stored = untile(tiles, scale_tiles, out_features, x.shape[-1], group_size)
    return bcq_linear_reference(x, stored.signs, stored.scales, stored.offset, bias, group_size)


def _prepared_cuda(
    x: Tensor,
    tiles: Tensor,
    scale_tiles: Tensor,
    bias: Tensor | None,
    out_features: int,
    group_size: int,
    implementation: str = AUTO,
    settled: bool = False,
) -> Tensor:
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    if not flat.shape[0]:
        return x.new_empty(*x.shape[:-1], out_features)
    if implementation == AUTO:
        implementation = choose(flat, tiles.shape[2], out_features, group_size)
    y = product(implementation, flat, tiles, scale_tiles, bias, out_features, group_size, settled=settled)
    return y.view(*x.shape[:-1], out_features)


def _dequantize_reference(
    tiles: Tensor, scale_tiles: Tensor, out_features: int, in_features: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    stored = untile(tiles, scale_tiles, out_features, in_features, group_size)
    return dequantize_planes(stored.signs, stored.scales, stored.offset, in_features, group_size).to(dtype)


def _linear_fake(
    x: Tensor, signs: Tensor, scales: Tensor, offset: Tensor | None, bias: Tensor | None, group_size: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], signs.shape[1])


def _prepared_fake(
    x: Tensor,
    tiles: Tensor,
    scale_tiles: Tensor,
    bias: Tensor | None,
    out_features: int,
    group_size: int,
    implementation: str = AUTO,
    settled: bool = False,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _dequantize_fake(
    tiles: Tensor, scale_tiles: Tensor, out_features: int, in_features: int, group_size: int, dtype: torch.dtype
) -> Tensor:
    return tiles.new_empty(out_features, in_features, dtype=dtype)


LIBRARY.impl("bcq_linear", bcq_linear_reference, "CPU")
LIBRARY.impl("bcq_linear", _linear_cuda, "CUDA")
LIBRARY.impl("bcq_linear_prepared", _prepared_reference, "CPU")
LIBRARY.impl("bcq_linear_prepared", _prepared_cuda, "CUDA")
LIBRARY.impl("bcq_dequantize", _dequantize_reference, "CPU")
LIBRARY.impl("bcq_dequantize", dequantize_tiles, "CUDA")
torch.library.register_fake("quantkit::bcq_linear", _linear_fake, lib=LIBRARY)
torch.library.register_fake("quantkit::bcq_linear_prepared", _prepared_fake, lib=LIBRARY)
torch.library.register_fake("quantkit::bcq_dequantize", _dequantize_fake, lib=LIBRARY)

bcq_linear = torch.ops.quantkit.bcq_linear.default
bcq_linear_prepared = torch.ops.quantkit.bcq_linear_prepared.default
bcq_dequantize = torch.ops.quantkit.bcq_dequantize.default
