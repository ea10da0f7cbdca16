"""The speed tables and figures of nuQmm with the paper's own numbers beside ours.

python scripts/nuqmm/tables.py [--json FILE] [--markdown FILE] [--only table2,table3,table4,fig8,fig9]

The paper measured an A100 with its own kernel; ratios compare, microseconds do not. Every time comes from
``quantkit bench linear``'s rules: cold L2, graph replay, result checked in the same run. Needs a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from quantkit.bench.kernels import LinearBench, LinearResult, run_linear
from quantkit.bench.report import environment, to_json
from quantkit.bench.shapes import PAPER_SHAPES, LinearShape, parse_shapes
from quantkit.cli.common import check_json_path
from quantkit.formats.bcq import ROW_WISE, BcqSpec
from quantkit.formats.table import stored_bytes
from scripts.common import chosen, markdown_table, needed_gpu, run_script, write_document

CUDA = torch.device("cuda")
FP16_BYTES = 2
ROW = "row"
GROUPS = ("32", "64", "128", "256", "512", "1024", ROW)

# m -> (FP16 us, {q: (MB, us)}), nuQmm Table 2 (A100 40GB, row-wise scales)
TABLE_2 = {
    4096: (68.8, {2: (4.2, 20.2), 3: (6.3, 22.2), 4: (8.4, 24.3), 5: (10.5, 26.0)}),
    7168: (165.2, {2: (12.9, 35.9), 3: (19.3, 41.8), 4: (25.7, 47.1), 5: (32.1, 55.2)}),
    12288: (508.2, {2: (37.8, 84.2), 3: (56.6, 101.0), 4: (75.5, 117.7), 5: (94.4, 135.4)}),
}
# (m, q) -> (speed-up, W, mJ, normalized energy), nuQmm Table 3; q = 16 is cuBLAS on one GPU
TABLE_3 = {
    (8192, 16): (1.0, 248.27, 47.50, 1.0),
    (8192, 2): (4.41, 179.72, 7.81, 0.16),
    (8192, 4): (3.15, 234.09, 14.21, 0.30),
    (12288, 16): (1.0, 228.74, 118.46, 1.0),
    (12288, 2): (6.04, 289.11, 24.34, 0.21),
    (12288, 4): (4.32, 328.57, 38.66, 0.33),
}
# layer -> {q: (speed-up, normalized energy)}, nuQmm Table 4
TABLE_4 = {
    "attention qkv": {2: (5.59, 0.25), 4: (3.86, 0.37)},
    "attention output": {2: (6.18, 0.21), 4: (4.42, 0.33)},
    "ffn 1": {2: (5.40, 0.26), 4: (3.71, 0.38)},
    "ffn 2": {2: (7.63, 0.23), 4: (5.24, 0.34)},
}


def method(bits: int, group: str = ROW) -> str:
    """The paper's own format (no offset) as a method name."""
    return f"nuqmm-q{bits}-g{group}"


def measure(shapes: Sequence[LinearShape], methods: Sequence[str], *, energy: bool = False) -> list[LinearResult]:
    """Single-row results, in order of shape and method."""
    return list(run_linear(LinearBench(shapes, methods, (1,), CUDA, energy)))


def bits_of(result: LinearResult) -> int:
    """q from the method's name."""
    return int(result.method.split("-")[1][1:])


def table2() -> tuple[str, list[LinearResult]]:
    """Memory and latency against FP16, row-wise scales."""
    results = measure(PAPER_SHAPES["nuqmm-table2"], [method(bits) for bits in (2, 3, 4, 5)])
    rows = []
    for r in results:
        fp16, paper = TABLE_2[r.out_features]
        megabytes, latency = paper[bits_of(r)]
        stored = stored_bytes(BcqSpec(bits_of(r), ROW_WISE, offset=False), (r.out_features, r.in_features)) / 1e6
        ours = (f"{stored:.1f}", f"{r.baseline_us:.1f}", f"{r.median_us:.1f}", f"x{r.speed_up:.1f}")
        rows.append(
            (
                str(r.out_features),
                str(bits_of(r)),
                *ours,
                f"{megabytes}",
                f"{fp16}",
                f"{latency}",
                f"x{fp16 / latency:.1f}",
            )
        )
    header = ("m = n", "q", "MB", "FP16 us", "us", "speed-up", "paper MB", "paper FP16", "paper us", "paper")
    return markdown_table(header, rows), results


