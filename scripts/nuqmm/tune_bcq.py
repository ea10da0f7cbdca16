"""Times block layouts of bcq_binary_gemv, bcq_int8_gemv and their peers: what quantkit/ops/bcq/plan.py is tuned by.

python scripts/nuqmm/tune_bcq.py [--sizes 4096,12288,16384] [--bits 1,2,4] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.bench.timing import measure, rotation_length
from quantkit.cli.common import check_json_path
from quantkit.cuda.architectures import known_peaks
from quantkit.errors import KernelError
from quantkit.ops.bcq.instances import GemvTile
from quantkit.ops.bcq.launch import lut_gemv, tensor_core_gemv
from quantkit.ops.bcq.layout import BcqTiles
from quantkit.ops.bcq.product import Product
from scripts.common import needed_gpu, run_script, write_document

Gemv = Callable[..., Tensor]
binary_gemv: Gemv = partial(tensor_core_gemv, int8=False)
int8_gemv: Gemv = partial(tensor_core_gemv, int8=True)
Layout = tuple[int | None, ...]  # the fields of GemvTile
LAYOUTS: dict[tuple[int, int], list[Layout]] = {  # by planes and rows
    (1, 1): [(16, 4, 3, 1), (16, 4, 4, 1), (12, 4, 4, 1), (8, 4, 3, 2)],
    (2, 1): [(16, 2, 3, 1), (16, 2, 4, 1), (16, 2, 5, 1), (8, 2, 4, 2)],
    (3, 1): [(16, 1, 4, 1), (16, 1, 6, 1), (16, 1, 7, 1), (8, 1, 4, 2)],
    (4, 1): [(16, 1, 3, 1), (16, 1, 4, 1), (16, 1, 5, 1), (8, 1, 4, 2)],
    (1, 2): [(12, 4, 3, 1), (16, 4, 2, 1)],
    (2, 2): [(12, 2, 3, 1), (16, 2, 2, 1)],
    (4, 2): [(12, 1, 3, 1), (16, 1, 3, 1)],
}
INT8_LAYOUTS: dict[tuple[int, int], list[Layout]] = {
    (1, 4): [(12, 4, 2, 1), (12, 4, 2, 1, 2), (16, 4, 2, 1, 2), (12, 8, 2, 1, 2)],
    (2, 4): [(12, 2, 3, 1), (12, 2, 2, 1), (12, 2, 2, 1, 2), (12, 4, 2, 1, 2), (16, 2, 2, 1, 2)],
    (4, 4): [(12, 1, 3, 1), (12, 1, 2, 1, 2), (12, 1, 4, 1, 2), (12, 2, 2, 1, 2)],
    (1, 8): [(12, 4, 2, 1), (8, 4, 3, 1), (8, 4, 2, 1, 2), (8, 4, 3, 1, 2)],
    (2, 8): [(12, 2, 2, 1), (8, 2, 3, 1), (8, 2, 2, 1, 2), (8, 2, 3, 1, 2)],
    (4, 8): [(12, 1, 2, 1), (8, 1, 3, 1), (8, 1, 2, 1, 2), (8, 2, 2, 1, 2), (8, 1, 3, 1, 2)],
}
NARROW_LAYOUTS: dict[tuple[int, int], list[Layout]] = {  # of bcq_int8_gemv, groups of 32
    (1, 1): [(16, 4, 3, 1), (16, 4, 2, 1), (12, 4, 4, 1), (8, 4, 3, 2)],
    (2, 1): [(16, 2, 3, 1), (16, 2, 2, 1), (16, 1, 4, 1), (12, 2, 4, 1), (12, 4, 2, 1), (8, 2, 3, 2)],
    (4, 1): [(16, 1, 3, 1), (16, 1, 2, 1), (12, 1, 4, 1), (12, 2, 2, 1), (8, 1, 3, 2)],
    (1, 2): [(12, 4, 2, 1), (12, 2, 4, 1)],
    (2, 2): [(12, 2, 2, 1), (16, 2, 2, 1), (16, 1, 3, 1), (8, 2, 4, 1)],
    (4, 2): [(12, 1, 2, 1), (16, 1, 2, 1), (16, 1, 3, 1), (8, 1, 4, 1)],
}
NARROW = 32
CUDA = torch.device("cuda")


def random_tiles(bits: int, shape: tuple[int, int], group_size: int, *, offset: bool) -> BcqTiles:
    """A random prepared weight of shape (N, K)."""
    n, k = shape
    tiles = torch.randint(-(2**31), 2**31 - 1, (n // 16, -(-k // 256), bits, 128), dtype=torch.int32, device=CUDA)
    scales = torch.rand(n // 16, -(-k // group_size), 8, bits + offset, 2, device=CUDA).half() * 0.02
    return BcqTiles(tiles, scales, None, n, k, group_size)


def microseconds(make: Callable[[int], Callable[[], Any]], count: int) -> float:
    """Median time of one call over the rotation."""
    return measure([make(i) for i in range(count)], CUDA).median * 1e6


def _calls(gemv: Gemv, x: Tensor, weights: list[BcqTiles], tile: GemvTile | None) -> Callable[[int], Callable[[], Any]]:
    return lambda i: lambda: gemv(Product.of(x, weights[i], None, weights_ready=True), tile=tile)


def candidates(bits: int, rows: int, group_size: int) -> dict[str, tuple[Gemv, GemvTile | None]]:
    """By name: the tables' layouts and those to compare them with. Names are the fields of GemvTile."""
    found: dict[str, tuple[Gemv, GemvTile | None]] = {"table": (binary_gemv, None)}
    for layout in LAYOUTS.get((bits, rows), []):
        found["x".join(map(str, layout))] = binary_gemv, GemvTile(*layout)  # type: ignore[arg-type]
    narrow = group_size == NARROW
    if rows > 1 or narrow:
        found["int8"] = int8_gemv, None
    few = narrow and rows <= 2
    for layout in (NARROW_LAYOUTS if few else INT8_LAYOUTS).get((bits, rows), []):
        found["int8-" + "x".join(map(str, layout))] = int8_gemv, GemvTile(*layout)  # type: ignore[arg-type]
    return found


