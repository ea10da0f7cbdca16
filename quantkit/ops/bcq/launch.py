"""The launches of the bcq kernels, and the product through any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from quantkit.cuda.architectures import WARP_THREADS, Kernel
from quantkit.cuda.device import Gpu, gpu_of
from quantkit.cuda.launch import DTYPE_CODES, Launch
from quantkit.cuda.parameters import Argument
from quantkit.errors import KernelError
from quantkit.formats.bcq import group_width
from quantkit.ops.bcq.candidates import binary_segment, candidates
from quantkit.ops.bcq.gemm import (
    ARRANGE,
    TOKEN_BAND,
    GemmLayout,
    GemmProblem,
    arrange_launch,
    gemm_unit,
    is_vectors,
    plan_gemm,
)
from quantkit.ops.bcq.instances import (
    DEQUANTIZE_THREADS,
    LUT_BLOCK_TILES,
    LUT_SHARED,
    LUT_THREADS,
    LUT_WARPS,
    SUM_PARTIALS,
    TILE_K,
    GemvTile,
    dequantize_unit,
    gemv_case,
    lut_residency,
    lut_unit,
)
from quantkit.ops.bcq.layout import BcqTiles, tile_counts
from quantkit.ops.bcq.plan import plan_gemv
from quantkit.ops.epilogue import NO_EPILOGUE, Epilogue, apply_epilogue

_WORD = 32


@dataclass(frozen=True, eq=False)
class Product:
    """y [M, N] = the epilogue of x [M, K] W^T + bias. x: contiguous fp16 or bf16. bias: in x's type.

    weights_ready: nothing queued on the GPU still writes the weight, so it may be read before the previous kernel ends.
    """

    x: Tensor
    weight: BcqTiles
    bias: Tensor | None
    y: Tensor
    epilogue: Epilogue = NO_EPILOGUE
    weights_ready: bool = False

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: BcqTiles,
        bias: Tensor | None,
        *,
        epilogue: Epilogue = NO_EPILOGUE,
        weights_ready: bool = False,
    ) -> Product:
        """With room for y."""
        y = torch.empty(x.shape[0], weight.out_features, dtype=x.dtype, device=x.device)
        return cls(x, weight, bias, y, epilogue, weights_ready)

    def args(self) -> dict[str, Argument]:
        """What the kernels that read x and the weight take."""
        dtype = DTYPE_CODES[self.x.dtype]
        return {**weight_args(self.weight), "x": self.x, "dtype": dtype, "vectors": is_vectors(self.x)}

    def epilogue_args(self) -> dict[str, Argument]:
        """What the kernels that write y take."""
        return {
            "bias": self.bias,
            "residual": self.epilogue.addend(self.y),
            "y": self.y,
            "M": self.y.shape[0],
            "activation": self.epilogue.number,
        }


def weight_args(weight: BcqTiles) -> dict[str, Argument]:
    """What kernels take of a weight."""
    return {
        "tiles": weight.tiles,
        "scales": weight.scale_tiles,
        "factors": weight.factor_tiles,
        "N": weight.out_features,
        "K": weight.in_features,
        "groups": weight.groups,
        "entries": weight.entries,
    }


def _magic(divisor: int) -> int:
    """2^32 / divisor rounded up; 0 for the divisor 1."""
    return 0 if divisor == 1 else -(-(1 << 32) // divisor)


def activation_segment(weight: BcqTiles, names: str) -> int:
    """Elements of x per activation scale. Raises KernelError, which begins with ``names``, where there is none."""
    segment = binary_segment(weight.group_size, weight.in_features)
    if segment is None:
        raise KernelError(f"{names} a group size that is a multiple of 32, not {weight.group_size}")
    return segment


def group_magic(weight: BcqTiles, segment: int) -> int:
    """What the number of a segment is multiplied by for that of its group."""
    return _magic(max(1, -(-group_width(weight.group_size, weight.in_features) // segment)))


def tensor_core_launch(product: Product, gpu: Gpu, *, int8: bool, tile: GemvTile | None = None) -> Launch:
    """The product on tensor cores; any M. int8: signs as bytes, made for M = 2 to 8; else as bits, for M = 1.

    tile: another block layout than the table's, for tuning.
    Raises KernelError where the group size is no multiple of 32.
    """
    (tokens, in_features), weight = product.x.shape, product.weight
    segment = activation_segment(weight, f"{Kernel.BCQ_BINARY_GEMV} and {Kernel.BCQ_INT8_GEMV} need")
    case = gemv_case(weight.weight_bits, segment, weight.scale_bits, tokens, int8=int8)
    counts = tile_counts(weight.out_features, in_features)
    plan = plan_gemv(case, entries=weight.entries, tile_counts=counts, gpu=gpu, tile=tile)
    range_tiles, long_ranges = divmod(counts[0], plan.blocks // plan.cluster)
    return Launch(
        plan.unit,
        product.x.device,
        grid=(plan.blocks, -(-tokens // case.tokens)),
        block=plan.warps * WARP_THREADS,
        args={
            **product.args(),
            **product.epilogue_args(),
            "groupMagic": group_magic(weight, case.segment),
            "passTiles": plan.pass_tiles,
            "rangeTiles": range_tiles,
            "longRanges": long_ranges,
        },
        shared_mem=plan.shared_mem,
        overlap=product.weights_ready,
        cluster=plan.cluster,
    )


def gemm_problem(weight: BcqTiles, tokens: int, gpu: Gpu) -> GemmProblem:
    """What the fused product's layout depends on. Raises KernelError where the group size is no multiple of 32."""
    segments = TILE_K // activation_segment(weight, "bcq_gemm needs")
    counts = tile_counts(weight.out_features, weight.in_features)
    sizes = weight.weight_bits, weight.entries, weight.scale_bits, segments, *counts, tokens
    return GemmProblem(*sizes, gpu, weight.codes)


