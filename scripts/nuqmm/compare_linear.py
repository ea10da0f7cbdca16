"""One Linear at 1 to 4096 rows of activations: quantkit beside its peers, same GPU, same run, same timing rules.

python scripts/nuqmm/compare_linear.py [--shapes 12288x12288,...] [--rows 1,2,...] [--methods nuqmm-q4-g128,...]
    [--layouts latency,batch] [--peers fp8,tinygemm,humming-4,marlin] [--json FILE] [--update docs/bcq.md]

fp16 is F.linear, fp8 torch._scaled_mm (e4m3 both sides), tinygemm torch._weight_int4pack_mm (bf16, 4 bits, g = 128),
humming-N the PyPI package humming-kernels at N bits, g = 128 or as a suffix says, as in humming-4-g64 or
humming-4-grow (compiled there by nvcc), marlin the extension of its authors' package (IST-DASLab/marlin, 4 bits,
g = 128). Every result of ours is checked against fp64 before it is timed. --layouts: the orders of our weights in
memory; "batch" lines are called so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch

from quantkit.bench.kernels import LinearBench, run_linear
from quantkit.bench.report import environment, to_json
from quantkit.bench.shapes import LinearShape, parse_shapes
from quantkit.bench.timing import measure, rotation_length
from quantkit.cli.common import check_json_path
from quantkit.errors import BenchError
from quantkit.nn.table import Layout
from scripts.common import (
    chosen,
    command_line,
    markdown_table,
    needed_gpu,
    replace_section,
    run_script,
    write_document,
)

CUDA = torch.device("cuda")
GROUP = 128
INNER_K_TILES = 8
FP8_ROWS = 16  # at least, of torch._scaled_mm
HUMMING_GROUPS = {"": GROUP, "-g32": 32, "-g64": 64, "-g256": 256, "-grow": 0}  # by the suffix of the peer's name
MARLIN_BLOCKS = 16  # of 64 rows at a time, at most: its own default
MARK = "linear"
FP16 = "fp16"
Call = Callable[[], Any]
Product = Callable[[int], Call]  # of so many rows


def fp8(shape: LinearShape) -> Product:
    """A weight of e4m3 values."""
    weight = torch.randn(shape.out_features, shape.in_features, device=CUDA).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=CUDA)

    def of(rows: int) -> Call:
        x = torch.randn(max(rows, FP8_ROWS), shape.in_features, device=CUDA).to(torch.float8_e4m3fn)
        return lambda: torch._scaled_mm(x, weight, scale_a=one, scale_b=one, out_dtype=torch.float16)

    return of


def tinygemm(shape: LinearShape) -> Product:
    """A weight of 4-bit codes."""
    codes = torch.randint(0, 255, (shape.out_features, shape.in_features // 2), dtype=torch.uint8, device=CUDA)
    packed = torch._convert_weight_to_int4pack(codes, INNER_K_TILES)
    scales = torch.rand(shape.in_features // GROUP, shape.out_features, 2, device=CUDA, dtype=torch.bfloat16)

    def of(rows: int) -> Call:
        x = torch.randn(rows, shape.in_features, device=CUDA, dtype=torch.bfloat16)
        return lambda: torch._weight_int4pack_mm(x, packed, GROUP, scales)

    return of


def humming(shape: LinearShape, bits: int, group: int) -> Product:
    """A layer of the package, with its own kernels and choices; group: 0 for the row."""
    from humming.layer import HummingLayer

    config = {"dtype": f"uint{bits}", "group_size": group}
    layer = HummingLayer(
        shape_n=shape.out_features, shape_k=shape.in_features, weight_config=config, torch_dtype=torch.float16
    ).cuda()
    layer.load_from_unquantized(torch.randn(shape.out_features, shape.in_features, device=CUDA).half())
    layer.transform()

    def of(rows: int) -> Call:
        x = torch.randn(rows, shape.in_features, device=CUDA).half()
        return lambda: layer(x)

    return of


def marlin(shape: LinearShape) -> Product:
    """A weight of 4-bit codes in the authors' own kernel."""
    import marlin_cuda

    packed = torch.randint(
        -(2**31), 2**31, (shape.in_features // 16, shape.out_features * 2), dtype=torch.int32, device=CUDA
    )
    scales = torch.rand(shape.in_features // GROUP, shape.out_features, dtype=torch.float16, device=CUDA)
    workspace = torch.zeros(shape.out_features // 128 * MARLIN_BLOCKS, dtype=torch.int32, device=CUDA)

    def of(rows: int) -> Call:
        x = torch.randn(rows, shape.in_features, device=CUDA).half()
        y = torch.empty(rows, shape.out_features, dtype=torch.float16, device=CUDA)
        return lambda: marlin_cuda.mul(x, packed, y, scales, workspace, -1, -1, -1, MARLIN_BLOCKS)

    return of


PEERS: dict[str, tuple[Callable[[LinearShape], Product], float]] = {  # how to make one, and its bytes a weight
    "fp8": (fp8, 1.0),
    "tinygemm": (tinygemm, 0.5),
    "marlin": (marlin, 0.5),
    **{
        f"humming-{bits}{suffix}": (partial(humming, bits=bits, group=group), bits / 8)
        for bits in range(1, 9)
        for suffix, group in HUMMING_GROUPS.items()
    },
}
PACKAGES = {  # the module of a peer that is no part of torch, and where it comes from
    "humming": ("humming", "pip install humming-kernels"),
    "marlin": ("marlin_cuda", "install IST-DASLab/marlin from its sources"),
}


def peer_versions(peers: Sequence[str]) -> dict[str, str]:
    """The versions of the peers that are packages. Raises BenchError where one is not installed."""
    for name in peers:
        module, install = PACKAGES.get(name.partition("-")[0], ("torch", ""))
        if find_spec(module) is None:
            raise BenchError(f"peer {name}: there is no module {module}; {install}, or leave it out")
    return {"humming-kernels": version("humming-kernels")} if any(name.startswith("humming") for name in peers) else {}


def peer_rows(name: str, shape: LinearShape, rows: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The peer's times at every number of rows."""
    make, bytes_per_weight = PEERS[name]
    count = rotation_length(int(shape.out_features * shape.in_features * bytes_per_weight), CUDA)
    products = [make(shape) for _ in range(count)]
    for number in rows:
        calls = [product(number) for product in products]
        yield {"shape": shape.name, "rows": number, "what": name, "us": measure(calls, CUDA).median * 1e6}


def own_rows(
    shape: LinearShape, methods: Sequence[str], rows: Sequence[int], layouts: Sequence[Layout]
) -> Iterator[dict[str, Any]]:
    """fp16, once, and the methods in every layout at every number of rows."""
    for layout in layouts:
        seen = set() if layout == layouts[0] else set(rows)
        for result in run_linear(LinearBench([shape], methods, rows, CUDA, layout=layout)):
            place = {"shape": shape.name, "rows": result.tokens}
            if result.tokens not in seen:
                seen.add(result.tokens)
                yield {**place, "what": FP16, "us": result.baseline_us}
            facts = {"kernel": result.implementation, "peak_percent": result.peak_percent, "error": result.error}
            what = result.method if layout == "latency" else f"{result.method} {layout}"
            yield {**place, "what": what, "us": result.median_us, **facts}


def markdown(entries: Sequence[dict[str, Any]]) -> str:
    """A table per shape: a line per product, a column per number of rows, microseconds."""
    tables = []
    for shape in dict.fromkeys(entry["shape"] for entry in entries):
        own = [entry for entry in entries if entry["shape"] == shape]
        rows = sorted({entry["rows"] for entry in own})
        lines = []
        for what in dict.fromkeys(entry["what"] for entry in own):
            times = {entry["rows"]: f"{entry['us']:.1f}" for entry in own if entry["what"] == what}
            lines.append([what, *(times.get(number, "-") for number in rows)])
        tables.append(markdown_table([shape.replace("x", " x "), *map(str, rows)], lines, left=1))
    return "\n\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="12288x12288,4096x4096,28672x4096,4096x14336,8192x8192")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256,1024,4096")
    parser.add_argument("--methods", default="nuqmm-q4-g128,nuqmm-q3-g128,nuqmm-q2-g128,bcq-w4-g128")
    parser.add_argument("--peers", default="fp8,tinygemm")
    parser.add_argument("--layouts", default="latency,batch")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--update", type=Path, help="a Markdown file whose section of these tables is replaced")
    options = parser.parse_args()
    check_json_path(options.json)
    peers = chosen("--peers", options.peers, PEERS) if options.peers else []
    needed_gpu()
    layouts: list[Any] = chosen("--layouts", options.layouts, get_args(Layout))
    rows = [int(number) for number in options.rows.split(",")]
    place = environment(CUDA) | peer_versions(peers)
    entries: list[dict[str, Any]] = []
    for shape in parse_shapes(options.shapes):
        entries += own_rows(shape, options.methods.split(","), rows, layouts)
        for name in peers:
            entries += peer_rows(name, shape, rows)
            torch.cuda.empty_cache()
        print(markdown([entry for entry in entries if entry["shape"] == shape.name]), flush=True)
        write_document(options.json, to_json(place, command=command_line(), entries=entries))
    replace_section(options.update, MARK, markdown(entries))


if __name__ == "__main__":
    run_script(main)