def tune(bits: int, size: int, group_size: int, offset: bool, rows: int) -> dict[str, float]:
    """Microseconds per layout, the table's first, and of the look-up kernel."""
    weights_bytes = size * size * bits // 8
    count = rotation_length(weights_bytes, CUDA)
    weights = [random_tiles(bits, (size, size), group_size, offset=offset) for _ in range(count)]
    x = torch.randn(rows, size, device=CUDA).half()
    torch.cuda.synchronize()
    result: dict[str, float] = {}
    peaks = known_peaks(torch.cuda.get_device_name(CUDA))
    total = weights_bytes + weights[0].scale_tiles.numel() * 2
    for name, (gemv, tile) in candidates(bits, rows, group_size).items():
        try:
            result[name] = microseconds(_calls(gemv, x, weights, tile), count)
        except KernelError as error:
            result[name] = float("nan")
            print(name, error)
    if rows == 1:
        result["serial"] = microseconds(lambda i: lambda: binary_gemv(Product.of(x, weights[i], None)), count)
        result["lut"] = microseconds(
            lambda i: lambda: lut_gemv(Product.of(x, weights[i], None, weights_ready=True)), count
        )
    best = min(value for name, value in result.items() if value == value and name not in ("lut", "serial"))
    fields = "  ".join(f"{name} {value:.2f}" for name, value in result.items())
    share = "" if peaks is None else f" {total / best * 1e6 / peaks.read_bandwidth:.1%} of the read bandwidth"
    print(f"q={bits} m={size} g={group_size} off={offset:d} M={rows}{share} | {fields}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="4096,12288,16384")
    parser.add_argument("--bits", default="1,2,4")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    check_json_path(options.json)
    needed_gpu()
    results: dict[str, dict[str, float]] = {}
    for bits in map(int, options.bits.split(",")):
        for size in map(int, options.sizes.split(",")):
            for group_size, offset, rows in [
                *((group, False, 1) for group in (128, 64, NARROW, size)),
                (128, True, 1),
                *((group, False, count) for group in (128, NARROW) for count in (2, 4, 8)),
            ]:
                results[f"q{bits}-{size}-g{group_size}-o{offset:d}-M{rows}"] = tune(
                    bits, size, group_size, offset, rows
                )
    write_document(options.json, results)


if __name__ == "__main__":
    run_script(main)
