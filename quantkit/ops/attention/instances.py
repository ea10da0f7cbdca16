"""Which instances of the INT8 attention kernels exist, and which of their two forms a problem takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.cuda.capability import INT8_WGMMA, Support, support
from quantkit.cuda.compile import CompileUnit

HEAD_DIMS = (64, 96, 128, 256)
"""Widths of a head that kernels are made for; others are filled up with zeros to the next of them."""

QUANTIZE_THREADS = 256
QUANTIZE_KEYS = 64  # of K and V that a block of int8AttentionQuantize makes
BOOL_MASK = 3  # element type of a mask, behind those of quantkit.cuda.launch
MOST_KEYS = 2**31 // 127**2  # the largest codes of so many still sum within int32
_WIDE = 128  # wider heads have half the rows per warp, and two stages
_SHARED_ALIGNMENT = 1024


@dataclass(frozen=True)
class AttentionForm:
    """One of the two kernels.

    swizzled: on warpgroup products and without a mask, else on warp products. head_dims: widths that it takes.
    tile_keys: keys whose codes of K and V lie together. threads: of a block.
    """

    swizzled: bool
    head_dims: tuple[int, ...]
    tile_keys: int
    threads: int

    def block_rows(self, head_dim: int) -> int:
        """Rows of Q that a block makes at a time."""
        return 128 if self.swizzled or head_dim <= _WIDE else 64

    def stages(self, head_dim: int) -> int:
        """Tiles in flight: of K or of V, or on warp products of both."""
        if self.swizzled:
            return 8
        return 3 if head_dim <= _WIDE else 2

    def shared_bytes(self, head_dim: int) -> int:
        """Dynamic shared memory of a block."""
        tile = self.tile_keys * head_dim * self.stages(head_dim)
        return tile + _SHARED_ALIGNMENT if self.swizzled else 2 * tile

    def unit(self, head_dim: int) -> CompileUnit:
        """The kernel for one of ``head_dims``."""
        if self.swizzled:
            arguments = (head_dim, self.stages(head_dim))
            return CompileUnit("attention/wgmma.cu", "int8AttentionWgmma", arguments, hopper=True)
        return CompileUnit("attention/mma.cu", "int8Attention", (head_dim,))

    def quantize_unit(self, head_dim: int) -> CompileUnit:
        """int8AttentionQuantize for one of ``head_dims``."""
        arguments = (head_dim, self.swizzled)
        return CompileUnit("attention/quantize.cu", "int8AttentionQuantize", arguments)


WARP = AttentionForm(swizzled=False, head_dims=HEAD_DIMS, tile_keys=64, threads=128)
WARPGROUP = AttentionForm(swizzled=True, head_dims=(64, 128), tile_keys=128, threads=384)


def attention_form(capability: tuple[int, int], head_dim: int, masked: bool) -> AttentionForm:
    """The kernel for heads of one of HEAD_DIMS: warpgroup products where the GPU and the kernel have them."""
    native = support(INT8_WGMMA, *capability) is Support.NATIVE
    return WARPGROUP if native and not masked and head_dim in WARPGROUP.head_dims else WARP


def attention_units(major: int, minor: int) -> Iterator[CompileUnit]:
    """Every INT8 attention instance that can be asked for on a GPU of this compute capability."""
    native = support(INT8_WGMMA, major, minor) is Support.NATIVE
    for form in (WARP, WARPGROUP) if native else (WARP,):
        for head_dim in form.head_dims:
            yield from (form.unit(head_dim), form.quantize_unit(head_dim))
