"""Measure which bcq kernel is fastest for common shapes on this GPU, for the table that comes with quantkit.

python scripts/nuqmm/measure_kernels.py [--bits 2,3,4] [--groups 128] [--orders planes,codes,grid]
    [--tokens 1024,2048,4096] [--table kernels/bcq/measured.json]

Shapes are the powers of two that stand for a shape class (quantkit/ops/bcq/autotune.py). Classes that the table has for
this GPU are measured again; with --tokens at these numbers of tokens alone, and keep their other kernels.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

from quantkit.ops.bcq.autotune import TOKEN_CLASSES, measured_kernels, shape_class
from quantkit.ops.bcq.order import GRID_PLANES, Order
from scripts.common import chosen, needed_gpu, run_script, write_document
from scripts.nuqmm.tune_bcq import random_tiles

OUT_FEATURES, IN_FEATURES = (10, 11, 12, 13, 14, 15), (11, 12, 13, 14, 15)  # powers of two
MOST_WEIGHTS = 28  # of two: what the largest models have


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", default="2,3,4")
    parser.add_argument("--groups", default="128")
    parser.add_argument("--orders", default="planes,codes,grid", help="of the weight in memory; grid: of 2 and 4 bits")
    parser.add_argument("--tokens", default=",".join(map(str, TOKEN_CLASSES)))
    parser.add_argument("--table", type=Path, default=Path("kernels/bcq/measured.json"))
    options = parser.parse_args()
    orders = [Order(name) for name in chosen("--orders", options.orders, tuple(Order))]
    tokens = sorted(int(count) for count in chosen("--tokens", options.tokens, tuple(map(str, TOKEN_CLASSES))))
    device = needed_gpu()
    table = json.loads(options.table.read_text(encoding="utf-8"))
    classes = table.setdefault(torch.cuda.get_device_name(device), {})
    numbers = options.bits.split(","), options.groups.split(",")
    for order, bits, group_size, n, k in product(orders, *numbers, OUT_FEATURES, IN_FEATURES):
        if n + k > MOST_WEIGHTS or (order == Order.GRID and int(bits) not in GRID_PLANES):
            continue
        made = random_tiles(int(bits), (1 << n, 1 << k), int(group_size), offset=True)
        scales = made.scale_tiles[..., : order.scales(int(bits)) + 1, :].contiguous()
        weight = replace(made, order=order, scale_tiles=scales)
        name = shape_class(weight.weight_bits, 1 << n, 1 << k, weight.group_size, order=order)
        kernels = {**classes.get(name, {}), **measured_kernels(weight, tokens)}
        classes[name] = dict(sorted(kernels.items(), key=lambda item: int(item[0])))
        print(
            name, *(f"{tokens}:{kernel.removeprefix('bcq_')}" for tokens, kernel in classes[name].items()), flush=True
        )
        write_document(options.table, table)


if __name__ == "__main__":
    run_script(main)
