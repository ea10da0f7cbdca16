"""Measure which bcq kernel is fastest for common shapes on this GPU, for the table that comes with quantkit.

python scripts/nuqmm/measure_kernels.py [--bits 2,3,4] [--groups 128] [--layouts latency,batch]
    [--table kernels/bcq/measured.json]

Shapes are the powers of two that stand for a shape class (quantkit/ops/bcq/autotune.py). Classes that the table has for
this GPU are measured again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import torch

from quantkit.nn.table import Layout
from quantkit.ops.bcq.autotune import measured_kernels, shape_class
from scripts.common import chosen, needed_gpu, run_script, write_document
from scripts.nuqmm.tune_bcq import random_tiles

OUT_FEATURES, IN_FEATURES = (10, 11, 12, 13, 14, 15), (11, 12, 13, 14, 15)  # powers of two
MOST_WEIGHTS = 28  # of two: what the largest models have


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", default="2,3,4")
    parser.add_argument("--groups", default="128")
    parser.add_argument("--layouts", default="latency,batch", help="orders of the weight in memory")
    parser.add_argument("--table", type=Path, default=Path("kernels/bcq/measured.json"))
    options = parser.parse_args()
    layouts = chosen("--layouts", options.layouts, get_args(Layout))
    device = needed_gpu()
    table = json.loads(options.table.read_text(encoding="utf-8"))
    classes = table.setdefault(torch.cuda.get_device_name(device), {})
    numbers = options.bits.split(","), options.groups.split(",")
    for layout, bits, group_size, n, k in product(layouts, *numbers, OUT_FEATURES, IN_FEATURES):
        if n + k > MOST_WEIGHTS:
            continue
        codes = layout == "batch"
        weight = replace(random_tiles(int(bits), (1 << n, 1 << k), int(group_size), offset=True), codes=codes)
        name = shape_class(weight.weight_bits, 1 << n, 1 << k, weight.group_size, codes=codes)
        classes[name] = measured_kernels(weight)
        print(
            name, *(f"{tokens}:{kernel.removeprefix('bcq_')}" for tokens, kernel in classes[name].items()), flush=True
        )
        write_document(options.table, table)


if __name__ == "__main__":
    run_script(main)
