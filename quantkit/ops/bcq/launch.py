"""The bcq kernels on a GPU: what each needs, its launch, and the product through any of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from quantkit.cuda.device import Gpu, compute_capability, processor_count
from quantkit.cuda.launch import DTYPE_CODES, launch
from quantkit.errors import KernelError
from quantkit.formats.bcq import group_count, group_width
from quantkit.ops.bcq.instances import (
    LUT_BLOCK_TILES,
    LUT_SHARED,
    LUT_WARPS,
    SUM_PARTIALS,
    GemvTile,
    dequantize_unit,
    gemv_case,
    lut_residency,
    lut_unit,
    segment_columns,
)
from quantkit.ops.bcq.layout import BcqTiles, tile_counts
from quantkit.ops.bcq.plan import plan_gemv
from quantkit.ops.epilogue import AS_IT_IS, Finish, finished

BINARY, INT8, LUT, DEQUANTIZE = "bcq_binary_gemv", "bcq_int8_gemv", "bcq_lut_gemv", "bcq_dequantize"
KERNELS = (BINARY, INT8, LUT, DEQUANTIZE)

_WORD, _WARP, _BLOCK_THREADS, _VECTOR_BYTES = 32, 32, 256, 16
_GEMV_TYPES = (torch.float16, torch.bfloat16)


def _vectors(x: Tensor) -> bool:
    """Whether every row of x can be read 16 bytes at a time."""
    return x.shape[1] % (_VECTOR_BYTES // 2) == 0 and x.data_ptr() % _VECTOR_BYTES == 0


def binary_segment(group_size: int, columns: int) -> int | None:
    """Columns per activation scale in bcq_binary_gemv, or None where the group size rules it and bcq_int8_gemv out."""
    if group_count(group_size, columns) == 1:
        return segment_columns(0)  # one group: every segment belongs to it
    return segment_columns(group_size) if group_size % _WORD == 0 else None


def _magic(divisor: int) -> int:
    """2^32 / divisor rounded up, as a signed 32-bit integer; 0 for the divisor 1."""
    unsigned = 0 if divisor == 1 else -(-(1 << 32) // divisor)
    return unsigned - (1 << 32) if unsigned >> 31 else unsigned


def tensor_core_gemv(
    x: Tensor,
    weight: BcqTiles,
    bias: Tensor | None,
    *,
    int8: bool,
    settled: bool = False,
    finish: Finish = AS_IT_IS,
    tile: GemvTile | None = None,
) -> Tensor:
    """y [M, N] = ``finish`` of x [M, K] W^T + bias on tensor cores; any M.

    x: contiguous fp16 or bf16. bias: in x's type. int8: signs as bytes, made for M = 2 to 8; else as bits, for M = 1.
    settled: nothing queued on the GPU still writes the weight, so it may be read before the previous kernel ends.
    tile: another block layout than the table's, for tuning.
    Raises KernelError where the group size is no multiple of 32.
    """
    tokens, columns = x.shape
    segment = binary_segment(weight.group_size, columns)
    if segment is None:
        raise KernelError(f"{BINARY} and {INT8} need a group size that is a multiple of 32, not {weight.group_size}")
    case = gemv_case(weight.weight_bits, segment, weight.scale_bits, tokens, int8=int8)
    plan = plan_gemv(
        case,
        entries=weight.entries,
        tile_counts=tile_counts(weight.rows, columns),
        gpu=Gpu(compute_capability(x.device), processor_count(x.device)),
        tile=tile,
    )
    y = torch.empty(tokens, weight.rows, dtype=x.dtype, device=x.device)
    per_group = max(1, -(-group_width(weight.group_size, columns) // case.segment))
    launch(
        plan.unit,
        x.device,
        grid=(plan.blocks, -(-tokens // case.tokens)),
        block=(plan.warps * _WARP,),
        args=(
            weight.tiles,
            weight.scale_tiles,
            weight.factor_tiles,
            x,
            bias,
            finish.addend(y),
            y,
            tokens,
            weight.rows,
            columns,
            weight.groups,
            _magic(per_group),
            weight.entries,
            plan.pass_tiles,
            *divmod(tile_counts(weight.rows, columns)[0], plan.blocks // plan.cluster),
            DTYPE_CODES[x.dtype],
            finish.number,
            int(_vectors(x)),
        ),
        shared_mem=plan.shared_mem,
        overlap=settled,
        cluster=plan.cluster,
    )
    return y


def lut_gemv(
    x: Tensor, weight: BcqTiles, bias: Tensor | None, *, settled: bool = False, finish: Finish = AS_IT_IS
) -> Tensor:
    """y [M, N] = ``finish`` of x [M, K] W^T + bias through look-up tables (nuQmm 3.2); any group size, for few rows.

    x: contiguous fp16 or bf16. bias: in x's type. settled: see tensor_core_gemv.
    """
    tokens, columns = x.shape
    row_tiles, k_tiles = tile_counts(weight.rows, columns)
    width = group_width(weight.group_size, columns)
    fine = weight.groups > 1 and width % _WORD != 0
    pairs = -(-k_tiles // LUT_BLOCK_TILES)
    resident = lut_residency(weight.weight_bits, fine, compute_capability(x.device))
    one_wave = resident * processor_count(x.device) // pairs
    blocks = max(1, min(-(-row_tiles // LUT_WARPS), one_wave))  # tables of idle warps would be built for nothing
    partial = torch.empty(pairs, tokens, weight.rows, dtype=torch.float32, device=x.device)
    y = torch.empty(tokens, weight.rows, dtype=x.dtype, device=x.device)
    dtype = DTYPE_CODES[x.dtype]
    launch(
        lut_unit(weight.weight_bits, fine, weight.scale_bits),
        x.device,
        grid=(blocks, pairs, tokens),
        block=(LUT_WARPS * _WARP,),
        args=(
            weight.tiles,
            weight.scale_tiles,
            weight.factor_tiles,
            x,
            partial,
            weight.rows,
            columns,
            weight.groups,
            width,
            weight.entries,
            dtype,
            int(_vectors(x)),
        ),
        shared_mem=LUT_SHARED,
        overlap=settled,
    )
    launch(
        SUM_PARTIALS,
        x.device,
        grid=(-(-y.numel() // _BLOCK_THREADS),),
        block=(_BLOCK_THREADS,),
        args=(partial, bias, finish.addend(y), y, pairs, tokens, weight.rows, finish.number, dtype),
        overlap=True,
    )
    return y


def dequantize_tiles(weight: BcqTiles, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in fp16, bf16 or fp32 (nuQmm section 5.1)."""
    row_tiles, k_tiles = tile_counts(weight.rows, weight.columns)
    dequantized = torch.empty(weight.rows, weight.columns, dtype=dtype, device=weight.tiles.device)
    launch(
        dequantize_unit(weight.weight_bits, weight.scale_bits),
        weight.tiles.device,
        grid=(-(-row_tiles * k_tiles * _WARP // _BLOCK_THREADS),),
        block=(_BLOCK_THREADS,),
        args=(
            weight.tiles,
            weight.scale_tiles,
            weight.factor_tiles,
            dequantized,
            weight.rows,
            weight.columns,
            weight.groups,
            group_width(weight.group_size, weight.columns),
            weight.entries,
            DTYPE_CODES[dtype],
        ),
    )
    return dequantized


def candidates(dtype: torch.dtype, group_size: int, columns: int) -> tuple[str, ...]:
    """Kernels that can run a product with activations of ``dtype``; fp32 activations keep fp32 weights (dequantize)."""
    if dtype not in _GEMV_TYPES:
        return (DEQUANTIZE,)
    return KERNELS if binary_segment(group_size, columns) else (LUT, DEQUANTIZE)


def product(
    kernel: str,
    x: Tensor,
    weight: BcqTiles,
    bias: Tensor | None,
    *,
    settled: bool = False,
    finish: Finish = AS_IT_IS,
) -> Tensor:
    """y [M, N] = ``finish`` of x [M, K] W^T + bias through the named kernel; settled: see tensor_core_gemv.

    Raises KernelError for an unknown kernel, or one that cannot run these shapes or types.
    """
    usable = candidates(x.dtype, weight.group_size, x.shape[-1])
    if kernel not in usable:
        raise KernelError(
            f"kernel {kernel!r} cannot run {x.dtype} activations with group size {weight.group_size}; "
            f"choose {', '.join(usable)}"
        )
    bias = None if bias is None else bias.to(x.dtype)
    gemv = _GEMVS.get(kernel)
    if gemv is None:
        return finished(linear(x, dequantize_tiles(weight, x.dtype), bias), finish)
    return gemv(x, weight, bias, settled=settled, finish=finish)


_GEMVS: dict[str, Callable[..., Tensor]] = {
    BINARY: partial(tensor_core_gemv, int8=False),
    INT8: partial(tensor_core_gemv, int8=True),
    LUT: lut_gemv,
}
