"""The launches of the bipolar kernels, and the product through the kernel that the plan names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.cuda.architectures import WARP_THREADS, Kernel
from quantkit.cuda.device import Gpu, gpu_of
from quantkit.cuda.launch import DTYPE_CODES, FixedLaunches, Launch
from quantkit.cuda.parameters import Argument
from quantkit.formats.bipolar import ActCoding, largest_value
from quantkit.formats.hadamard import block_width, inverse_root
from quantkit.ops.bipolar.fused import fused_launch, fused_tensors
from quantkit.ops.bipolar.instances import (
    EXPAND_THREADS,
    GEMV_GROUPS,
    GEMV_PAIRS,
    GEMV_ROWS,
    GEMV_THREADS,
    MMA_THREADS,
    QUANTIZE_WARPS,
    WgmmaTile,
    expand_unit,
    gemv_unit,
    mma_unit,
    quantize_rotated_unit,
    quantize_unit,
    wgmma_unit,
)
from quantkit.ops.bipolar.layout import BITS_PER_LINE, BLOCK_ROWS, LINE_BYTES, ORDER_ROWS
from quantkit.ops.bipolar.plan import (
    BYTE_KERNELS,
    INT8_KERNELS,
    WGMMA_KERNELS,
    best_tile,
    kernel_for,
)
from quantkit.ops.bipolar.product import Activations, Product, Weight

_fixed = FixedLaunches()


def quantize_tiles(x: Tensor, act_clip: Tensor, coding: ActCoding, *, as_bytes: bool) -> Activations:
    """Quantize activations x [M, K] in one launch; ``as_bytes`` for INT8 products."""
    m, k = x.shape
    depth = LINE_BYTES if as_bytes else BITS_PER_LINE
    shape = (-(-m // BLOCK_ROWS), -(-k // depth), 1 if as_bytes else coding.bits, BLOCK_ROWS, LINE_BYTES)
    made = Activations(
        torch.empty(shape, dtype=torch.uint8, device=x.device),
        torch.empty((2, m) if coding.zero else (m,), dtype=torch.int32, device=x.device),
        torch.empty(m, dtype=torch.float32, device=x.device),
    )
    key = ("quantize", x.dtype, m, k, coding, as_bytes)
    tensors = {"x": x, "actClip": act_clip, "tiles": made.tiles, "sums": made.sums, "steps": made.steps}
    _fixed.run(key, lambda: quantize_launch(tensors, coding, as_bytes=as_bytes), x.device, tensors)
    return made


def quantize_launch(tensors: Mapping[str, Tensor], coding: ActCoding, *, as_bytes: bool) -> Launch:
    """The codes of x [M, K]. tensors: by the names of the kernel's parameters."""
    x = tensors["x"]
    m, k = x.shape
    args: dict[str, Argument] = {
        **tensors,
        "M": m,
        "K": k,
        "actLimit": largest_value(coding.bits),
        "perToken": int(coding.per_token),
    }
    planes, dtype = 0 if as_bytes else coding.bits, DTYPE_CODES[x.dtype]
    unit = quantize_unit(planes, dtype, coding.zero)
    if coding.rotated:
        unit = quantize_rotated_unit(planes, dtype, coding.zero)
        width = block_width(k)
        args |= {"width": width, "root": inverse_root(width)}
    return Launch(
        unit,
        x.device,
        grid=(m,),
        block=_quantize_warps(k) * WARP_THREADS,
        args=args,
        overlap=True,
    )


