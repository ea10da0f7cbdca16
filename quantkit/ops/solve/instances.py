"""Which instances of the solvers' kernels exist, and what their blocks keep in shared memory."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.cuda.architectures import WARP_THREADS, Architecture
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.source import KernelSource
from quantkit.formats.bcq import MOST_OFFSET_CODE, MOST_SCALE_CODE
from quantkit.formats.planes import MAX_BITS
from quantkit.formats.trellis import BLOCK_ROWS
from quantkit.ops.constants import SHARED_CONSTANTS

MOST_COLUMNS = 64
"""Columns that a launch rounds, or descends over, at most; all of one group."""

COLUMNS_ROWS = WARP_THREADS  # rows of a block there
SOLVE_THREADS = 128  # of the other kernels' blocks

CODED_COLUMNS = 512
"""Columns of a group that a warp finds codes for, or sums up, at most."""

_FLOAT_BYTES = 4
_PADDING = 1, 4  # floats behind the values of a column, bytes behind the codes of a row

TRELLIS_FILTERS = ((2, 4), (2, 6), (3, 3), (3, 5), (4, 2), (4, 4))
"""weight_bits and taps that weights are quantized with."""
_SHARED_BRANCHES = 1 << 16  # bytes of won branches that a block keeps in shared memory

_CONSTANTS = {
    **SHARED_CONSTANTS,
    "MOST_COLUMNS": MOST_COLUMNS,
    "COLUMNS_ROWS": COLUMNS_ROWS,
    "SOLVE_THREADS": SOLVE_THREADS,
    "CODED_COLUMNS": CODED_COLUMNS,
    "MOST_SCALE_CODE": MOST_SCALE_CODE,
    "MOST_OFFSET_CODE": MOST_OFFSET_CODE,
    "BLOCK_ROWS": BLOCK_ROWS,
}
_COLUMNS = KernelSource("solve/columns.cu", _CONSTANTS)
_SCALES = KernelSource("solve/scales.cu", _CONSTANTS)
_FIT = KernelSource("solve/fit.cu", _CONSTANTS)
_CODES = KernelSource("solve/codes.cu", _CONSTANTS)
_TRELLIS = KernelSource("solve/trellis.cu", _CONSTANTS)


def _columns_bytes(bits: int) -> int:
    """The factor, a column of values and a table of levels for each row, and the codes."""
    levels, (floats, codes) = COLUMNS_ROWS * 2**bits, _PADDING
    numbers = MOST_COLUMNS * (MOST_COLUMNS + COLUMNS_ROWS + floats) + levels
    return numbers * _FLOAT_BYTES + levels + COLUMNS_ROWS * (MOST_COLUMNS + codes)


def round_unit(bits: int) -> CompileUnit:
    """bcqRoundColumns: GPTQ over columns of one group."""
    return CompileUnit(_COLUMNS, "bcqRoundColumns", (bits,), _columns_bytes(bits))


def descend_unit(bits: int) -> CompileUnit:
    """bcqDescendColumns: cyclic descent over columns of one group."""
    return CompileUnit(_COLUMNS, "bcqDescendColumns", (bits,), _columns_bytes(bits))


def signs_unit(bits: int, offset: bool) -> CompileUnit:
    """bcqSigns: planes of a group as numbers, and ones for an offset."""
    return CompileUnit(_SCALES, "bcqSigns", (bits, offset))


def residual_unit(bits: int) -> CompileUnit:
    """bcqResidual: weight less the levels of its codes."""
    return CompileUnit(_SCALES, "bcqResidual", (bits,))


def refit_unit(bits: int, offset: bool) -> CompileUnit:
    """bcqRefitScales: a step of a group's scales against the Hessian."""
    return CompileUnit(_SCALES, "bcqRefitScales", (bits, offset))


def fit_unit(bits: int, offset: bool) -> CompileUnit:
    """bcqFitGroups: scales of groups by themselves."""
    return CompileUnit(_FIT, "bcqFitGroups", (bits, offset))


def nearest_unit(bits: int) -> CompileUnit:
    """bcqNearestCodes: codes of copies that are tuned, and the weight of codes."""
    return CompileUnit(_CODES, "bcqNearestCodes", (bits,))


def code_gradients_unit(bits: int) -> CompileUnit:
    """bcqCodeGradients: of scales and offset, from that of the weight."""
    return CompileUnit(_CODES, "bcqCodeGradients", (bits,))


def trellis_threads(states: int) -> int:
    """Threads of a block of trellisColumns."""
    return 64 if states <= 64 else 256 if states <= 1024 else 512


def branches_bytes(states: int) -> int:
    """Bytes of won branches of a ring, four bits a state and row."""
    return BLOCK_ROWS * states // 2


def trellis_scratch(states: int) -> bool:
    """Whether the won branches of a block go to memory, as they do not fit into shared memory everywhere."""
    return branches_bytes(states) > _SHARED_BRANCHES


def trellis_unit(bits: int, taps: int) -> CompileUnit:
    """trellisColumns: GPTQ or cyclic descent over columns in the trellis format."""
    states = 2 ** (bits * (taps - 1))
    numbers = MOST_COLUMNS * BLOCK_ROWS + 3 * states + 3 * BLOCK_ROWS + 2 * trellis_threads(states)
    shared = numbers * _FLOAT_BYTES + (0 if trellis_scratch(states) else branches_bytes(states))
    return CompileUnit(_TRELLIS, "trellisColumns", (bits, taps, trellis_threads(states)), shared)


def solve_units(_row: Architecture) -> Iterator[CompileUnit]:
    """Every instance of the solvers' kernels; the same on every GPU."""
    for bits in range(1, MAX_BITS + 1):
        yield from (unit(bits) for unit in (round_unit, descend_unit, residual_unit, nearest_unit, code_gradients_unit))
        yield from (unit(bits, offset) for unit in (signs_unit, refit_unit, fit_unit) for offset in (False, True))
    yield from (trellis_unit(bits, taps) for bits, taps in TRELLIS_FILTERS)
