"""Launching the bipolar kernels: which one multiplies a pair of widths on a GPU, and with what arguments."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from quantkit.cuda.capability import BINARY_MMA, BINARY_WGMMA, Support, support
from quantkit.cuda.device import compute_capability, processor_count
from quantkit.cuda.launch import launch
from quantkit.formats.bipolar import largest_value
from quantkit.formats.planes import MAX_BITS
from quantkit.ops.bipolar.instances import (
    BINARY_LIMIT,
    BITS_PER_LINE,
    BLOCK_ROWS,
    GEMV_GROUPS,
    LINE_BYTES,
    WgmmaTile,
    expand_unit,
    gemv_unit,
    mma_stage_bytes,
    mma_stages,
    mma_unit,
    quantize_unit,
    wgmma_tiles,
    wgmma_unit,
)

DTYPE_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
GEMV_COLUMNS = 64
"""(token, plane) pairs up to which the GEMV kernel, which reads the weights once, is taken."""

_BINARY_SUMS = 1 << 22  # what the binary warpgroup kernel turns into floats without a conversion
_PAIR_COLUMNS = 8
_GEMV_ROWS, _ROW_GROUP = 16, 32  # tile rows per block; among 32 rows the channels are in an order of their own
_MAX_QUANTIZE_WARPS = 16
_WARP = 32


@dataclass(frozen=True)
class Activations:
    """Quantized activations of M tokens in tile order.

    tiles: [blocks, k tiles, planes, 64, 128] uint8. sums: [M] int32, sums of codes. steps: [M] fp32.
    """

    tiles: Tensor
    sums: Tensor
    steps: Tensor


@dataclass(frozen=True)
class Path:
    """How a pair of widths is multiplied on a GPU.

    kernel: wgmma (one warpgroup per 64 rows, Hopper) or mma (one warp). longest: columns up to which the products are
    binary, of planes; beyond they are INT8, of codes (0: always). reason: why, for ``quantkit doctor``.
    """

    kernel: str
    longest: int
    reason: str


def path_for(weight_bits: int, act_bits: int, major: int, minor: int) -> Path:
    """The path of a pair of widths for many tokens; few tokens always take the GEMV on planes."""
    kernel = "wgmma" if support(BINARY_WGMMA, major, minor) is Support.NATIVE else "mma"
    if support(BINARY_MMA, major, minor) is not Support.NATIVE:
        return Path(kernel, 0, "binary products are not native on this GPU")
    if weight_bits * act_bits > BINARY_LIMIT:
        return Path(kernel, 0, f"more than {BINARY_LIMIT} plane products cost more than one INT8 product")
    longest = _BINARY_SUMS // (largest_value(weight_bits) * largest_value(act_bits))
    return Path(
        kernel,
        longest,
        f"at most {BINARY_LIMIT} plane products, each at {BINARY_LIMIT} times the INT8 rate; INT8 above K = {longest}",
    )


def runs_on_gemv(rows: int, act_bits: int) -> bool:
    """Whether so few tokens take the GEMV kernel, whatever the weight bits."""
    return rows * act_bits <= GEMV_COLUMNS


def quantize_tiles(x: Tensor, act_clip: Tensor, act_bits: int, *, per_token: bool, as_bytes: bool) -> Activations:
    """Quantize activations x [M, K] in one launch; ``as_bytes`` for INT8 products."""
    rows, columns = x.shape
    depth = LINE_BYTES if as_bytes else BITS_PER_LINE
    shape = (-(-rows // BLOCK_ROWS), -(-columns // depth), 1 if as_bytes else act_bits, BLOCK_ROWS, LINE_BYTES)
    made = Activations(
        torch.empty(shape, dtype=torch.uint8, device=x.device),
        torch.empty(rows, dtype=torch.int32, device=x.device),
        torch.empty(rows, dtype=torch.float32, device=x.device),
    )
    warps = min(_MAX_QUANTIZE_WARPS, -(-columns // BITS_PER_LINE))
    launch(
        quantize_unit(0 if as_bytes else act_bits, DTYPE_CODES[x.dtype]),
        x.device,
        grid=(rows,),
        block=(warps * _WARP,),
        args=(x, act_clip, made.tiles, made.sums, made.steps, rows, columns, largest_value(act_bits), int(per_token)),
        overlap=True,
    )
    return made


def multiply(
    x: Tensor,
    act_clip: Tensor,
    weight: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    act_bits: int,
    per_token: bool,
) -> Tensor:
    """y [M, N] of x [M, K] and a prepared weight (tiles, row_sums [N] int32, scales [N, 1] fp16) on x's GPU."""
    tiles, row_sums, _ = weight
    rows, columns = x.shape
    weight_bits = tiles.shape[2]
    y = torch.empty(rows, row_sums.shape[0], dtype=x.dtype, device=x.device)
    if not rows:
        return y
    path = path_for(weight_bits, act_bits, *compute_capability(x.device))
    few = runs_on_gemv(rows, act_bits)
    as_bytes = columns > path.longest and not few
    acts = quantize_tiles(x.contiguous(), act_clip, act_bits, per_token=per_token, as_bytes=as_bytes)
    if few:
        launch_gemv(acts, weight, bias, y, columns, act_bits)
        return y
    operands = (expand(tiles, columns), *weight[1:]) if as_bytes else weight
    limits = (largest_value(act_bits), largest_value(weight_bits))
    if path.kernel == "wgmma":
        planes = (1, 1) if as_bytes else (weight_bits, act_bits)
        tile = best_tile(*planes, as_bytes, rows, y.shape[1], processor_count(x.device))
        launch_wgmma(tile, acts, operands, bias, y, columns, limits)
    else:
        launch_mma(acts, operands, bias, y, columns, limits, as_bytes=as_bytes)
    return y


