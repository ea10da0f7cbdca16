"""nuQmm's Figure 4: y = W x of one token, W [m, m], in fp16 on one GPU and cut over several, and in few bits on one.

python scripts/nuqmm/figure4.py --json FILE [--gpus 2] [--sizes 4096,8192,12288,16384]

Of several GPUs each multiplies its columns of W in a process of its own, and NCCL adds the vectors. Times follow
``quantkit bench linear``: cold L2, replays of CUDA graphs, the result checked before. A product's time without the
sum is taken from graphs without it; the rest is communication, waiting for the other GPU included.
scripts/nuqmm/several_gpus.py makes the table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quantkit.bench.kernels import LinearBench, run_linear
from quantkit.bench.shapes import LinearShape
from quantkit.bench.timing import CALLS_PER_GRAPH, WARM_UP_REPLAYS, check_result, rotation_length
from quantkit.cli.common import check_json_path
from quantkit.cuda.graph import capture
from quantkit.errors import BenchError
from scripts.common import command_line, needed_gpu, run_script, write_document
from scripts.serve_bench import environment

METHODS = ("nuqmm-q4-grow", "nuqmm-q2-grow")
REPLAYS = 60
TOLERANCE = 2e-3  # of fp16 sums in several orders
WEIGHT_SCALE = 0.02
FP16_BYTES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--sizes", default="4096,8192,12288,16384")
    options = parser.parse_args()
    check_json_path(options.json)
    device, sizes = needed_gpu(), [int(size) for size in options.sizes.split(",")]
    if not 1 < options.gpus <= torch.cuda.device_count():
        raise BenchError(f"--gpus {options.gpus}: give 2 to the {torch.cuda.device_count()} GPUs that are here")
    shapes = [LinearShape(f"{size}x{size}", size, size) for size in sizes]
    single = [asdict(result) for result in run_linear(LinearBench(shapes, METHODS, (1,), device))]
    figure: dict[str, Any] = {"single": single, "cut": []}
    document = {"command": command_line(), "environment": environment(), "figure4": figure}
    write_document(options.json, document)
    with TemporaryDirectory() as folder:
        found = Path(folder) / "cut.json"
        given = (options.gpus, sizes, f"file://{folder}/rendezvous", str(found))
        torch.multiprocessing.spawn(_rank, given, options.gpus)
        figure["cut"] = json.loads(found.read_text())
    write_document(options.json, document)
    print(json.dumps(document["figure4"]))


def _rank(rank: int, gpus: int, sizes: Sequence[int], rendezvous: str, path: str) -> None:
    """One process: its share of every size; the first writes what all found."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=gpus, device_id=device)
    cut = [_cut(size, gpus, device) for size in sizes]
    if rank == 0:
        Path(path).write_text(json.dumps(cut))
    dist.barrier()
    dist.destroy_process_group()


def _cut(size: int, gpus: int, device: torch.device) -> dict[str, Any]:
    """Microseconds of a call, and of its product alone, on the slowest GPU."""
    columns = size // gpus
    count = rotation_length(FP16_BYTES * size * columns, device)
    weights = [WEIGHT_SCALE * torch.randn(size, columns, dtype=torch.float16, device=device) for _ in range(count)]
    x = torch.randn(1, columns, dtype=torch.float16, device=device)

    def summed(weight: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x, weight)
        dist.all_reduce(y)
        return y

    reference = torch.nn.functional.linear(x.float(), weights[0].float())
    dist.all_reduce(reference)
    error = float((summed(weights[0]).float() - reference).norm() / reference.norm())
    check_result(f"fp16 [{size}, {size}] over {gpus} GPUs", error, TOLERANCE)
    whole = _microseconds(summed, weights, device)
    product = _microseconds(lambda weight: torch.nn.functional.linear(x, weight), weights, device)
    return {"m": size, "gpus": gpus, "us": whole, "product_us": product, "error": error}


def _microseconds(call: Callable[[Tensor], Tensor], weights: Sequence[Tensor], device: torch.device) -> float:
    """Of one call, the median over replays on the slowest GPU; all of them replay equally often."""
    calls = [lambda weight=weight: call(weight) for weight in weights] * -(-CALLS_PER_GRAPH // len(weights))
    graph = capture(calls, device)
    spans = []
    for replay in range(WARM_UP_REPLAYS + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= WARM_UP_REPLAYS:
            spans.append(1e3 * start.elapsed_time(end) / len(calls))
    slowest = torch.tensor(median(spans), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


if __name__ == "__main__":
    run_script(main)
