"""Launching the flatten and INT8 kernels: which one multiplies on a GPU, and with what arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quantkit.cuda.capability import INT4_MMA, INT8_MMA, INT8_WGMMA, Support, support
from quantkit.cuda.device import compute_capability, processor_count, shared_limit
from quantkit.cuda.launch import DTYPE_CODES, launch
from quantkit.errors import KernelError
from quantkit.formats.flatten import max_code
from quantkit.ops.flatten.instances import (
    BLOCK_ROWS,
    BYTE_TILES,
    EXPAND,
    LINE_BYTES,
    MMA_TILE_ROWS,
    NIBBLE_TILES,
    ROWS,
    GemmTile,
    best_tile,
    mma_shared_bytes,
    mma_unit,
    quantize_unit,
    wgmma_unit,
)

WGMMA, MMA, LIBRARY_PRODUCT = "wgmma", "mma", "torch._int_mm"
REQUANTIZED_DTYPES = (torch.float16, torch.bfloat16)
"""Element types of y that a product can pass on as codes."""

_TESTED_MAJORS = (8, 9)  # newer GPUs have INT8 units of another kind, which their library knows
_ROWS_PER_BLOCK = (8, 4, 2, 1)
_STAGED_BYTES = 32 << 10  # of rows per block of flatten_quantize, so that several blocks share a multiprocessor
_THREADS = ((16 << 10, 128), (32 << 10, 256), (1 << 30, 512))  # by bytes of rows per block, up to
_ROW_ALIGNMENT = 16
_EXPAND_THREADS = 256


@dataclass(frozen=True)
class Path:
    """How integer codes are multiplied on a GPU.

    kernel: wgmma (one warpgroup per 64 rows, Hopper), mma (one warp) or torch._int_mm, which reads the stored order.
    int4: whether INT4 operands are multiplied as such; elsewhere they are widened to INT8. reason: why.
    """

    kernel: str
    int4: bool
    reason: str


@dataclass(frozen=True)
class Following:
    """Where y [rows, channels] of ``dtype`` goes on as codes: the next Linear's operand.

    activation: number of the function between (quantkit.ops.activations). multiplier: [1] or [channels] fp32.
    slots: [3, columns behind the first ``channels``] int32 and slot_starts, of ops.flatten_requantize.column_slots.
    """

    rows: int
    channels: int
    dtype: torch.dtype
    activation: int
    multiplier: Tensor
    slots: Tensor
    slot_starts: Tensor
    act_bits: int


@cache
def path_for(major: int, minor: int) -> Path:
    """The path on a compute capability, by the table of quantkit.cuda.capability.

    Raises KernelError where the GPU has no INT8 products at all.
    """
    if support(INT8_MMA, major, minor) is Support.MISSING:
        raise KernelError(f"INT8 products need compute capability 7.5; this GPU has {major}.{minor}")
    if support(INT8_WGMMA, major, minor) is Support.NATIVE:
        return Path(WGMMA, False, "INT8 warpgroup products; INT4 is stored in 4 bits and computed in INT8")
    if major in _TESTED_MAJORS:
        native = support(INT4_MMA, major, minor) is Support.NATIVE
        return Path(MMA, native, "INT8 and INT4 warp products" if native else "INT8 warp products")
    return Path(LIBRARY_PRODUCT, False, "no kernel here is made for this GPU: the library's INT8 product")


def device_path(device: torch.device) -> Path:
    """path_for the GPU ``device``."""
    return path_for(*compute_capability(device))


def code_tiles(rows: int, columns: int, packed: bool, device: torch.device) -> Tensor:
    """Room for codes in tile order (ops.bipolar_tiles): uint8 of nibbles if packed, else int8."""
    depth = LINE_BYTES * (2 if packed else 1)
    shape = (-(-rows // BLOCK_ROWS), -(-columns // depth), 1, BLOCK_ROWS, LINE_BYTES)
    return torch.empty(shape, dtype=torch.uint8 if packed else torch.int8, device=device)


def launch_quantize(
    x: Tensor,
    column_map: tuple[Tensor, Tensor],
    multiplier: Tensor,
    codes: Tensor,
    act_bits: int,
) -> None:
    """Fill ``codes`` from x [M, K], M > 0; a tensor of two dimensions gets rows, any other tiles.

    column_map: source_channel, source_segment [K_ext]. multiplier: [1] or [K] fp32.
    Raises KernelError for an element type that no kernel reads.
    """
    if x.dtype not in DTYPE_CODES:
        raise KernelError(
            f"flatten_quantize reads fp16, bf16 or fp32 on a GPU, not {str(x.dtype).removeprefix('torch.')}"
        )
    rows, channels = x.shape
    row_bytes = channels * x.dtype.itemsize
    pitch = -(-row_bytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    staged = pitch <= shared_limit(*compute_capability(x.device))
    per_block = next(n for n in _ROWS_PER_BLOCK if n * pitch <= _STAGED_BYTES or n == 1)
    layout = ROWS if codes.dim() == 2 else NIBBLE_TILES if codes.dtype == torch.uint8 else BYTE_TILES
    source_channel, source_segment = column_map
    launch(
        quantize_unit(layout, DTYPE_CODES[x.dtype], staged),
        x.device,
        grid=(-(-rows // per_block),),
        block=(next(threads for size, threads in _THREADS if per_block * pitch <= size),),
        args=(
            *(x.contiguous(), source_channel, source_segment, multiplier, codes, int(multiplier.shape[0] > 1)),
            *(rows, channels, source_channel.shape[0], max_code(act_bits), per_block),
        ),
        shared_mem=per_block * pitch if staged else 0,
    )


def expand(tiles: Tensor, k_tiles: int) -> Tensor:
    """Nibble tiles to byte tiles of ``k_tiles`` lines of 128 columns."""
    blocks, packed_tiles = tiles.shape[:2]
    codes = torch.empty(blocks, k_tiles, 1, BLOCK_ROWS, LINE_BYTES, dtype=torch.int8, device=tiles.device)
    launch(EXPAND, tiles.device, grid=(packed_tiles, blocks), block=(_EXPAND_THREADS,), args=(tiles, codes, k_tiles))
    return codes


def multiply(
    act_tiles: Tensor,
    tiles: Tensor,
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
    out: Tensor,
    following: Following | None = None,
) -> None:
    """Fill ``out`` from codes in tile order on its GPU: y [M, N], or the byte tiles of what follows.

    scales: act_scale, weight_scale.
    Raises KernelError for an element type of y or bias that no kernel writes or reads.
    """
    rows, channels, dtype = _extent(out, following)
    known = DTYPE_CODES if following is None else REQUANTIZED_DTYPES
    for what, codes in ((dtype, known), (None if bias is None else bias.dtype, DTYPE_CODES)):
        if what is not None and what not in codes:
            names = ", ".join(str(one).removeprefix("torch.") for one in codes)
            raise KernelError(f"int8_gemm knows {names} here on a GPU, not {str(what).removeprefix('torch.')}")
    if tiles.dtype == torch.uint8 and act_tiles.dtype == torch.int8:
        tiles = expand(tiles, act_tiles.shape[1])
    if device_path(out.device).kernel == WGMMA:
        tile = best_tile(rows, channels, tiles.shape[1], processor_count(out.device))
        launch_wgmma(tile, act_tiles, tiles, scales, bias, out, following)
    else:
        launch_mma(act_tiles, tiles, scales, bias, out, following)


def _extent(out: Tensor, following: Following | None) -> tuple[int, int, torch.dtype]:
    """M, N and the element type of y."""
    return (*out.shape, out.dtype) if following is None else (following.rows, following.channels, following.dtype)


def _arguments(
    operands: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
    out: Tensor,
    following: Following | None,
) -> tuple[Tensor | int | None, ...]:
    rows, channels, dtype = _extent(out, following)
    target: tuple[Tensor | int | None, ...] = (None, None, None, 0, 0, 0, 0)
    if following is not None:
        factors, slots = following.multiplier, following.slots
        sizes = (int(factors.shape[0] > 1), slots.shape[1], max_code(following.act_bits), following.activation)
        target = (factors, slots, following.slot_starts, *sizes)
    bias_dtype = DTYPE_CODES[dtype if bias is None else bias.dtype]
    return (*operands, *scales, bias, out, *target, bias_dtype, rows, channels, operands[1].shape[1])


def launch_wgmma(
    tile: GemmTile,
    act_tiles: Tensor,
    tiles: Tensor,
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
    out: Tensor,
    following: Following | None = None,
) -> None:
    """y, or the codes that follow, on warpgroup products of INT8 codes with the given tile."""
    rows, channels, dtype = _extent(out, following)
    along_x, along_w = tile.count(rows, channels)
    launch(
        wgmma_unit(tile, DTYPE_CODES[dtype], following is not None),
        out.device,
        grid=(min(along_x * along_w, processor_count(out.device)),),
        block=((tile.consumers + 1) * 128,),
        args=(*_arguments((act_tiles, tiles), scales, bias, out, following), along_x, along_w),
        shared_mem=tile.shared_bytes,
    )


def launch_mma(
    act_tiles: Tensor,
    tiles: Tensor,
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
    out: Tensor,
    following: Following | None = None,
) -> None:
    """y, or the codes that follow, on warp products, of INT4 codes where both operands are nibbles."""
    rows, channels, dtype = _extent(out, following)
    launch(
        mma_unit(4 if tiles.dtype == torch.uint8 else 8, DTYPE_CODES[dtype], following is not None),
        out.device,
        grid=(-(-channels // MMA_TILE_ROWS), -(-rows // MMA_TILE_ROWS)),
        block=(256,),
        args=_arguments((act_tiles, tiles), scales, bias, out, following),
        shared_mem=mma_shared_bytes(),
    )