def expand(tiles: Tensor, columns: int) -> Tensor:
    """Weight planes in tile order to one byte per code in tile order."""
    blocks, stretches, bits = tiles.shape[:3]
    codes = torch.empty(
        blocks, -(-columns // LINE_BYTES), 1, BLOCK_ROWS, LINE_BYTES, dtype=torch.uint8, device=tiles.device
    )
    launch(expand_unit(bits), tiles.device, grid=(stretches, blocks), block=(256,), args=(tiles, codes, columns))
    return codes


def launch_gemv(
    acts: Activations,
    weight: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    y: Tensor,
    columns: int,
    act_bits: int,
) -> None:
    """y from planes of both operands, few tokens."""
    tiles, row_sums, scales = weight
    rows, channels = y.shape
    groups = next((g for g in GEMV_GROUPS if rows * act_bits <= g * _PAIR_COLUMNS), GEMV_GROUPS[-1])
    tokens = groups * _PAIR_COLUMNS // act_bits
    launch(
        gemv_unit(tiles.shape[2], groups),
        y.device,
        grid=(-(-channels // _ROW_GROUP) * (_ROW_GROUP // _GEMV_ROWS), -(-rows // tokens)),
        block=(256,),
        args=(
            *(acts.tiles, tiles, acts.sums, row_sums, acts.steps, scales, bias, y),
            *(rows, channels, columns, act_bits, DTYPE_CODES[y.dtype]),
        ),
    )


def launch_mma(
    acts: Activations,
    weight: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    y: Tensor,
    columns: int,
    limits: tuple[int, int],
    *,
    as_bytes: bool,
) -> None:
    """y on warp-level products; limits: largest values of act_bits and weight_bits."""
    tiles, row_sums, scales = weight
    planes_w, planes_x = tiles.shape[2], acts.tiles.shape[2]
    rows, channels = y.shape
    launch(
        mma_unit(planes_w, planes_x, as_bytes),
        y.device,
        grid=(-(-channels // BLOCK_ROWS), -(-rows // BLOCK_ROWS)),
        block=(256,),
        args=(
            *(acts.tiles, tiles, acts.sums, row_sums, acts.steps, scales, bias, y),
            *(rows, channels, columns, *limits, DTYPE_CODES[y.dtype]),
        ),
        shared_mem=mma_stages(planes_w, planes_x) * mma_stage_bytes(planes_w, planes_x),
    )


def launch_wgmma(
    tile: WgmmaTile,
    acts: Activations,
    weight: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    y: Tensor,
    columns: int,
    limits: tuple[int, int],
) -> None:
    """y on warpgroup products with the given tile."""
    tiles, row_sums, scales = weight
    rows, channels = y.shape
    along_a, along_b = output_tiles(tile, rows, channels)
    launch(
        wgmma_unit(tile, DTYPE_CODES[y.dtype]),
        y.device,
        grid=(min(along_a * along_b, processor_count(y.device)),),
        block=((tile.consumers + 1) * 128,),
        args=(
            *(acts.tiles, tiles, acts.sums, row_sums, acts.steps, scales, bias, y),
            *(rows, channels, columns, *limits, tiles.shape[1], along_a, along_b, along_a * along_b),
        ),
        shared_mem=tile.shared_bytes(y.dtype.itemsize),
        overlap=True,
    )


def output_tiles(tile: WgmmaTile, rows: int, channels: int) -> tuple[int, int]:
    """Tiles of y [rows, channels] along operands A and B."""
    size_a, size_b = (channels, rows) if tile.swap else (rows, channels)
    return -(-size_a // tile.rows), -(-size_b // tile.columns)


def best_tile(planes_w: int, planes_x: int, as_bytes: bool, rows: int, channels: int, sms: int) -> WgmmaTile:
    """The tile with the fewest clocks for y [rows, channels]: rounds over the SMs times the clocks of a k tile.

    Of equals the first, which is the one with the most reuse.
    """

    def clocks(tile: WgmmaTile) -> float:
        tiles = prod(output_tiles(tile, rows, channels))
        return -(-tiles // sms) * tile.stage_clocks(min(1.0, tiles / sms))

    return min(wgmma_tiles(planes_w, planes_x, as_bytes), key=clocks)


def path_table(major: int, minor: int) -> list[tuple[str, str, str]]:
    """(widths, kernel, reason) of every case, equal neighbours merged, for ``quantkit doctor``."""
    widths = range(1, MAX_BITS + 1)
    rows = [
        ("any, per group or A16", "bcq kernels", "the same weight with scales s * 2^i; activations rounded first"),
        (f"any, tokens * A <= {GEMV_COLUMNS}", "GEMV on planes", "memory is the limit: planes are read once"),
    ]
    for p in widths:
        paths = [path_for(p, q, major, minor) for q in widths]
        ends = [0, *(q for q, (a, b) in enumerate(pairwise(paths), 1) if bool(a.longest) != bool(b.longest)), MAX_BITS]
        for first, last in pairwise(ends):
            name = f"W{p}A{first + 1}" if last == first + 1 else f"W{p}A{first + 1}-{last}"
            path = paths[last - 1]  # of a range, the one with the lowest limit of K
            rows.append((name, f"{path.kernel} {'binary' if path.longest else 'INT8'}", path.reason))
    return rows
