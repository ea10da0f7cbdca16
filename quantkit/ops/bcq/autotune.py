"""Which bcq kernel runs how many rows: measured once per GPU and shape class, kept in the user's cache.

The table is ``kernels/bcq_choice.json`` in quantkit's cache folder: {GPU: {shape class: {rows: kernel}}}, where GPU is
its name and a digest of the kernels, so that other kernels are measured anew. Editing an entry overrides the choice;
deleting one has it measured again when a layer of that class is next prepared.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from hashlib import sha256
from math import log2
from pathlib import Path

import torch
from torch import Tensor

from quantkit.assets import cache_folder
from quantkit.cuda.capability import BINARY_MMA, Support, support
from quantkit.cuda.compile import write_whole
from quantkit.cuda.device import compute_capability
from quantkit.cuda.source import kernel_source
from quantkit.cuda.timing import cold_seconds
from quantkit.errors import KernelError
from quantkit.formats.bcq import CODE_BITS
from quantkit.ops.bcq.launch import BINARY, DEQUANTIZE, INT8, KERNELS, LUT, binary_segment, candidates, product
from quantkit.ops.bcq.layout import BcqTiles

ROW_CLASSES = (1, 2, 4, 8, 16, 32, 64)
_FEW_ROWS = 8
_WIDE_SEGMENT = 128  # columns of a group from which on binary products of one row are faster, and of two in most cases
_FINE_SEGMENT = 32  # where INT8 products of one row are faster too
_CLEARLY = 0.95  # of the usual kernel's time, from where on another is taken: measurements this short differ by 5 %
_DIGEST = 8
_TABLE = Path("kernels") / "bcq_choice.json"

Choices = dict[str, dict[str, dict[str, str]]]


def shape_class(weight_bits: int, rows: int, columns: int, group_size: int, scale_bits: int = 16) -> str:
    """Shapes that share a measurement: planes, activation segment, N and K to the nearest power of two, scales."""
    segment = binary_segment(group_size, columns) or "bytes"
    scales = f"-scales{scale_bits}" if scale_bits == CODE_BITS else ""
    return f"q{weight_bits}-s{segment}-n{round(log2(rows))}-k{round(log2(columns))}{scales}"


@cache
def gpu_key(device: torch.device) -> str:
    """Under which a GPU's measurements stand in the table."""
    sources = "".join(kernel_source(f"{kernel.replace('_', '/', 1)}.cu") for kernel in KERNELS)
    return f"{torch.cuda.get_device_name(device)}, kernels {sha256(sources.encode()).hexdigest()[:_DIGEST]}"


@cache
def _table() -> Choices:
    path = cache_folder() / _TABLE
    try:
        table: Choices = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise KernelError(f"kernel table {path}: cannot be read ({error}); delete it to measure again") from error
    for gpu, classes in table.items():
        for name, rows in classes.items():
            for kernel in rows.values():
                if kernel not in KERNELS:
                    raise KernelError(f"kernel table {path}: unknown kernel {kernel!r} for {gpu}, {name}")
    return table


def _narrow(group_size: int, columns: int) -> bool:
    segment = binary_segment(group_size, columns)
    return segment is not None and segment < _WIDE_SEGMENT


def _least_int8_rows(native: bool, group_size: int, columns: int) -> int:
    if binary_segment(group_size, columns) == _FINE_SEGMENT:
        return 1
    return 2 if _narrow(group_size, columns) or not native else 3


def _unmeasured(x: Tensor, group_size: int, usable: tuple[str, ...]) -> str:
    (tokens, columns), device = x.shape, x.device
    native = support(BINARY_MMA, *compute_capability(device)) is Support.NATIVE
    if tokens > _FEW_ROWS or usable == (DEQUANTIZE,):
        return DEQUANTIZE
    if INT8 in usable and tokens >= _least_int8_rows(native, group_size, columns):
        return INT8
    return BINARY if native and BINARY in usable else LUT


def choose(x: Tensor, weight_bits: int, out_features: int, group_size: int, scale_bits: int = 16) -> str:
    """The kernel for x [M, K]: the measured one, or by the capability table where this class was never measured.

    Raises KernelError for a damaged table.
    """
    tokens, columns = x.shape
    usable = candidates(x.dtype, group_size, columns)
    if tokens > ROW_CLASSES[-1] or usable == (DEQUANTIZE,):
        return DEQUANTIZE
    measured = _table().get(gpu_key(x.device), {})
    rows = measured.get(shape_class(weight_bits, out_features, columns, group_size, scale_bits))
    if rows is None:
        return _unmeasured(x, group_size, usable)
    return rows[str(next(count for count in ROW_CLASSES if count >= tokens))]


def ensure_measured(weight: BcqTiles) -> None:
    """Measure this weight's shape class on its GPU, unless the table has it; also compiles the kernels it may use.

    Fractions of a second per class. Raises KernelError where a kernel cannot be built.
    """
    device, columns = weight.tiles.device, weight.columns
    gpu = gpu_key(device)
    name = shape_class(weight.weight_bits, weight.rows, columns, weight.group_size, weight.scale_bits)
    if name in _table().get(gpu, {}):
        return
    best: dict[str, str] = {}
    other = _copy(weight)
    usable = candidates(torch.float16, weight.group_size, columns)
    for tokens in ROW_CLASSES:
        x = torch.randn(tokens, columns, dtype=torch.float16, device=device)
        seconds = {
            kernel: cold_seconds(_call(kernel, x, other), _call(kernel, x, weight), device)
            for kernel in usable
            if _worth_measuring(kernel, tokens, _narrow(weight.group_size, columns))
        }
        best[str(tokens)] = _clear_winner(seconds, _unmeasured(x, weight.group_size, usable))
    table = {**_table(), gpu: {**_table().get(gpu, {}), name: best}}
    write_whole(cache_folder() / _TABLE, (json.dumps(table, indent=1) + "\n").encode())
    _table.cache_clear()


def _clear_winner(seconds: dict[str, float], usual: str) -> str:
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest if seconds[fastest] < _CLEARLY * seconds[usual] else usual


def _worth_measuring(kernel: str, tokens: int, narrow: bool) -> bool:
    if kernel == LUT:
        return tokens <= _FEW_ROWS
    if kernel == DEQUANTIZE:
        return tokens > 1  # it moves several times the bytes of a product of one row
    return kernel != INT8 or tokens > 1 or narrow


def _copy(weight: BcqTiles) -> BcqTiles:
    factors = None if weight.factor_tiles is None else weight.factor_tiles.clone()
    return replace(weight, tiles=weight.tiles.clone(), scale_tiles=weight.scale_tiles.clone(), factor_tiles=factors)


def _call(kernel: str, x: Tensor, weight: BcqTiles) -> Callable[[], Tensor]:
    return lambda: product(kernel, x, weight, None, settled=True)
