"""Which kernel multiplies integer codes on a GPU generation, with which tile, and how activations are read."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.cuda.architectures import Architecture, Kernel
from quantkit.ops.flatten.instances import GEMM_TILES, QUANTIZE_THREADS, ROW_ALIGNMENT, GemmTile

_TOKENS_PER_BLOCK = (8, 4, 2, 1)
_STAGED_BYTES = 32 << 10  # of tokens per block of flatten_quantize, so that several blocks share a multiprocessor
_THREADS = ((16 << 10, 128), (32 << 10, 256))  # by bytes of tokens per block, up to; beyond, QUANTIZE_THREADS


def product_kernel(row: Architecture) -> Kernel:
    """INT8_GEMM_WGMMA or INT8_GEMM_MMA."""
    return next(kernel for kernel in (Kernel.INT8_GEMM_WGMMA, Kernel.INT8_GEMM_MMA) if kernel in row.kernels)


def multiplies_int4(row: Architecture) -> bool:
    """Whether INT4 operands are multiplied as such; elsewhere they are widened to INT8."""
    return Kernel.INT4_GEMM_MMA in row.kernels


def best_tile(shape: tuple[int, int], k_tiles: int, processors: int) -> GemmTile:
    """The tile with the fewest clocks for y of ``shape`` [M, N]; of equals the one with the most reuse."""

    def clocks(tile: GemmTile) -> float:
        along_x, along_w = tile.count(*shape)
        tiles = along_x * along_w
        return -(-tiles // processors) * tile.clocks(k_tiles, min(1.0, tiles / processors))

    return min(GEMM_TILES, key=clocks)


@dataclass(frozen=True)
class QuantizePlan:
    """tokens, threads: of a block. staged: whether tokens pass through shared memory, of which it takes shared_mem."""

    tokens: int
    staged: bool
    shared_mem: int
    threads: int


def plan_quantize(row_bytes: int, row: Architecture) -> QuantizePlan:
    """How flatten_quantize reads tokens of ``row_bytes``."""
    pitch = -(-row_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
    staged = pitch <= row.shared_limit()
    tokens = next(count for count in _TOKENS_PER_BLOCK if count * pitch <= _STAGED_BYTES or count == 1)
    threads = next((threads for size, threads in _THREADS if tokens * pitch <= size), QUANTIZE_THREADS)
    return QuantizePlan(tokens, staged, tokens * pitch if staged else 0, threads)