def table3() -> tuple[str, list[LinearResult]]:
    """Speed-up, power and energy against cuBLAS on one GPU, row-wise scales."""
    results = measure(PAPER_SHAPES["nuqmm-table3"], [method(2), method(4)], energy=True)
    rows = []
    for r in results:
        assert r.energy is not None
        assert r.baseline_energy is not None
        ratio = r.energy.millijoules / r.baseline_energy.millijoules
        paper = TABLE_3.get((r.out_features, bits_of(r)))
        theirs = ("-",) * 3 if paper is None else (f"x{paper[0]}", f"{paper[2]}", f"{paper[3]}")
        rows.append(
            (
                *(str(r.out_features), str(bits_of(r)), f"x{r.speed_up:.2f}", f"{r.energy.watts:.0f}"),
                *(f"{r.energy.gpu_percent}", f"{r.energy.memory_percent}", f"{r.energy.millijoules:.2f}"),
                *(f"{r.baseline_energy.millijoules:.2f}", f"{ratio:.2f}", *theirs),
            )
        )
    header = ("m", "q", "speed-up", "W", "GPU %", "memory %", "mJ", "cuBLAS mJ", "normalized")
    return markdown_table((*header, "paper speed-up", "paper mJ", "paper normalized"), rows), results


def table4() -> tuple[str, list[LinearResult]]:
    """The four matrices of a GPT-3 175B layer."""
    results = measure(PAPER_SHAPES["gpt3-175b"], [method(2), method(4)], energy=True)
    rows = []
    for r in results:
        assert r.energy is not None
        assert r.baseline_energy is not None
        speed_up, normalized = TABLE_4[r.shape][bits_of(r)]
        ratio = r.energy.millijoules / r.baseline_energy.millijoules
        rows.append((r.shape, str(bits_of(r)), f"x{r.speed_up:.2f}", f"{ratio:.2f}", f"x{speed_up}", f"{normalized}"))
    return markdown_table(("layer", "q", "speed-up", "energy", "paper speed-up", "paper energy"), rows), results


def fig8() -> tuple[str, list[LinearResult]]:
    """Latency against g, over that of row-wise scales (q = 2)."""
    shapes = PAPER_SHAPES["nuqmm-table2"]
    results = measure(shapes, [method(2, group) for group in GROUPS])
    rows = []
    for shape in shapes:
        own = [r for r in results if r.shape == shape.name]
        rows.append((shape.name, *(f"{r.median_us:.1f} ({r.median_us / own[-1].median_us:.2f})" for r in own)))
    return markdown_table(("m = n", *(f"g = {group}" for group in GROUPS)), rows), results


def fig9() -> tuple[str, list[LinearResult]]:
    """Latency against compression ratio, m = n = 12288, every (q, g)."""
    results = measure(parse_shapes("12288x12288"), [method(bits, group) for bits in (2, 3, 4, 5) for group in GROUPS])
    points = []
    for r in results:
        group = r.method.rsplit("-g", 1)[1]
        spec = BcqSpec(bits_of(r), ROW_WISE if group == ROW else int(group), offset=False)
        ratio = FP16_BYTES * r.out_features * r.in_features / stored_bytes(spec, (r.out_features, r.in_features))
        points.append((ratio, (f"{ratio:.2f}", str(bits_of(r)), group, f"{r.median_us:.1f}", f"x{r.speed_up:.2f}")))
    rows = [row for _, row in sorted(points)]
    return markdown_table(("compression", "q", "g", "us", "over FP16"), rows), results


PARTS: dict[str, tuple[str, Callable[[], tuple[str, list[LinearResult]]]]] = {
    "table2": ("Table 2: memory and latency against FP16 (g = row)", table2),
    "table3": ("Table 3: energy against cuBLAS on one GPU (g = row)", table3),
    "table4": ("Table 4: the matrices of GPT-3 175B (g = row)", table4),
    "fig8": ("Figure 8: latency in us (and over g = row), q = 2", fig8),
    "fig9": ("Figure 9: latency against compression ratio, m = n = 12288", fig9),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--only", default=",".join(PARTS))
    options = parser.parse_args()
    check_json_path(options.json)
    check_json_path(options.markdown, "--markdown")
    parts = chosen("--only", options.only, PARTS)
    needed_gpu()
    sections: list[str] = []
    results = {}
    for name in parts:
        title, run = PARTS[name]
        text, measured = run()
        sections.append(f"### {title}\n\n{text}\n")
        results[name] = [asdict(result) for result in measured]
        print(sections[-1], flush=True)
    write_document(options.json, to_json(environment(CUDA), **results))
    if options.markdown:
        options.markdown.write_text("\n".join(sections), encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
