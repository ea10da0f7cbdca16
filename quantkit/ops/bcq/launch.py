"""The launches of the bcq kernels, and the product through any of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from quantkit.cuda.architectures import WARP_THREADS, Kernel
from quantkit.cuda.device import Gpu, gpu_of
from quantkit.cuda.launch import DTYPE_CODES, Launch
from quantkit.errors import KernelError
from quantkit.formats.bcq import group_width
from quantkit.ops.bcq.candidates import GATING, candidates
from quantkit.ops.bcq.gemm_launch import gemm
from quantkit.ops.bcq.instances import (
    DEQUANTIZE_THREADS,
    LUT_BLOCK_TILES,
    LUT_SHARED,
    LUT_THREADS,
    LUT_WARPS,
    SUM_PARTIALS,
    GemvTile,
    dequantize_unit,
    gemv_case,
    lut_residency,
    lut_unit,
)
from quantkit.ops.bcq.layout import BcqTiles, tile_counts
from quantkit.ops.bcq.level_gemv import level_gemv
from quantkit.ops.bcq.plan import plan_gemv
from quantkit.ops.bcq.product import Product, activation_segment, group_magic, weight_args
from quantkit.ops.decode.op import gated_halves
from quantkit.ops.epilogue import GATE, GATED_ROWS, NO_EPILOGUE, Epilogue, apply_epilogue

_WORD = 32


def tensor_core_launch(product: Product, gpu: Gpu, *, int8: bool, tile: GemvTile | None = None) -> Launch:
    """The product on tensor cores; any M. int8: signs as bytes, made for M = 2 to 8; else as bits, for M = 1.

    tile: another block layout than the table's, for tuning.
    Raises KernelError where the group size is no multiple of 32.
    """
    (tokens, in_features), weight = product.x.shape, product.weight
    names = f"{Kernel.BCQ_BINARY_GEMV} and {Kernel.BCQ_INT8_GEMV} need"
    segment = activation_segment(weight.group_size, in_features, names)
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
            "groupMagic": group_magic(weight.group_size, in_features, case.segment),
            "passTiles": plan.pass_tiles,
            "rangeTiles": range_tiles,
            "longRanges": long_ranges,
        },
        shared_mem=plan.shared_mem,
        overlap=product.weights_ready,
        cluster=plan.cluster,
    )


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
        dequantize_unit(weight.weight_bits, weight.scale_bits, weight.order),
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
    """y = the epilogue of x [M, K] W^T + bias through the named kernel; y and weights_ready: see Product.

    Raises KernelError for an unknown kernel, or one that cannot run these shapes or types on this GPU.
    """
    usable = candidates(
        x.dtype,
        gpu_of(x.device).architecture,
        weight_bits=weight.weight_bits,
        group_size=weight.group_size,
        in_features=weight.in_features,
        order=weight.order,
    )
    if kernel not in usable:
        order = f" in the order of {weight.order}" if weight.order.for_batches else ""
        raise KernelError(
            f"kernel {kernel!r} cannot run {x.dtype} activations with group size {weight.group_size}{order}; "
            f"choose {', '.join(usable)}"
        )
    bias = None if bias is None else bias.to(x.dtype)
    gemv = _PRODUCTS.get(kernel)
    if gemv is None:
        return _epilogue_apart(linear(x, dequantize_tiles(weight, x.dtype), bias), epilogue)
    if epilogue.gated and kernel not in GATING:
        return _epilogue_apart(gemv(Product.of(x, weight, bias, weights_ready=weights_ready)), epilogue)
    return gemv(Product.of(x, weight, bias, epilogue=epilogue, weights_ready=weights_ready))


def _epilogue_apart(y: Tensor, epilogue: Epilogue) -> Tensor:
    """The epilogue of y [M, N] in kernels of their own."""
    if not epilogue.gated:
        return apply_epilogue(y, epilogue)
    return gated_halves(y.view(-1, 2 * GATED_ROWS), GATE).view(len(y), -1)


_PRODUCTS: dict[str, Callable[[Product], Tensor]] = {
    Kernel.BCQ_BINARY_GEMV: partial(tensor_core_gemv, int8=False),
    Kernel.BCQ_INT8_GEMV: partial(tensor_core_gemv, int8=True),
    Kernel.BCQ_LEVEL_GEMV: level_gemv,
    Kernel.BCQ_LUT_GEMV: lut_gemv,
    Kernel.BCQ_GEMM_MMA: gemm,
    Kernel.BCQ_GEMM_WGMMA: gemm,
}