def _quantize_warps(in_features: int) -> int:
    """Warps that share a row's stretches of 1024 columns evenly, in the fewest rounds."""
    stretches = -(-in_features // BITS_PER_LINE)
    return -(-stretches // -(-stretches // QUANTIZE_WARPS))


def expand(weight: Weight, in_features: int) -> Weight:
    """A weight in planes to the same with one byte per code, or per scale code times value."""
    tiles, coded = weight.tiles, weight.coded
    blocks, k_tiles, bits = tiles.shape[:3]
    shape = (blocks, -(-in_features // LINE_BYTES), 1, BLOCK_ROWS, LINE_BYTES)
    codes = torch.empty(shape, dtype=torch.uint8, device=tiles.device)
    tensors = {"tiles": tiles, "scaleTiles": weight.scale_tiles, "codes": codes}

    def launch() -> Launch:
        args: dict[str, Argument] = {**tensors, "K": in_features}
        unit = expand_unit(bits, coded)
        return Launch(unit, tiles.device, grid=(k_tiles, blocks), block=EXPAND_THREADS, args=args)

    _fixed.run(("expand", tiles.shape, coded, in_features), launch, tiles.device, tensors)
    return replace(weight, tiles=codes)


def gemv_launch(product: Product) -> Launch:
    """y from planes of both operands, for few tokens."""
    (m, n), act_bits = product.y.shape, product.bits[0]
    groups = next((count for count in GEMV_GROUPS if m * act_bits <= count * GEMV_PAIRS), GEMV_GROUPS[-1])
    types = {"actBits": act_bits, "dtype": DTYPE_CODES[product.y.dtype]}
    return Launch(
        gemv_unit(product.planes[0], groups, product.zero, product.weight.coded),
        product.y.device,
        grid=(-(-n // ORDER_ROWS) * (ORDER_ROWS // GEMV_ROWS), -(-m // (groups * GEMV_PAIRS // act_bits))),
        block=GEMV_THREADS,
        args={**product.tensors_of_planes(), **product.sizes(), **types},
    )


def mma_launch(product: Product, *, as_bytes: bool) -> Launch:
    """y on products of warps, of planes or bytes."""
    m, n = product.y.shape
    return Launch(
        mma_unit(*product.planes, as_bytes, product.zero),
        product.y.device,
        grid=(-(-n // BLOCK_ROWS), -(-m // BLOCK_ROWS)),
        block=MMA_THREADS,
        args={**product.tensors(), **product.sizes(), **product.limits(), "dtype": DTYPE_CODES[product.y.dtype]},
    )


def wgmma_launch(product: Product, tile: WgmmaTile, processors: int) -> Launch:
    """y on products of warpgroups with the given tile."""
    along_a, along_b = tile.count(*product.y.shape)
    k_tiles = product.weight.tiles.shape[1]
    counts = {"kTiles": k_tiles, "tilesA": along_a, "tilesB": along_b, "tiles": along_a * along_b}
    return Launch(
        wgmma_unit(tile, DTYPE_CODES[product.y.dtype], product.zero),
        product.y.device,
        grid=(min(along_a * along_b, processors),),
        block=tile.threads,
        args={**product.tensors(), **product.sizes(), **product.limits(), **counts},
        overlap=True,
    )


def multiply(
    x: Tensor, act_clip: Tensor, weight: Weight, *, bias: Tensor | None, coding: ActCoding, weights_ready: bool = False
) -> Tensor:
    """y [M, N] of x [M, K] and a prepared weight on x's GPU.

    weights_ready: nothing queued on the GPU still writes the weight, so it may be read before the previous kernel ends.
    """
    (m, k), weight_bits = x.shape, weight.tiles.shape[2]
    y = torch.empty(m, weight.row_sums.shape[0], dtype=x.dtype, device=x.device)
    if not m:
        return y
    gpu = gpu_of(x.device)
    kernel = kernel_for(weight_bits, coding.bits, (m, k), gpu.architecture, act_zero=coding.zero, coded=weight.coded)
    acts = quantize_tiles(x.contiguous(), act_clip, coding, as_bytes=kernel in BYTE_KERNELS)
    operand = expand(weight, k) if kernel in INT8_KERNELS else weight
    product = Product(acts, operand, bias, y, k, (coding.bits, weight_bits), coding.zero, weights_ready)
    run_product(product, kernel, gpu)
    return y


def run_product(product: Product, kernel: Kernel, gpu: Gpu) -> None:
    """Queue the named kernel."""
    y = product.y
    if kernel is Kernel.BIPOLAR_FUSED_WGMMA:
        tensors = fused_tensors(product, gpu)
    else:
        tensors = product.tensors_of_planes() if kernel is Kernel.BIPOLAR_GEMV else product.tensors()
    coding = product.bits, product.zero, product.weight.coded
    key = (kernel, y.dtype, y.shape, product.in_features, product.planes, *coding, product.weights_ready)
    _fixed.run(key, lambda: product_launch(product, kernel, gpu, tensors), y.device, tensors)


def product_launch(product: Product, kernel: Kernel, gpu: Gpu, tensors: Mapping[str, Tensor | None]) -> Launch:
    """y on the named kernel. tensors: what it takes of such."""
    as_bytes = kernel in INT8_KERNELS
    if kernel is Kernel.BIPOLAR_GEMV:
        return gemv_launch(product)
    if kernel is Kernel.BIPOLAR_FUSED_WGMMA:
        return fused_launch(product, gpu, tensors)
    if kernel in WGMMA_KERNELS:
        shape = product.y.shape[0], product.y.shape[1]
        return wgmma_launch(product, best_tile(*product.planes, as_bytes, shape, gpu.processors), gpu.processors)
    return mma_launch(product, as_bytes=as_bytes)
