"""The launches of the flatten and INT8 kernels, and the product through the kernel that the plan names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.cuda.architectures import Kernel
from quantkit.cuda.device import Gpu, gpu_of
from quantkit.cuda.launch import DTYPE_CODES, FixedLaunches, Launch
from quantkit.cuda.parameters import Argument
from quantkit.errors import KernelError
from quantkit.formats.flatten import max_code
from quantkit.ops.bipolar.layout import BLOCK_ROWS, LINE_BYTES
from quantkit.ops.flatten.instances import (
    BYTE_TILES,
    EXPAND,
    EXPAND_THREADS,
    MMA_THREADS,
    MMA_TILE_ROWS,
    NIBBLE_TILES,
    ROW_MAJOR,
    GemmTile,
    mma_unit,
    quantize_unit,
    wgmma_unit,
)
from quantkit.ops.flatten.plan import best_tile, plan_quantize, product_kernel

_fixed = FixedLaunches()

REQUANTIZED_DTYPES = (torch.float16, torch.bfloat16)
"""Element types of y that a product can pass on as codes."""


@dataclass(frozen=True)
class Requantization:
    """How y [tokens, out_features] of ``dtype`` goes on as codes: the next Linear's operand.

    activation: number of the function between (quantkit.ops.activations). multiplier: [1] or [out_features] fp32.
    slots: [3, columns behind the first ``out_features``] int32 and slot_starts, of layout.column_slots.
    """

    tokens: int
    out_features: int
    dtype: torch.dtype
    activation: int
    multiplier: Tensor
    slots: Tensor
    slot_starts: Tensor
    act_bits: int

    def tensors(self) -> dict[str, Tensor]:
        """What the kernels take of it, by the names of their parameters."""
        return {"multiplier": self.multiplier, "slots": self.slots, "slotStarts": self.slot_starts}

    def sizes(self) -> dict[str, int]:
        """The same, of numbers."""
        return {
            "perChannel": int(self.multiplier.shape[0] > 1),
            "slotCount": self.slots.shape[1],
            "top": max_code(self.act_bits),
            "activation": self.activation,
        }


_NO_TENSORS = dict.fromkeys(("multiplier", "slots", "slotStarts"))
_NO_SIZES = dict.fromkeys(("perChannel", "slotCount", "top", "activation"), 0)


@dataclass(frozen=True)
class Product:
    """Codes in tile order, scales, bias [N]; out: y [M, N], or byte tiles of ``requantization``.

    scales: act_scale [1] and weight_scale, which is [1] or, with one scale per output feature, [N, 1].
    """

    act_tiles: Tensor
    tiles: Tensor
    scales: tuple[Tensor, Tensor]
    bias: Tensor | None
    out: Tensor
    requantization: Requantization | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N) of y."""
        next_operand = self.requantization
        if next_operand is None:
            return self.out.shape[0], self.out.shape[1]
        return next_operand.tokens, next_operand.out_features

    def kind(self) -> tuple[object, ...]:
        """All that a launch depends on but addresses."""
        after = self.requantization
        own = None if after is None else (after.multiplier.shape, after.slots.shape, after.act_bits, after.activation)
        bias_dtype = None if self.bias is None else self.bias.dtype
        tiles = self.act_tiles.dtype, self.tiles.dtype, self.tiles.shape
        return (self.shape, self.dtype, bias_dtype, self.row_scales, *tiles, own)

    @property
    def row_scales(self) -> bool:
        """Whether every output feature has a weight scale of its own."""
        return self.scales[1].numel() > 1

    @property
    def dtype(self) -> torch.dtype:
        """Of y."""
        return self.out.dtype if self.requantization is None else self.requantization.dtype

    def tensors(self) -> dict[str, Tensor | None]:
        """What the kernels of all products take, by the names of their parameters."""
        return {
            "xTiles": self.act_tiles,
            "wTiles": self.tiles,
            "actScale": self.scales[0],
            "weightScale": self.scales[1],
            "bias": self.bias,
            "y": self.out,
            **(_NO_TENSORS if self.requantization is None else self.requantization.tensors()),
        }

    def args(self) -> dict[str, Argument]:
        """The same and numbers."""
        m, n = self.shape
        return {
            **self.tensors(),
            **(_NO_SIZES if self.requantization is None else self.requantization.sizes()),
            "rowScales": int(self.row_scales),
            "biasDtype": DTYPE_CODES[self.dtype if self.bias is None else self.bias.dtype],
            "M": m,
            "N": n,
            "kTiles": self.tiles.shape[1],
        }


def quantize(
    x: Tensor, column_map: tuple[Tensor, Tensor], *, multiplier: Tensor, codes: Tensor, act_bits: int, gpu: Gpu
) -> None:
    """Fill ``codes`` from x [M, K], M > 0; a tensor of two dimensions gets rows, any other tiles.

    column_map: source_channel, source_segment [K_ext]. multiplier: [1] or [K] fp32.
    Raises KernelError for an element type that no kernel reads.
    """
    source = {"sourceChannel": column_map[0], "sourceSegment": column_map[1]}
    tensors = {"x": x.contiguous(), **source, "multiplier": multiplier, "codes": codes}
    key = ("quantize", x.dtype, x.shape, column_map[0].shape, multiplier.shape, codes.dtype, codes.shape, act_bits)
    _fixed.run(key, lambda: quantize_launch(tensors, act_bits, gpu), x.device, tensors)


