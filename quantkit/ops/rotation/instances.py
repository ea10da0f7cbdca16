"""Which instances of the rotation's kernel exist."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.cuda.architectures import WARP_THREADS, Architecture
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.launch import DTYPE_CODES
from quantkit.cuda.source import KernelSource
from quantkit.formats.hadamard import SIGN_CONSTANTS
from quantkit.ops.constants import SHARED_CONSTANTS

ROTATE_WARPS = 4  # of a block; each has a run of columns, so a few blocks share even one wide row
ROTATE_THREADS = ROTATE_WARPS * WARP_THREADS

_ROTATE = KernelSource("rotation/rotate.cu", {**SHARED_CONSTANTS, **SIGN_CONSTANTS, "ROTATE_WARPS": ROTATE_WARPS})


def rotate_unit(dtype: int) -> CompileUnit:
    """rotateInputs for one type of activations."""
    return CompileUnit(_ROTATE, "rotateInputs", (dtype,))


def rotation_units(_row: Architecture) -> Iterator[CompileUnit]:
    """Every instance of the rotation's kernel; the same on every GPU."""
    yield from map(rotate_unit, DTYPE_CODES.values())
