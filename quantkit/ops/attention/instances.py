"""Which instances of the INT8 attention kernels exist."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.cuda.architectures import WARP_THREADS, WARPGROUP_THREADS, Architecture, Kernel
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.source import KernelSource
from quantkit.ops.attention.layout import HEAD_DIMS, RUN, STAGE_KEYS, TILE_KEYS
from quantkit.ops.constants import SHARED_CONSTANTS

MOST_CODE = 127
BOOL_MASK = 3  # element type of a mask, behind those of quantkit.cuda.launch
QUANTIZE_THREADS = 256
_MMA_WARPS, _CONSUMERS = 4, 2
_WARP_TOKENS = 16  # rows of one product, of which a warp has one or two
_WIDE = 128  # wider heads have half the rows per warp, and two stages
_WGMMA_STAGES = 8
_SHARED_ALIGNMENT = 1024

_CONSTANTS = {
    **SHARED_CONSTANTS,
    "MOST_CODE": MOST_CODE,
    "BOOL_MASK": BOOL_MASK,
    "RUN": RUN,
    "TILE_KEYS": TILE_KEYS,
    "STAGE_KEYS": STAGE_KEYS,
    "QUANTIZE_THREADS": QUANTIZE_THREADS,
    "MMA_WARPS": _MMA_WARPS,
    "CONSUMERS": _CONSUMERS,
    "SHARED_ALIGNMENT": _SHARED_ALIGNMENT,
}
_MMA = KernelSource("attention/mma.cu", _CONSTANTS)
_WGMMA = KernelSource("attention/wgmma.cu", _CONSTANTS)
_QUANTIZE = KernelSource("attention/quantize.cu", _CONSTANTS)


@dataclass(frozen=True)
class AttentionForm:
    """One of the two kernels.

    kernel: on products of warps, or of warpgroups, whose tiles are swizzled and which knows no mask. head_dims: widths
    that it takes. tile_keys: keys whose codes of K and V lie together. threads: of a block.
    """

    kernel: Kernel
    head_dims: tuple[int, ...]
    tile_keys: int
    threads: int

    @property
    def swizzled(self) -> bool:
        """Whether the tiles have the order of warpgroup products."""
        return self.kernel is Kernel.INT8_ATTENTION_WGMMA

    def block_tokens(self, head_dim: int) -> int:
        """Rows of Q that a block makes at a time."""
        return self.threads // WARP_THREADS * _WARP_TOKENS * _row_tiles(head_dim) if not self.swizzled else 128

    def unit(self, head_dim: int) -> CompileUnit:
        """The kernel for one of ``head_dims``."""
        if self.swizzled:
            shared_mem = _WGMMA_STAGES * self.tile_keys * head_dim + _SHARED_ALIGNMENT
            return CompileUnit(_WGMMA, "int8AttentionWgmma", (head_dim, _WGMMA_STAGES), shared_mem)
        stages = 3 if head_dim <= _WIDE else 2
        shared_mem = stages * 2 * self.tile_keys * head_dim  # of K and V
        return CompileUnit(_MMA, "int8Attention", (head_dim, _row_tiles(head_dim), stages), shared_mem)

    def quantize_unit(self, head_dim: int) -> CompileUnit:
        """int8AttentionQuantize for one of ``head_dims``."""
        return CompileUnit(_QUANTIZE, "int8AttentionQuantize", (head_dim, self.swizzled))


def _row_tiles(head_dim: int) -> int:
    return 2 if head_dim <= _WIDE else 1


WARP = AttentionForm(Kernel.INT8_ATTENTION_MMA, HEAD_DIMS, TILE_KEYS, _MMA_WARPS * WARP_THREADS)
WARPGROUP = AttentionForm(Kernel.INT8_ATTENTION_WGMMA, (64, 128), STAGE_KEYS, (_CONSUMERS + 1) * WARPGROUP_THREADS)
FORMS = (WARPGROUP, WARP)
"""The one that is taken where it can be first."""


def attention_units(row: Architecture) -> Iterator[CompileUnit]:
    """Every INT8 attention instance that can be asked for on a GPU generation."""
    for form in FORMS:
        if form.kernel in row.kernels:
            for head_dim in form.head_dims:
                yield from (form.unit(head_dim), form.quantize_unit(head_dim))