def quantize_launch(tensors: Mapping[str, Tensor], act_bits: int, gpu: Gpu) -> Launch:
    """The launch of ``quantize``. tensors: by the names of the kernel's parameters."""
    x, multiplier, codes = tensors["x"], tensors["multiplier"], tensors["codes"]
    if x.dtype not in DTYPE_CODES:
        raise KernelError(
            f"flatten_quantize reads fp16, bf16 or fp32 on a GPU, not {str(x.dtype).removeprefix('torch.')}"
        )
    m, k = x.shape
    plan = plan_quantize(k * x.dtype.itemsize, gpu.architecture)
    layout = ROW_MAJOR if codes.dim() == 2 else NIBBLE_TILES if codes.dtype == torch.uint8 else BYTE_TILES
    return Launch(
        quantize_unit(layout, DTYPE_CODES[x.dtype], plan.staged),
        x.device,
        grid=(-(-m // plan.tokens),),
        block=plan.threads,
        args={
            **tensors,
            "perChannel": int(multiplier.shape[0] > 1),
            "M": m,
            "K": k,
            "KExt": tensors["sourceChannel"].shape[0],
            "top": max_code(act_bits),
            "tokensPerBlock": plan.tokens,
        },
        shared_mem=plan.shared_mem,
    )


def expand(tiles: Tensor, k_tiles: int) -> Tensor:
    """Nibble tiles to byte tiles of ``k_tiles`` lines of 128 columns."""
    blocks, packed_tiles = tiles.shape[:2]
    codes = torch.empty(blocks, k_tiles, 1, BLOCK_ROWS, LINE_BYTES, dtype=torch.int8, device=tiles.device)
    tensors = {"tiles": tiles, "codes": codes}

    def launch() -> Launch:
        args: dict[str, Argument] = {**tensors, "kTiles": k_tiles}
        return Launch(EXPAND, tiles.device, grid=(packed_tiles, blocks), block=EXPAND_THREADS, args=args)

    _fixed.run(("expand", tiles.shape, k_tiles), launch, tiles.device, tensors)
    return codes


def wgmma_launch(product: Product, tile: GemmTile, processors: int) -> Launch:
    """y, or the codes that follow, on products of warpgroups with the given tile."""
    along_x, along_w = tile.count(*product.shape)
    return Launch(
        wgmma_unit(tile, DTYPE_CODES[product.dtype], product.requantization is not None),
        product.out.device,
        grid=(min(along_x * along_w, processors),),
        block=tile.threads,
        args={**product.args(), "tilesX": along_x, "tilesW": along_w},
    )


def mma_launch(product: Product) -> Launch:
    """y, or the codes that follow, on products of warps, of INT4 codes where both operands are nibbles."""
    m, n = product.shape
    bits = 4 if product.tiles.dtype == torch.uint8 else 8
    return Launch(
        mma_unit(bits, DTYPE_CODES[product.dtype], product.requantization is not None),
        product.out.device,
        grid=(-(-n // MMA_TILE_ROWS), -(-m // MMA_TILE_ROWS)),
        block=MMA_THREADS,
        args=product.args(),
    )


def multiply(product: Product) -> None:
    """Fill ``out`` on its GPU.

    Raises KernelError for an element type of y or bias that no kernel writes or reads, and for activations in nibbles
    on a GPU without INT4 products.
    """
    known = DTYPE_CODES if product.requantization is None else REQUANTIZED_DTYPES
    bias_dtype = None if product.bias is None else product.bias.dtype
    for what, codes in ((product.dtype, known), (bias_dtype, DTYPE_CODES)):
        if what is not None and what not in codes:
            names = ", ".join(str(one).removeprefix("torch.") for one in codes)
            raise KernelError(f"int8_gemm knows {names} here on a GPU, not {str(what).removeprefix('torch.')}")
    gpu = gpu_of(product.out.device)
    if product.act_tiles.dtype == torch.uint8 and Kernel.INT4_GEMM_MMA not in gpu.architecture.kernels:
        raise KernelError(f"int8_gemm: {gpu.architecture.title} has no INT4 products; give activations in bytes")
    if product.tiles.dtype == torch.uint8 and product.act_tiles.dtype == torch.int8:
        product = replace(product, tiles=expand(product.tiles, product.act_tiles.shape[1]))

    def launch() -> Launch:
        if product_kernel(gpu.architecture) is Kernel.INT8_GEMM_WGMMA:
            tile = best_tile(product.shape, product.tiles.shape[1], gpu.processors)
            return wgmma_launch(product, tile, gpu.processors)
        return mma_launch(product)

    _fixed.run(product.kind(), launch, product.out.device, product.tensors())
