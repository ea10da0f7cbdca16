"""One row of activations: quantkit's GEMV beside what torch has, same GPU, same run, same timing rules.

python scripts/nuqmm/compare_gemv.py [--sizes 4096,8192,12288,16384] [--json FILE] [--markdown FILE]

fp16 is F.linear, fp8 torch._scaled_mm (e4m3 both sides), tinygemm torch._weight_int4pack_mm (bf16, g = 128); ours
are nuqmm-qN-g128 (no offset), activation planes included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from quantkit.bench.kernels import LinearBench, run_linear
from quantkit.bench.report import environment, to_json
from quantkit.bench.shapes import parse_shapes
from quantkit.bench.timing import measure, rotation_length
from quantkit.cli.common import check_json_path
from quantkit.ops.bcq.launch import Product, lut_gemv
from scripts.common import markdown_table, needed_gpu, run_script, write_document
from scripts.nuqmm.tune_bcq import random_tiles

CUDA = torch.device("cuda")
GROUP = 128
INNER_K_TILES = 8
BITS = (1, 2, 3, 4)


def fp8(size: int) -> Callable[[], Any]:
    """One call on its own weight."""
    x = torch.randn(16, size, device=CUDA).to(torch.float8_e4m3fn)
    weight = torch.randn(size, size, device=CUDA).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=CUDA)
    return lambda: torch._scaled_mm(x, weight, scale_a=one, scale_b=one, out_dtype=torch.float16)


def tinygemm(size: int) -> Callable[[], Any]:
    """One call on its own weight."""
    x = torch.randn(1, size, device=CUDA, dtype=torch.bfloat16)
    codes = torch.randint(0, 255, (size, size // 2), dtype=torch.uint8, device=CUDA)
    packed = torch._convert_weight_to_int4pack(codes, INNER_K_TILES)
    scales = torch.rand(size // GROUP, size, 2, device=CUDA, dtype=torch.bfloat16)
    return lambda: torch._weight_int4pack_mm(x, packed, GROUP, scales)


PEERS: dict[str, tuple[Callable[[int], Callable[[], Any]], float]] = {"fp8": (fp8, 1.0), "tinygemm": (tinygemm, 0.5)}


def lookup(bits: int, size: int) -> float:
    """Microseconds of bcq_lut_gemv."""
    count = rotation_length(size * size * bits // 8, CUDA)
    x = torch.randn(1, size, device=CUDA).half()

    def call() -> Callable[[], Any]:
        weight = random_tiles(bits, size, GROUP, offset=False)
        return lambda: lut_gemv(Product.of(x, weight, None, weights_ready=True))

    calls = [call() for _ in range(count)]
    torch.cuda.synchronize()
    return measure(calls, CUDA).median * 1e6


def compare(size: int) -> dict[str, Any]:
    """All microseconds of one size."""
    row: dict[str, Any] = {"size": size}
    methods = [f"nuqmm-q{bits}-g{GROUP}" for bits in BITS]
    for result in run_linear(LinearBench(parse_shapes(f"{size}x{size}"), methods, (1,), CUDA)):
        row["fp16"] = result.baseline_us
        row[result.method] = asdict(result)
    for name, (make, bytes_per_weight) in PEERS.items():
        try:
            count = rotation_length(int(size * size * bytes_per_weight), CUDA)
            row[name] = measure([make(size) for _ in range(count)], CUDA).median * 1e6
        except RuntimeError as error:
            row[name] = None
            print(f"{name} at {size}: {str(error).splitlines()[0]}")
    row["lut"] = {bits: lookup(bits, size) for bits in (2, 4)}
    return row


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/bcq.md."""
    header = ["m = n", "fp16", *PEERS, "LUT q=2", "LUT q=4", *(f"q={bits}" for bits in BITS), "q=4 % of peak"]
    lines = []
    for row in rows:
        ours = [row[f"nuqmm-q{bits}-g{GROUP}"] for bits in BITS]
        peers = ["-" if row[name] is None else f"{row[name]:.1f}" for name in PEERS]
        luts = [f"{row['lut'][bits]:.1f}" for bits in (2, 4)]
        percent = "-" if ours[-1]["peak_percent"] is None else f"{ours[-1]['peak_percent']:.0f}"
        cells = [str(row["size"]), f"{row['fp16']:.1f}", *peers, *luts, *(f"{r['median_us']:.1f}" for r in ours)]
        lines.append([*cells, percent])
    return markdown_table(header, lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4096,8192,12288,16384")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    check_json_path(options.json)
    check_json_path(options.markdown, "--markdown")
    needed_gpu()
    rows = [compare(int(size)) for size in options.sizes.split(",")]
    print(markdown(rows))
    write_document(options.json, to_json(environment(CUDA), rows=rows))
    if options.markdown:
        options.markdown.write_text(markdown(rows), encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
