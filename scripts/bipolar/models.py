"""Bipolar-INT Fig 7: decoding and context speed of 7B-shaped models against fp16 and bitsandbytes NF4, in one run.

    python scripts/bipolar/models.py --json docs/results/bipolar-models-h200.json      # one GPU, about 2 minutes
    python scripts/bipolar/models.py --render docs/results/bipolar-models-h200.json    # print a finished run

The models have random weights; only their shapes are those of Llama-2-7B, OPT-6.7B and BLOOM-7B. Decoding: one token
after a prompt, static KV cache, one CUDA graph per token. Context: a forward of the whole prompt, one CUDA graph.
NF4 is measured where bitsandbytes is installed, and the run says so where it is not.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantkit.bench.decode import shaped_model, weight_bytes
from quantkit.bench.kernels import TOLERANCE, relative_error
from quantkit.bench.methods import method_spec
from quantkit.bench.report import environment
from quantkit.bench.shapes import MODELS
from quantkit.bench.timing import check_peak, check_result, peak_bandwidth
from quantkit.cli.common import check_json_path
from quantkit.cuda.graph import capture
from quantkit.models.families import block_linears, decoder_blocks
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.runtime.causal_mask import plain_causal
from quantkit.runtime.generation import captured_step, start
from scripts.common import markdown_table, needed_gpu, run_script, write_document

SHAPES = ("llama-2-7b", "opt-6.7b", "bloom-7b")
FP16, NF4 = "fp16", "bitsandbytes nf4"
METHODS = ("bipolar-w1a1", "bipolar-w2a2", "bipolar-w4a4", "bipolar-w4a8")
PROMPT, NEW, CONTEXT = 128, 64, 1024
_REPLAYS = 10
_CHECKED_TOKENS = 8


def build(shape_name: str, method: str, device: torch.device) -> Any:
    """A model of the shape in fp16, in one of METHODS, or with bitsandbytes' Linears."""
    shape = MODELS[shape_name]
    if method in METHODS:
        model = shaped_model(shape, device, method_spec(method))
        check_linears(f"{shape_name} {method}", model, device)
        return model
    model = shaped_model(shape, device)
    if method == NF4:
        use_nf4(model)
    return model


@torch.no_grad()
def check_linears(what: str, model: Any, device: torch.device) -> None:
    """Compare the first block's packed Linears with their references, at the context's length and at one token.

    Raises BenchError where one is wrong.
    """
    _, block = decoder_blocks(model)[0]
    for name, module in block.named_modules():
        if isinstance(module, QuantizedLinear):
            for tokens in (1, CONTEXT):
                x = torch.randn(tokens, module.in_features, device=device, dtype=torch.float16)
                y = module(x) if module.bias is None else module(x) - module.bias
                error = relative_error(module, x[:_CHECKED_TOKENS], y[:_CHECKED_TOKENS])
                check_result(f"{what}, {name}", error, TOLERANCE[torch.float16])


def use_nf4(model: Any) -> None:
    """Replace the Linears of the decoder blocks by bitsandbytes' 4-bit ones holding the same weights."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name, module in block_linears(model).items():
        assert isinstance(module, nn.Linear)
        made = Linear4bit(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            compute_dtype=torch.float16,
            quant_type="nf4",
            device="meta",
        )
        made.weight = Params4bit(module.weight.data, requires_grad=False, quant_type="nf4", module=made)
        made.bias = module.bias
        model.set_submodule(name, made.to(module.weight.device))


def decode_seconds(model: Any, device: torch.device) -> float:
    """Median time of a token after PROMPT tokens."""
    ids = torch.randint(10, model.config.vocab_size, (1, PROMPT), device=device)
    advance = captured_step(start(model, ids, PROMPT + NEW + 1))
    spans = []
    for _ in range(NEW):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        advance()
        torch.cuda.synchronize(device)
        spans.append(time.perf_counter() - began)
    return float(np.median(spans))


def context_seconds(model: Any, device: torch.device) -> float:
    """Median time of a forward of CONTEXT tokens."""
    ids = torch.randint(10, model.config.vocab_size, (1, CONTEXT), device=device)

    everything = torch.ones_like(ids)

    def forward() -> Tensor:
        with torch.no_grad(), plain_causal(model):
            logits: Tensor = model(input_ids=ids, attention_mask=everything, use_cache=False, logits_to_keep=1).logits
            return logits

    graph = capture([forward], device)
    spans = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(begin.elapsed_time(end) / 1e3)
    return float(np.median(spans))


def measure_model(shape_name: str, method: str, device: torch.device) -> dict[str, Any]:
    """Both speeds of one model. Raises BenchError for a wrong product or more than the memory's bandwidth."""
    model = build(shape_name, method, device)
    moved = weight_bytes(model)
    decode, context = decode_seconds(model, device), context_seconds(model, device)
    peak = peak_bandwidth(device)
    check_peak(f"{shape_name}, {method}", moved / decode, peak)
    return {
        "model": shape_name,
        "method": method,
        "decode_ms": round(decode * 1e3, 3),
        "context_ms": round(context * 1e3, 3),
        "weight_bytes": moved,
        "decode_percent_of_bandwidth": None if peak is None else round(100 * moved / decode / peak, 1),
    }


def run(shapes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every method on every shape, fp16 first. Raises BenchError without a GPU."""
    device = needed_gpu()
    methods = [FP16, *METHODS, *([NF4] if importlib.util.find_spec("bitsandbytes") else [])]
    for shape_name in shapes:
        for method in methods:
            row = measure_model(shape_name, method, device)
            print(json.dumps(row), file=sys.stderr)
            yield row
            gc.collect()
            torch.cuda.empty_cache()


def render(results: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: milliseconds per token and per context, in brackets times fp16."""
    base = {row["model"]: row for row in results if row["method"] == FP16}
    names = list(base)
    columns = ["ms (x fp16)", *(title for name in names for title in (f"{name}, decode", f"context of {CONTEXT}"))]
    lines = []
    found = {(row["model"], row["method"]): row for row in results}
    for method in dict.fromkeys(row["method"] for row in results):
        cells = [
            f"{found[name, method][key]:.2f} ({base[name][key] / found[name, method][key]:.2f})"
            for name in names
            for key in ("decode_ms", "context_ms")
        ]
        lines.append([method, *cells])
    unmeasured = "" if any(row["method"] == NF4 for row in results) else "\n\nNF4 is not measured: no bitsandbytes."
    return markdown_table(columns, lines) + unmeasured


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="measure, and write the numbers here")
    parser.add_argument("--render", type=Path, help="print the table of a finished run")
    parser.add_argument("--models", default=",".join(SHAPES), help="which shapes, separated by commas")
    options = parser.parse_args()
    check_json_path(options.json)
    if options.render:
        results = json.loads(options.render.read_text())["results"]
    else:
        results = list(run(options.models.split(",")))
        write_document(options.json, {"environment": environment(torch.device("cuda")), "results": results})
    print(render(results))


if __name__ == "__main__":
    run_script(main)
