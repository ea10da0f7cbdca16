"""Which instances of the bcq kernels exist."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.cuda.units import CompileUnit
from quantkit.formats.planes import MAX_BITS


def dequantize_unit(weight_bits: int) -> CompileUnit:
    """bcq_dequantize for one number of planes."""
    return CompileUnit("bcq_dequantize.cu", "bcqDequantize", (weight_bits,))


def bcq_units(major: int, minor: int) -> Iterator[CompileUnit]:
    """Every bcq instance that can be asked for on a GPU of this compute capability."""
    for weight_bits in range(1, MAX_BITS + 1):
        yield dequantize_unit(weight_bits)
