"""The tables of docs/bipolar.md: Bipolar-INT Table 1, Table 2 and the throughput of Figs 5-6 on this machine's GPU.

    python scripts/bipolar_tables.py --json docs/results/bipolar-h200.json      # measure (one GPU, about 2 minutes)
    python scripts/bipolar_tables.py --render docs/results/bipolar-h200.json    # print the tables of a finished run

Times are of the product with its fused epilogue on activations that are quantized already, like the paper's; inputs
rotate through more memory than the L2 cache holds. fp16, torch._int_mm and fp8 run on the same shapes in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from quantkit.bench.timing import measure, rotation_length
from quantkit.errors import BenchError, QuantkitError
from quantkit.ops.bipolar_kernels import Activations, best_tile, launch_wgmma, path_for, sm_count

SQUARES = [(size, size, size) for size in (128, 256, 512, 1024, 2048, 4096, 8192)]
LLAMA_2_7B = [(1024, 4096, 4096), (1024, 10752, 4096), (1024, 4096, 10752)]
WIDTHS = [(1, 1), (1, 2), (2, 2), (2, 4), (3, 4), (4, 4), (8, 8)]
PEAKS = {"NVIDIA H200": {"binary": 15.4e15, "int8": 1.928e15}}  # measured with tensor cores alone, operations/s
_BLOCK, _LINE = 64, 128


def _sets(count: int, make: Callable[[], Any]) -> list[Any]:
    return [make() for _ in range(count)]


def _baselines(shape: tuple[int, int, int], device: torch.device) -> list[dict[str, Any]]:
    rows, channels, columns = shape
    count = rotation_length(2 * columns * (rows + channels), device)
    xs = _sets(count, lambda: torch.randn(rows, columns, device=device, dtype=torch.float16))
    ws = _sets(count, lambda: torch.randn(channels, columns, device=device, dtype=torch.float16))
    one = torch.ones((), device=device)
    kinds: dict[str, tuple[torch.dtype, Callable[[Any, Any], Any]]] = {
        "fp16": (torch.float16, lambda x, w: torch.nn.functional.linear(x, w)),
        "int_mm": (torch.int8, lambda x, w: torch._int_mm(x, w.t())),
        "fp8": (
            torch.float8_e4m3fn,
            lambda x, w: torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.float16),
        ),
    }
    found = []
    for name, (dtype, product) in kinds.items():
        pairs = [(x.to(dtype), w.to(dtype)) for x, w in zip(xs, ws, strict=True)]
        timing = measure([lambda x=x, w=w, f=product: f(x, w) for x, w in pairs], device)
        found.append(_entry(name, shape, timing.median, None))
    return found


def _entry(name: str, shape: Sequence[int], seconds: float, percent: float | None) -> dict[str, Any]:
    rows, channels, columns = shape
    entry = {"what": name, "M": rows, "N": channels, "K": columns, "us": round(seconds * 1e6, 2)}
    return entry if percent is None else {**entry, "percent_of_peak": round(percent, 1)}


def _product(shape: tuple[int, int, int], weight_bits: int, act_bits: int, device: torch.device) -> dict[str, Any]:
    rows, channels, columns = shape
    path = path_for(weight_bits, act_bits, *torch.cuda.get_device_capability(device))
    planes = (1, 1) if path.as_bytes else (weight_bits, act_bits)
    depth = _LINE if path.as_bytes else 8 * _LINE

    def tiles(lines: int, plane_count: int) -> torch.Tensor:
        size = (-(-lines // _BLOCK), -(-columns // depth), plane_count, _BLOCK, _LINE)
        return torch.randint(0, 256, size, dtype=torch.uint8, device=device)

    def operands() -> tuple[Any, ...]:
        sums = torch.zeros(max(rows, channels), dtype=torch.int32, device=device)
        acts = Activations(tiles(rows, planes[1]), sums, torch.rand(rows, device=device))
        weight = (tiles(channels, planes[0]), sums, torch.rand(channels, 1, device=device).half())
        return acts, weight, torch.empty(rows, channels, dtype=torch.float16, device=device)

    tile = best_tile(*planes, path.as_bytes, rows, channels, sm_count(device))
    limits = ((1 << act_bits) - 1, (1 << weight_bits) - 1)
    moved = columns * (rows * act_bits + channels * weight_bits) // 8 + 2 * rows * channels
    calls = [
        lambda s=s: launch_wgmma(tile, s[0], s[1], None, s[2], columns, limits)
        for s in _sets(rotation_length(moved, device), operands)
    ]
    seconds = measure(calls, device).median
    products = 1 if path.as_bytes else weight_bits * act_bits
    peak = PEAKS.get(torch.cuda.get_device_name(device), {}).get("int8" if path.as_bytes else "binary")
    percent = None if peak is None else 100 * 2 * rows * channels * columns * products / seconds / peak
    name = f"w{weight_bits}a{act_bits}" + (" (int8)" if path.as_bytes else "")
    if percent is not None and percent > 100:
        raise BenchError(f"{name} at {shape}: {percent:.0f} % of the GPU's peak; not a valid measurement")
    return _entry(name, shape, seconds, percent)


def run() -> dict[str, Any]:
    """Measure every shape; raises BenchError without a GPU of compute capability 9.0 or above 100 % of peak."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise BenchError("the tables need a GPU of compute capability 9.0 (H100, H200)")
    device, entries = torch.device("cuda"), []
    for shape in dict.fromkeys([*SQUARES, *LLAMA_2_7B]):
        entries += _baselines(shape, device)
        entries += [_product(shape, p, q, device) for p, q in WIDTHS]
        torch.cuda.empty_cache()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": torch.cuda.get_device_name(device)}
    return {"versions": versions, "entries": entries}


def render(entries: Sequence[dict[str, Any]], shapes: Sequence[tuple[int, int, int]]) -> str:
    """A Markdown table: microseconds, times fp16, percent of the peak of the units used."""
    measured = {(e["what"], e["M"], e["N"], e["K"]): e for e in entries}
    shapes = [shape for shape in shapes if ("fp16", *shape) in measured]
    names = list(dict.fromkeys(e["what"] for e in entries))
    head = ["| us (x fp16, % of peak) |", *(f" {m} x {n} x {k} |" for m, n, k in shapes)]
    lines = ["".join(head), "|---" * (len(shapes) + 1) + "|"]
    for name in names:
        cells = []
        for shape in shapes:
            entry = measured.get((name, *shape))
            if entry is None:
                cells.append(" ")
                continue
            speed_up = measured["fp16", *shape]["us"] / entry["us"]
            percent = f", {entry['percent_of_peak']:.0f} %" if "percent_of_peak" in entry else ""
            cells.append(f" {entry['us']:.1f} ({speed_up:.2f}{percent}) ")
        lines.append(f"| {name} |" + "|".join(cells) + "|")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="measure, and write the numbers here")
    parser.add_argument("--render", type=Path, help="print the tables of a finished run")
    options = parser.parse_args()
    try:
        document = json.loads(options.render.read_text()) if options.render else run()
    except QuantkitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(render(document["entries"], SQUARES) + "\n\n" + render(document["entries"], LLAMA_2_7B))
    return 0


if __name__ == "__main__":
    sys.exit(main())
