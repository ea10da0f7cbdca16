"""The section "Speed" of docs/flattenquant.md: FlattenQuant Tables 5 and 6 and Fig 4 on this machine's GPU.

    python scripts/flattenquant/speed.py --json docs/results/flattenquant-speed-h200.json      # measure, 4 minutes
    python scripts/flattenquant/speed.py --render docs/results/flattenquant-speed-h200.json \
        --markdown docs/flattenquant.md                                                        # write a run's tables

Models are shapes with random weights, INT4 layers and extended channels in the paper's shares. Kernels read inputs that
rotate through more memory than the L2 cache holds. fp16, torch._int_mm and fp8 run on the same shapes in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.bench.attention import HeadShape, check_int8_attention, code_steps, random_heads
from quantkit.bench.flatten_layers import LINEAR_METHODS, METHODS, exact_sums, flatten_spec
from quantkit.bench.prefill import PrefillBench, check_linears, prefill_model, run_prefill
from quantkit.bench.report import environment
from quantkit.bench.shapes import model_linears, model_shape
from quantkit.bench.timing import Timing, device_peaks, measure, peak_bandwidth, rotation_length
from quantkit.cli.common import check_json_path
from quantkit.errors import BenchError
from quantkit.formats.flatten import pack_nibbles
from quantkit.formats.table import stored_bytes
from quantkit.models.families import decoder_blocks
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.ops.attention.op import int8_attention
from quantkit.ops.flatten.layout import tile_codes, untile_codes
from quantkit.ops.flatten.op import flatten_quantize, flatten_quantize_tiles, int8_gemm_tiles, multiplier
from scripts.common import chosen, command_line, needed_gpu, replace_section, run_script, write_document
from scripts.flattenquant.speed_markdown import markdown

TOKENS, EXTENDED = 8 * 2048, 1024
EXTENDED_GEMM = (TOKENS, 4096, 4096 + EXTENDED)
GEMMS = ((TOKENS, 5120, 5120), (8192, 8192, 8192), (TOKENS, 4096, 4096), EXTENDED_GEMM)
FIG4 = (("opt-13b", (1, 8, 32), (256, 512, 1024, 2048)), ("opt-30b", (1, 8), (256, 512, 1024, 2048)))
LENGTHS_TABLE6 = (512, 1024, 2048)
LINEAR_MODELS = ("opt-13b", "opt-30b")
HEADS = (HeadShape(40, 40, 128), HeadShape(32, 8, 128))  # of OPT-13B and of Llama-3-8B
SEQUENCES = ((8, 2048), (1, 2048))
_PRODUCTS = 3  # of codes: Q K^T twice, P V
SAMPLE_BLOCKS = 4  # of OPT-66B, whose activations are measured and whose weights are counted
_CHECKED_ROWS = 8
_DEVIATION = 40.0  # of codes; uniform ones over the whole range draw more power
_REPEATS = 50


def _time(calls: Sequence[Callable[[], Any]], device: torch.device) -> Timing:
    return measure(calls, device, min_repeats=_REPEATS)


def _normal_codes(rows: int, columns: int, top: int, device: torch.device) -> Tensor:
    drawn = torch.randn(rows, columns, device=device, dtype=torch.float16) * (_DEVIATION * top / 127)
    return drawn.round_().clamp_(-top, top).to(torch.int8)


def _uniform_codes(rows: int, columns: int, top: int, device: torch.device) -> Tensor:
    return torch.randint(-top, top + 1, (rows, columns), dtype=torch.int8, device=device)


def _copies(tensor: Tensor, count: int) -> list[Tensor]:
    return [tensor.clone() for _ in range(count)]


def _gemm(shape: tuple[int, int, int], device: torch.device, *, bits: int = 8, uniform: bool = False) -> dict[str, Any]:
    """int8_gemm with bias; the sums of some rows are compared with exact ones first."""
    rows, channels, columns = shape
    top, make = 2 ** (bits - 1) - 1, _uniform_codes if uniform else _normal_codes
    acts, codes = make(rows, columns, top, device), make(channels, columns, top, device)
    stored = pack_nibbles(codes) if bits == 4 else codes
    scale, bias = torch.tensor([0.001], device=device), torch.randn(channels, device=device).half()
    act_tiles, tiles = tile_codes(acts), tile_codes(stored, weight=True)
    chosen = torch.linspace(0, rows - 1, _CHECKED_ROWS, device=device).round().long()
    expected = (exact_sums(acts[chosen], stored).float() * (scale * scale) + bias.float()).half()
    y = int8_gemm_tiles(act_tiles, tiles, scale, scale, bias, rows, channels, torch.float16)
    if not torch.equal(y[chosen], expected):
        raise BenchError(f"int8_gemm at {shape}: differs from exact integer arithmetic; not timed")
    count = rotation_length(act_tiles.numel() + tiles.numel() + 2 * y.numel(), device)
    pairs = zip(_copies(act_tiles, count), _copies(tiles, count), strict=True)
    calls = [partial(int8_gemm_tiles, a, w, scale, scale, bias, rows, channels, torch.float16) for a, w in pairs]
    data = "uniform" if uniform else "normal"
    return _entry(f"int{bits}_gemm", shape, _time(calls, device), device, data)


def _baseline(name: str, shape: tuple[int, int, int], device: torch.device) -> dict[str, Any]:
    rows, channels, columns = shape
    one = torch.ones((), device=device)
    kinds: dict[str, tuple[torch.dtype, Callable[[Tensor, Tensor], Tensor]]] = {
        "fp16": (torch.float16, torch.nn.functional.linear),
        "torch._int_mm": (torch.int8, lambda x, w: torch._int_mm(x, w.t())),
        "fp8": (
            torch.float8_e4m3fn,
            lambda x, w: torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.float16),
        ),
    }
    dtype, product = kinds[name]
    if dtype == torch.int8:
        x, w = _normal_codes(rows, columns, 127, device), _normal_codes(channels, columns, 127, device)
    else:
        x, w = (torch.randn(n, columns, device=device).to(dtype) for n in (rows, channels))
    count = rotation_length(x.itemsize * (x.numel() + w.numel()), device)
    calls = [partial(product, *pair) for pair in zip(_copies(x, count), _copies(w, count), strict=True)]
    return _entry(name, shape, _time(calls, device), device, "normal")


def _entry(what: str, shape: tuple[int, int, int], timing: Timing, device: torch.device, data: str) -> dict[str, Any]:
    rows, channels, columns = shape
    rate = 2 * rows * channels * columns / timing.median
    entry = {"what": what, "M": rows, "N": channels, "K": columns, "data": data, "us": round(timing.median * 1e6, 1)}
    entry |= {"p90_us": round(timing.p90 * 1e6, 1), "tera_ops": round(rate / 1e12)}
    peaks = device_peaks(device)
    peak = None if peaks is None else peaks.wgmma_s8
    if peak is not None and what.startswith("int"):
        entry["peak_percent"] = round(100 * rate / peak, 1)
        if rate > peak:
            raise BenchError(f"{what} at {shape}: above this GPU's rate; not a valid measurement")
    return entry


def _flatten(rows: int, channels: int, extended: int, device: torch.device) -> dict[str, Any]:
    """flatten_quantize into tiles; the codes of some rows are compared with the reference's first."""
    extra = torch.randperm(channels, device=device)[:extended].sort().values
    source = torch.cat((torch.arange(channels, device=device), extra)).int()
    segment = torch.cat((torch.zeros(channels), torch.ones(extended))).int().to(device)
    scale = torch.tensor([4 / 127], device=device)
    x, factors = torch.randn(rows, channels, device=device, dtype=torch.float16), multiplier(scale, None)
    got = untile_codes(flatten_quantize_tiles(x, source, segment, factors, 8, False), rows, channels + extended)
    sample = x[:: rows // _CHECKED_ROWS].cpu()
    expected = flatten_quantize(sample, source.cpu(), segment.cpu(), scale.cpu(), None, 8)
    if not torch.equal(got[:: rows // _CHECKED_ROWS].cpu(), expected):
        raise BenchError("flatten_quantize: differs from the reference; not timed")
    moved = rows * (2 * channels + channels + extended)
    copies = _copies(x, rotation_length(moved, device))
    timing = _time([partial(flatten_quantize_tiles, x, source, segment, factors, 8, False) for x in copies], device)
    peak = peak_bandwidth(device)
    entry = {"what": "flatten_quantize", "M": rows, "K": channels, "extended": extended}
    entry |= {"us": round(timing.median * 1e6, 1), "p90_us": round(timing.p90 * 1e6, 1)}
    entry["gigabytes_per_second"] = round(moved / timing.median / 1e9)
    return entry if peak is None else {**entry, "peak_percent": round(100 * moved / timing.median / peak, 1)}


def kernels(device: torch.device) -> Iterator[dict[str, Any]]:
    """Table 5 and the products beside their baselines."""
    yield _flatten(TOKENS, 4096, EXTENDED, device)
    yield _flatten(TOKENS, 5120, 1120, device)
    yield _flatten(TOKENS, 20480, 4416, device)
    for shape in GEMMS:
        if shape != EXTENDED_GEMM:
            yield from (_baseline(name, shape, device) for name in ("fp16", "torch._int_mm", "fp8"))
        yield _gemm(shape, device)
        if shape in GEMMS[:2]:
            yield _gemm(shape, device, uniform=True)
        else:
            yield _gemm(shape, device, bits=4)


@torch.no_grad()
def linears(device: torch.device) -> Iterator[dict[str, Any]]:
    """All Linears of a block at 8 x 2048 tokens, activations quantized by each; two blocks are timed."""
    for name in LINEAR_MODELS:
        for method in LINEAR_METHODS:
            model = prefill_model(name, replace(model_shape(name), layers=2), method, device)
            check_linears(model, method)
            wanted = (nn.Linear, QuantizedLinear)
            modules = [m for _, block in decoder_blocks(model) for m in block.modules() if isinstance(m, wanted)]
            inputs = {
                width: torch.randn(TOKENS, width, device=device, dtype=torch.float16)
                for width in {module.in_features for module in modules}
            }
            timing = _time([partial(module, inputs[module.in_features]) for module in modules], device)
            milliseconds = timing.median * 1e3 * len(modules) / 2
            yield {"model": name, "method": method, "tokens": TOKENS, "block_ms": round(milliseconds, 3)}


def attention(device: torch.device) -> Iterator[dict[str, Any]]:
    """Causal attention, quantizing included, beside torch's in fp16."""
    like = torch.empty(0, dtype=torch.float16, device=device)
    for shape in HEADS:
        check_int8_attention(f"{shape.heads}/{shape.kv_heads} heads", shape, like)
        for batch, length in SEQUENCES:
            moved = 2 * batch * length * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
            count = rotation_length(moved, device)
            sets = [random_heads(shape, batch, length, like) for _ in range(count)]
            steps, scaling = code_steps(*sets[0]), shape.head_dim**-0.5
            shared = shape.heads != shape.kv_heads
            kinds: dict[str, Callable[..., Tensor]] = {
                "fp16": partial(nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=shared),
                "int8": lambda q, k, v: int8_attention(q, k, v, None, steps, scaling, True),  # noqa: B023
            }
            pairs = batch * shape.heads * length * (length + 1) // 2  # of a row and a key that it sees
            for what, call in kinds.items():
                timing = _time([partial(call, *operands) for operands in sets], device)
                rate = 4 * pairs * shape.head_dim / timing.median
                entry = {"what": what, **asdict(shape), "batch": batch, "length": length}
                entry |= {"us": round(timing.median * 1e6, 1), "p90_us": round(timing.p90 * 1e6, 1)}
                entry["tera_ops"] = round(rate / 1e12)
                peaks = device_peaks(device)
                peak = None if peaks is None else peaks.mma_s8
                if what == "int8" and peak is not None:
                    entry["peak_percent"] = round(100 * rate * _PRODUCTS / 2 / peak, 1)
                    if entry["peak_percent"] > 100:
                        raise BenchError(f"INT8 attention at {entry}: above this GPU's rate; not a valid measurement")
                yield entry


def weight_bytes(name: str, method: str, blocks: int) -> int:
    """Bytes of the Linears of the first blocks of an OPT shape."""
    attention, *ffn = model_linears(model_shape(name))
    layers = [attention, attention, attention, attention, *ffn] * blocks
    if method == "fp16":
        return sum(2 * s.out_features * s.in_features for s in layers)
    return sum(
        stored_bytes(flatten_spec(name, method, index, s.in_features), (s.out_features, s.in_features))
        for index, s in enumerate(layers)
    )


def memory(device: torch.device) -> Iterator[dict[str, Any]]:
    """Table 6: OPT-30B whole; OPT-66B from some blocks, the weights of the others counted."""
    total = torch.cuda.get_device_properties(device).total_memory
    for name, layers in (("opt-30b", None), ("opt-66b", SAMPLE_BLOCKS)):
        methods = [method for method in LINEAR_METHODS if method != "flatten-o1"]
        sample = name if layers is None else f"{name}, {layers} blocks"
        for method in methods:
            bench = PrefillBench(name, (method,), (1, 8, 32), LENGTHS_TABLE6, device, timed=False, layers=layers)
            for result in run_prefill(bench):
                peak = result.peak_memory_bytes
                if peak is not None and layers is not None:
                    peak += weight_bytes(name, method, model_shape(name).layers) - weight_bytes(name, method, layers)
                entry = {"model": name, "measured": sample, "method": method, "batch": result.batch}
                yield {**entry, "length": result.length, "peak_bytes": peak, "device_bytes": total}


def run(device: torch.device, only: str) -> dict[str, Any]:
    """The document of the chosen parts."""
    torch.manual_seed(0)
    document: dict[str, Any] = {"command": command_line(), "environment": environment(device)}
    makers: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "kernels": lambda: kernels(device),
        "linears": lambda: linears(device),
        "attention": lambda: attention(device),
        "prefill": lambda: (
            asdict(result)
            for name, batches, lengths in FIG4
            for result in run_prefill(PrefillBench(name, METHODS, batches, lengths, device))
        ),
        "memory": lambda: memory(device),
    }
    for part in chosen("--only", only, makers):
        document[part] = []
        for row in makers[part]():
            print(part, *(value for value in row.values() if value is not None), file=sys.stderr, flush=True)
            document[part].append(row)
            torch.cuda.empty_cache()
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="measure and write this document")
    parser.add_argument("--only", default="kernels,linears,attention,prefill,memory", help="parts to measure")
    parser.add_argument("--render", type=Path, help="a document measured before")
    parser.add_argument("--markdown", type=Path, help="replace the tables between the marks of this file")
    options = parser.parse_args()
    check_json_path(options.json)
    if options.render is None:
        document = run(needed_gpu(), options.only)
        write_document(options.json, document)
    else:
        document = json.loads(options.render.read_text(encoding="utf-8"))
    tables = markdown(document)
    replace_section(options.markdown, "speed", tables)
    print(tables)


if __name__ == "__main__":
    run_script(main)
