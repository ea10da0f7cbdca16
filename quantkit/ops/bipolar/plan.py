"""Which bipolar kernel multiplies a pair of widths on a GPU generation, and with which tile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod

from quantkit.cuda.architectures import Architecture, Kernel
from quantkit.formats.bipolar import MOST_CODED_BITS, largest_act, largest_value
from quantkit.formats.planes import MAX_BITS
from quantkit.ops.bipolar.instances import (
    BINARY_LIMIT,
    WgmmaTile,
    wgmma_tiles,
)
from quantkit.ops.bipolar.layout import LINE_BYTES

GEMV_LIMIT = 64
"""(token, plane) pairs up to which the GEMV kernel, which reads the weights once, is taken."""
GEMV_LIMIT_BEFORE_FUSED, CODED_GEMV_LIMIT_BEFORE_FUSED = 16, 8
"""The same where the fused product follows, which reads them once as well; and with scale codes."""

_BINARY_SUMS = 1 << 22  # what the binary warpgroup kernel turns into floats without a conversion
_BINARY, _INT8 = (
    (Kernel.BIPOLAR_BINARY_WGMMA, Kernel.BIPOLAR_BINARY_MMA),
    (Kernel.BIPOLAR_INT8_WGMMA, Kernel.BIPOLAR_INT8_MMA),
)
WGMMA_KERNELS = (Kernel.BIPOLAR_BINARY_WGMMA, Kernel.BIPOLAR_INT8_WGMMA)
INT8_KERNELS = _INT8
"""Which take weights expanded to bytes."""
BYTE_KERNELS = (*_INT8, Kernel.BIPOLAR_FUSED_WGMMA)
"""Which take a byte per code of x."""
_FUSED_MANY, _FUSED_FEW = 1024, 256  # tokens; of up to _FUSED_PLANES planes, and of more
_FUSED_PLANES = 5


@dataclass(frozen=True)
class Path:
    """How a pair of widths is multiplied for many tokens.

    binary: the kernel for K up to ``longest``, on planes; None where binary products do not pay. int8: the kernel for
    any other K, on codes of a byte. reason: why, for ``quantkit doctor``.
    """

    binary: Kernel | None
    longest: int
    int8: Kernel
    reason: str

    def kernel(self, in_features: int) -> Kernel:
        """The kernel for this K."""
        return self.int8 if self.binary is None or in_features > self.longest else self.binary


def path_for(weight_bits: int, act_bits: int, row: Architecture, *, act_zero: bool = False) -> Path:
    """The path of a pair of widths on a GPU generation; with zero points sums are up to twice as large."""
    int8 = next(kernel for kernel in _INT8 if kernel in row.kernels)
    binary = next((kernel for kernel in _BINARY if kernel in row.kernels), None)
    if binary is None:
        return Path(None, 0, int8, "binary products are not native on this GPU")
    if weight_bits * act_bits > BINARY_LIMIT:
        return Path(None, 0, int8, f"more than {BINARY_LIMIT} plane products cost more than one INT8 product")
    longest = _BINARY_SUMS // (largest_value(weight_bits) * largest_act(act_bits, act_zero))
    rates = f"at most {BINARY_LIMIT} plane products, each at {BINARY_LIMIT} times the INT8 rate"
    return Path(binary, longest, int8, f"{rates}; INT8 above K = {longest}")


def fused_limit(weight_bits: int) -> int:
    """Tokens up to which planes become codes within the product, where expanding them in memory takes longer."""
    return _FUSED_MANY if weight_bits <= _FUSED_PLANES else _FUSED_FEW


@cache
def kernel_for(
    weight_bits: int,
    act_bits: int,
    shape: tuple[int, int],
    row: Architecture,
    *,
    act_zero: bool = False,
    coded: bool = False,
) -> Kernel:
    """The kernel for x of ``shape`` [M, K]: the GEMV for few tokens where the GPU has it, else the path's.

    In place of a product of expanded weights the fused one takes up to fused_limit tokens, where the GPU has it.
    coded: with scale codes weights are bytes, and not bits.
    """
    tokens, in_features = shape
    path = path_for(weight_bits, act_bits, row, act_zero=act_zero)
    kernel = path.int8 if coded else path.kernel(in_features)
    fuses = kernel in INT8_KERNELS and Kernel.BIPOLAR_FUSED_WGMMA in row.kernels and tokens <= fused_limit(weight_bits)
    before_fused = CODED_GEMV_LIMIT_BEFORE_FUSED if coded else GEMV_LIMIT_BEFORE_FUSED
    few = before_fused if fuses else GEMV_LIMIT
    if Kernel.BIPOLAR_GEMV in row.kernels and tokens * act_bits <= few:
        return Kernel.BIPOLAR_GEMV
    return Kernel.BIPOLAR_FUSED_WGMMA if fuses else kernel


def best_tile(planes_w: int, planes_x: int, as_bytes: bool, shape: tuple[int, int], processors: int) -> WgmmaTile:
    """The tile with the fewest clocks for y of ``shape`` [M, N]: rounds over the SMs times the clocks of a k tile.

    Of equals the first, which is the one with the most reuse.
    """

    def clocks(tile: WgmmaTile) -> float:
        tiles = prod(tile.count(*shape))
        return -(-tiles // processors) * tile.stage_clocks(min(1.0, tiles / processors))

    return min(wgmma_tiles(planes_w, planes_x, as_bytes), key=clocks)


def path_table(row: Architecture) -> list[tuple[str, str, str]]:
    """(widths, kernel, reason) of every case, equal neighbours merged, for ``quantkit doctor``."""
    widths = range(1, MAX_BITS + 1)
    lines = []
    why = "the same weight with scales s * 2^i; activations rounded first"
    lines.append(("A16, or groups but those of the next line", "bcq kernels", why))
    codes = f"groups of whole {LINE_BYTES} columns with 8-bit scales, W1-{MOST_CODED_BITS}"
    lines.append((codes, "as INT8", "a scale times a value is a byte, so a row has one sum of integers"))
    if Kernel.BIPOLAR_GEMV in row.kernels:
        memory = "memory is the limit: planes are read once"
        sooner = f", INT8 <= {GEMV_LIMIT_BEFORE_FUSED}" if Kernel.BIPOLAR_FUSED_WGMMA in row.kernels else ""
        lines.append((f"any, tokens * A <= {GEMV_LIMIT}{sooner}", Kernel.BIPOLAR_GEMV.value, memory))
    if Kernel.BIPOLAR_FUSED_WGMMA in row.kernels:
        why = "planes become codes within the product"
        limits = f"tokens <= {_FUSED_MANY}, of more than {_FUSED_PLANES} weight bits {_FUSED_FEW}"
        lines.append((f"INT8, tokens * A > {GEMV_LIMIT_BEFORE_FUSED}, {limits}", Kernel.BIPOLAR_FUSED_WGMMA.value, why))
    for p in widths:
        paths = [path_for(p, q, row) for q in widths]
        ends = [0, *(q for q, (a, b) in enumerate(pairwise(paths), 1) if a.binary is not b.binary), MAX_BITS]
        for first, last in pairwise(ends):
            name = f"W{p}A{first + 1}" if last == first + 1 else f"W{p}A{first + 1}-{last}"
            path = paths[last - 1]  # of a range, the one with the lowest limit of K
            lines.append((name, (path.binary or path.int8).value, path.reason))
    return lines
