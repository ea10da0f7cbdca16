"""What zero points, rotated inputs and groups cost a bipolar product: microseconds of the whole op, beside it without.

python scripts/bipolar/compare_coding.py --bits w4a8,w4a4 --shapes 1x4096x4096,1024x4096x4096 --json coding.json

Shapes are tokens x out_features x in_features. Each variant is captured in a CUDA graph of several calls and replayed
in turns with the others; a time is the median of the replays, over the calls. The weight stays in L2 where it fits.
--runs repeats this with newly drawn operands; a time is then the median of the runs, each of which the JSON holds.
Groups are of 128 columns, with 8-bit scales, of weights of at most 6 bits.
"""

from __future__ import annotations

import argparse
import re
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from quantkit.bench.report import environment
from quantkit.cuda.graph import capture
from quantkit.errors import BenchError
from quantkit.formats.bcq import ROW_WISE
from quantkit.formats.bipolar import MOST_CODED_BITS, largest_scale
from quantkit.formats.planes import pack_codes
from quantkit.ops.bipolar.op import BipolarPreparedLinear, bipolar_prepared_linear
from quantkit.ops.bipolar.weight import tiled_weight
from scripts.common import command_line, markdown_table, needed_gpu, run_script, write_document

VARIANTS = {"plain": (False, False), "zero": (True, False), "rotated": (False, True), "both": (True, True)}
"""Name: whether tokens have zero points, whether inputs are rotated."""
GROUPED = {"groups": (False, False), "groups and both": (True, True)}
"""The same with a scale code per row and group."""
GROUP_SIZE = 128
REPLAYS = 25
MANY_TOKENS, CALLS, CALLS_OF_MANY = 1024, 20, 4  # of a graph; from so many tokens on


def _variants(bits: tuple[int, int], shape: tuple[int, int, int], device: torch.device) -> dict[str, partial[Any]]:
    """By name, a call of the op."""
    (weight_bits, act_bits), (tokens, out_features, in_features) = bits, shape
    codes = torch.randint(0, 1 << weight_bits, (out_features, in_features), dtype=torch.uint8)
    planes, scales = pack_codes(codes, weight_bits).to(device), torch.full((out_features, 1), 0.01).half().to(device)
    weights = [tiled_weight(planes, scales, None, ROW_WISE, in_features)]
    if weight_bits <= MOST_CODED_BITS:
        by_group = out_features, -(-in_features // GROUP_SIZE)
        drawn = torch.randint(1, largest_scale(weight_bits) + 1, by_group, dtype=torch.uint8).to(device)
        weights.append(tiled_weight(planes, drawn, scales, GROUP_SIZE, in_features))
    x, clip = torch.randn(tokens, in_features).half().to(device), torch.ones(1, device=device)
    calls = {}
    for weight, variants in zip(weights, (VARIANTS, GROUPED), strict=False):
        stored = weight.tiles, weight.row_sums, weight.scales
        plain = BipolarPreparedLinear(x, *stored, clip, None, act_bits, True, scale_tiles=weight.scale_tiles)
        for name, (zero, rotate) in variants.items():
            calls[name] = partial(bipolar_prepared_linear, *plain._replace(act_zero=zero, rotate_inputs=rotate))
    return calls


def _calls(tokens: int) -> int:
    return CALLS if tokens < MANY_TOKENS else CALLS_OF_MANY


def measure(bits: tuple[int, int], shape: tuple[int, int, int], device: torch.device) -> dict[str, float]:
    """Microseconds of a call by variant."""
    calls = _variants(bits, shape, device)  # they hold the memory that the graphs read
    graphs = {name: capture([call] * _calls(shape[0]), device) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPLAYS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / _calls(shape[0]))
    return {name: sorted(each)[len(each) // 2] for name, each in times.items()}


def _numbers(text: str, pattern: str, what: str) -> tuple[int, ...]:
    found = re.fullmatch(pattern, text)
    if found is None:
        raise BenchError(f"{what} {text!r} cannot be read")
    return tuple(map(int, found.groups()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", default="w4a8,w4a4,w2a2,w8a8")
    parser.add_argument("--shapes", default="1x4096x4096,16x4096x4096,1024x4096x4096,4096x4096x4096,1024x4096x11008")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.runs < 1:
        raise BenchError(f"--runs is {options.runs}; choose 1 or more")
    bits = {text: _numbers(text, r"w([1-8])a([1-8])", "--bits") for text in options.bits.split(",")}
    shapes = {text: _numbers(text, r"(\d+)x(\d+)x(\d+)", "--shapes") for text in options.shapes.split(",")}
    device = needed_gpu()
    document: dict[str, Any] = {"command": command_line(), "environment": environment(device), "entries": []}
    rows = []
    for name, two in bits.items():
        for text, three in shapes.items():
            sizes = (two[0], two[1]), (three[0], three[1], three[2])
            runs = [measure(*sizes, device) for _ in range(options.runs)]  # operands lie elsewhere in memory each time
            found = {each: median(run[each] for run in runs) for each in runs[0]}
            document["entries"].append({"bits": name, "shape": list(three), "microseconds": found, "runs": runs})
            write_document(options.json, document)
            columns = (*VARIANTS, *GROUPED)
            rows.append((f"{name} {text}", *(f"{found[each]:.1f}" if each in found else "" for each in columns)))
    print(markdown_table(("product", *VARIANTS, *GROUPED), rows, left=1))


if __name__ == "__main__":
    run_script(main)