def gemm_launches(product: Product, gpu: Gpu, layout: GemmLayout | None = None) -> tuple[Launch, Launch]:
    """x in the order of the products, and the fused product; for many tokens.

    layout: another one than the planned, for tuning. Raises KernelError where the group size is no multiple of 32.
    """
    x, weight, tokens = product.x, product.weight, product.x.shape[0]
    it = gemm_problem(weight, tokens, gpu)
    layout = layout or plan_gemm(it)
    tile_tokens = layout.shape.tokens
    arranged = torch.empty(layout.token_tiles * tile_tokens, it.k_tiles * TILE_K, dtype=x.dtype, device=x.device)
    partials = torch.empty(layout.partial_floats, dtype=torch.float32, device=x.device)
    ready = torch.empty(layout.shared_items, dtype=torch.int32, device=x.device)
    own: dict[str, Argument] = {"ready": ready, "readyCount": layout.shared_items}
    arrange = arrange_launch(
        ARRANGE, x, arranged=arranged, tokens=tokens, tile_tokens=tile_tokens, bits=it.weight_bits, own=own
    )
    range_tiles, long_ranges = divmod(it.n_tiles, layout.ranges)
    multiply = Launch(
        gemm_unit(it, x.dtype, layout.shape),
        x.device,
        grid=(layout.blocks,),
        block=layout.shape.threads,
        args={
            **weight_args(weight),
            **product.epilogue_args(),
            "x": arranged,
            "partials": partials,
            "ready": ready,
            "groupMagic": group_magic(weight, TILE_K // it.segments),
            "scaleBits": it.scale_bits,
            "segments": it.segments,
            "stages": layout.stages,
            "rangeTiles": range_tiles,
            "longRanges": long_ranges,
            "ranges": layout.ranges,
            "tokenTiles": layout.token_tiles,
            "tokenBand": TOKEN_BAND,
            "wholeItems": layout.whole_items,
        },
        shared_mem=layout.shared_mem,
        overlap=product.weights_ready,
    )
    return arrange, multiply


def lut_launches(product: Product, gpu: Gpu) -> tuple[Launch, Launch]:
    """The product through look-up tables (nuQmm 3.2), and the sum of its parts; any group size, for few tokens."""
    (tokens, in_features), weight = product.x.shape, product.weight
    n_tiles, k_tiles = tile_counts(weight.out_features, in_features)
    width = group_width(weight.group_size, in_features)
    fine = weight.groups > 1 and width % _WORD != 0
    pairs = -(-k_tiles // LUT_BLOCK_TILES)
    resident = lut_residency(weight.weight_bits, fine, gpu.architecture)
    one_wave = resident * gpu.processors // pairs
    blocks = max(1, min(-(-n_tiles // LUT_WARPS), one_wave))  # tables of idle warps would be built for nothing
    partial = torch.empty(pairs, tokens, weight.out_features, dtype=torch.float32, device=product.x.device)
    multiply = Launch(
        lut_unit(weight.weight_bits, fine, weight.scale_bits),
        product.x.device,
        grid=(blocks, pairs, tokens),
        block=LUT_THREADS,
        args={**product.args(), "partial": partial, "groupSize": width},
        shared_mem=LUT_SHARED,
        overlap=product.weights_ready,
    )
    sizes = {"pairs": pairs, "N": weight.out_features, "dtype": DTYPE_CODES[product.y.dtype]}
    add = Launch(
        SUM_PARTIALS,
        product.x.device,
        grid=(-(-product.y.numel() // LUT_THREADS),),
        block=LUT_THREADS,
        args={"partial": partial, **product.epilogue_args(), **sizes},
        overlap=True,
    )
    return multiply, add


def dequantize_launch(weight: BcqTiles, dequantized: Tensor) -> Launch:
    """The weight [N, K] in fp16, bf16 or fp32 (nuQmm section 5.1)."""
    n_tiles, k_tiles = tile_counts(weight.out_features, weight.in_features)
    width = group_width(weight.group_size, weight.in_features)
    return Launch(
        dequantize_unit(weight.weight_bits, weight.scale_bits, weight.codes),
        weight.tiles.device,
        grid=(-(-n_tiles * k_tiles * WARP_THREADS // DEQUANTIZE_THREADS),),
        block=DEQUANTIZE_THREADS,
        args={
            **weight_args(weight),
            "weight": dequantized,
            "groupSize": width,
            "dtype": DTYPE_CODES[dequantized.dtype],
        },
    )


def tensor_core_gemv(product: Product, *, int8: bool, tile: GemvTile | None = None) -> Tensor:
    """y, see tensor_core_launch."""
    tensor_core_launch(product, gpu_of(product.x.device), int8=int8, tile=tile).run()
    return product.y


def gemm(product: Product, layout: GemmLayout | None = None) -> Tensor:
    """y, see gemm_launches."""
    for launch in gemm_launches(product, gpu_of(product.x.device), layout):
        launch.run()
    return product.y


def lut_gemv(product: Product) -> Tensor:
    """y, see lut_launches."""
    for launch in lut_launches(product, gpu_of(product.x.device)):
        launch.run()
    return product.y


def dequantize_tiles(weight: BcqTiles, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in fp16, bf16 or fp32."""
    shape = weight.out_features, weight.in_features
    dequantized = torch.empty(shape, dtype=dtype, device=weight.tiles.device)
    dequantize_launch(weight, dequantized).run()
    return dequantized


def product(
    kernel: str,
    x: Tensor,
    weight: BcqTiles,
    bias: Tensor | None,
    *,
    weights_ready: bool = False,
    epilogue: Epilogue = NO_EPILOGUE,
) -> Tensor:
    """y [M, N] = the epilogue of x [M, K] W^T + bias through the named kernel; weights_ready: see Product.

    Raises KernelError for an unknown kernel, or one that cannot run these shapes or types on this GPU.
    """
    usable = candidates(
        x.dtype,
        gpu_of(x.device).architecture,
        weight_bits=weight.weight_bits,
        group_size=weight.group_size,
        in_features=weight.in_features,
        codes=weight.codes,
    )
    if kernel not in usable:
        order = " in the order for batches" if weight.codes else ""
        raise KernelError(
            f"kernel {kernel!r} cannot run {x.dtype} activations with group size {weight.group_size}{order}; "
            f"choose {', '.join(usable)}"
        )
    bias = None if bias is None else bias.to(x.dtype)
    gemv = _PRODUCTS.get(kernel)
    if gemv is None:
        return apply_epilogue(linear(x, dequantize_tiles(weight, x.dtype), bias), epilogue)
    return gemv(Product.of(x, weight, bias, epilogue=epilogue, weights_ready=weights_ready))


_PRODUCTS: dict[str, Callable[[Product], Tensor]] = {
    Kernel.BCQ_BINARY_GEMV: partial(tensor_core_gemv, int8=False),
    Kernel.BCQ_INT8_GEMV: partial(tensor_core_gemv, int8=True),
    Kernel.BCQ_LUT_GEMV: lut_gemv,
    Kernel.BCQ_GEMM_MMA: gemm,
    Kernel.BCQ_GEMM_WGMMA: gemm,
}
