"""The tables of docs/bipolar.md: Bipolar-INT Tables 1 and 2 and the throughput of Figs 5-6 on this machine's GPU.

    python scripts/bipolar/tables.py --json docs/results/bipolar-h200.json      # measure (one GPU, about 2.5 minutes)
    python scripts/bipolar/tables.py --render docs/results/bipolar-h200.json    # print the tables of a finished run

"product" is the product with its fused epilogue on activations that are quantized already, like the paper's; "op" is
the whole Linear, with the quantizer of the activations. Inputs rotate through more memory than the L2 cache holds,
except below 1024 rows. fp32, fp16, torch._int_mm and fp8 run on the same shapes in the same run, and every op's
result is compared with the reference before it is timed. The two largest squares are timed twice: for up to a second
without pause, as everything else, and in short bursts after pauses, in which the GPU keeps its clocks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.bench.bursts import measure_bursts
from quantkit.bench.report import environment
from quantkit.bench.timing import device_peaks, measure, peak_bandwidth, rotation_length
from quantkit.cli.common import check_json_path
from quantkit.cuda.architectures import Kernel
from quantkit.cuda.device import gpu_of
from quantkit.errors import BenchError
from quantkit.formats.bipolar import ActCoding
from quantkit.ops.bipolar.launch import expand, quantize_tiles, run_product
from quantkit.ops.bipolar.layout import plane_row_sums, tile_weight
from quantkit.ops.bipolar.op import bipolar_prepared_linear
from quantkit.ops.bipolar.plan import BYTE_KERNELS, INT8_KERNELS, kernel_for, path_for
from quantkit.ops.bipolar.product import Activations, Product, Weight
from scripts.common import markdown_table, needed_gpu, run_script, write_document

Shape = tuple[int, int, int]
SQUARES = [(size, size, size) for size in (128, 256, 512, 1024, 2048, 4096, 8192)]
LLAMA_2_7B = [(1024, 4096, 4096), (1024, 10752, 4096), (1024, 4096, 10752)]
LLAMA_ATTENTION = [(1024, 1024, 128), (1024, 128, 1024)]
DECODING = [(tokens, 4096, 4096) for tokens in (1, 2, 4, 8, 16)]
WIDTHS = [(1, 1), (1, 2), (2, 2), (2, 4), (3, 4), (4, 4), (8, 8)]
BURSTS = SQUARES[5:]
_PEAKS = {"binary": "wgmma_b1", "int8": "wgmma_s8", "fp16": "fp16", "fp8": "fp8"}  # unit: field of Peaks
_BASELINE_UNITS = {"fp16": "fp16", "int_mm": "int8", "fp8": "fp8"}
_MOST_SETS = 256
_REPEATS = 30
_FP32_ROWS = 4096  # beyond it would take most of the run
_CHECKED_TOKENS, _BLOCK = 8, 64


@dataclass(frozen=True)
class Unit:
    """What bounds a time: ``name`` and its peak in operations (or bytes) per second, None where not known."""

    name: str
    peak: float | None


def percent_of_peak(what: str, amount: float, seconds: float, unit: Unit) -> float | None:
    """Share of the unit's peak that ``amount`` operations or bytes in ``seconds`` are; None where that is not known.

    Raises BenchError above 100 %: the time cannot be that of the whole work.
    """
    if unit.peak is None:
        return None
    percent = 100 * amount / seconds / unit.peak
    if percent > 100:
        raise BenchError(f"{what}: {percent:.0f} % of this GPU's {unit.name} peak; not a valid measurement")
    return percent


def entry(
    what: str, shape: Shape, seconds: float, path: str = "", percent: float | None = None, sm_mhz: int | None = None
) -> dict[str, Any]:
    """One measured time as it is stored; sm_mhz: the clock meanwhile."""
    rows, channels, columns = shape
    stored: dict[str, Any] = {"what": what, "M": rows, "N": channels, "K": columns, "us": round(seconds * 1e6, 2)}
    if path:
        stored["path"] = path
    if percent is not None:
        stored["percent_of_peak"] = round(percent, 1)
    return stored if sm_mhz is None else {**stored, "sm_mhz": sm_mhz}


@dataclass(frozen=True)
class Case:
    """A product to time: calls on copies of its inputs; work: operations, of which ``unit`` has a peak."""

    what: str
    shape: Shape
    calls: Sequence[Callable[[], Any]]
    work: int
    unit: Unit
    path: str = ""

    def entry(self, seconds: float, sm_mhz: int | None) -> dict[str, Any]:
        """The case with its time; raises BenchError above the peak."""
        percent = percent_of_peak(f"{self.what} at {self.shape}", self.work, seconds, self.unit)
        return entry(self.what, self.shape, seconds, self.path, percent, sm_mhz)


def _sets(bytes_per_call: int, device: torch.device) -> int:
    return min(_MOST_SETS, rotation_length(bytes_per_call, device))


def _copies(tensor: Tensor, count: int) -> Tensor:
    return tensor.expand(count, *tensor.shape).contiguous()


def _timed(case: Case, device: torch.device) -> dict[str, Any]:
    timing = measure(case.calls, device, min_repeats=_REPEATS)
    return case.entry(timing.median, timing.sm_mhz)


def _unit(name: str | None, device: torch.device) -> Unit:
    return Unit(name or "", _peaks(device).get(name or ""))


def _peaks(device: torch.device) -> dict[str, float | None]:
    """Operations per second by unit; those of binary and int8 measured with tensor cores alone."""
    peaks = device_peaks(device)
    return {} if peaks is None else {name: getattr(peaks, field) for name, field in _PEAKS.items()}


def _baselines(shape: Shape, device: torch.device) -> Iterator[Case]:
    rows, channels, columns = shape
    count = _sets(2 * columns * (rows + channels), device)
    one = torch.ones((), device=device)
    products: dict[str, tuple[torch.dtype, Callable[[Tensor, Tensor], Tensor]]] = {
        "fp32": (torch.float32, lambda x, w: torch.nn.functional.linear(x, w)),
        "fp16": (torch.float16, lambda x, w: torch.nn.functional.linear(x, w)),
        "int_mm": (torch.int8, lambda x, w: torch._int_mm(x, w.t())),
        "fp8": (
            torch.float8_e4m3fn,
            lambda x, w: torch._scaled_mm(x, w.t(), scale_a=one, scale_b=one, out_dtype=torch.float16),
        ),
    }
    if shape in DECODING:
        products = {"fp16": products["fp16"]}
    elif rows > _FP32_ROWS:
        del products["fp32"]
    for name, (dtype, product) in products.items():
        deviation = 30 if dtype is torch.int8 else 1
        xs = _copies((deviation * torch.randn(rows, columns, device=device)).to(dtype), count)
        ws = _copies((deviation * torch.randn(channels, columns, device=device)).to(dtype), count)
        calls = [lambda x=x, w=w, f=product: f(x, w) for x, w in zip(xs, ws, strict=True)]
        unit = None if shape in DECODING else _BASELINE_UNITS.get(name)
        yield Case(name, shape, calls, 2 * rows * channels * columns, _unit(unit, device))


@dataclass(frozen=True)
class _Operands:
    """One random Linear: x [M, K] fp16, the prepared weight (tiles, row sums, scales), the clip ratio."""

    x: Tensor
    weight: tuple[Tensor, Tensor, Tensor]
    clip: Tensor


def _operands(shape: Shape, weight_bits: int, device: torch.device) -> _Operands:
    rows, channels, columns = shape
    planes = torch.randint(0, 256, (weight_bits, channels, columns // 8), dtype=torch.uint8, device=device)
    scales = (0.01 * torch.rand(channels, 1, device=device)).half()
    x = torch.randn(rows, columns, device=device, dtype=torch.float16)
    weight = (tile_weight(planes), plane_row_sums(planes, columns), scales)
    return _Operands(x, weight, torch.ones(1, device=device))


def _expected(given: _Operands, act_bits: int) -> Tensor:
    """The reference's result, on the CPU, of the first tokens and the first block of channels."""
    x, clip = given.x[:_CHECKED_TOKENS].cpu(), given.clip.cpu()
    tiles, row_sums, scales = (
        part[:count].cpu() for part, count in zip(given.weight, (1, _BLOCK, _BLOCK), strict=True)
    )
    return bipolar_prepared_linear(x, tiles, row_sums, scales, clip, None, act_bits, True)


def _op(shape: Shape, weight_bits: int, act_bits: int, device: torch.device) -> dict[str, Any]:
    """The whole op: of few tokens per cent of the read bandwidth, of many of the tensor cores' peak."""
    rows, channels, columns = shape
    given = _operands(shape, weight_bits, device)
    name = f"w{weight_bits}a{act_bits}"
    y = bipolar_prepared_linear(given.x, *given.weight, given.clip, None, act_bits, True)
    if not torch.equal(y[:_CHECKED_TOKENS, :_BLOCK].cpu(), _expected(given, act_bits)):
        raise BenchError(f"{name} at {shape}: the result is not the reference's; not timed")
    stored = channels * columns * weight_bits // 8
    count = _sets(stored + 2 * rows * (columns + channels), device)
    xs, *weights = (_copies(tensor, count) for tensor in (given.x, *given.weight))
    calls = [
        lambda i=i: bipolar_prepared_linear(xs[i], *(w[i] for w in weights), given.clip, None, act_bits, True)
        for i in range(count)
    ]
    path, work, unit = _path(shape, weight_bits, act_bits, device)
    row = gpu_of(device).architecture
    if kernel_for(weight_bits, act_bits, (rows, columns), row) is Kernel.BIPOLAR_GEMV:
        path, work, unit = "gemv", stored, Unit("memory", peak_bandwidth(device))
    return _timed(Case(f"{name} op", shape, calls, work, unit, path), device)


def _path(shape: Shape, weight_bits: int, act_bits: int, device: torch.device) -> tuple[str, int, Unit]:
    """Path, operations of the tensor cores, and their peak."""
    rows, channels, columns = shape
    as_bytes = columns > path_for(weight_bits, act_bits, gpu_of(device).architecture).longest
    unit = "int8" if as_bytes else "binary"
    work = 2 * rows * channels * columns * (1 if as_bytes else weight_bits * act_bits)
    return unit, work, _unit(unit, device)


def _product(shape: Shape, weight_bits: int, act_bits: int, device: torch.device) -> Case:
    """The product alone, of activations and weights that are in its kernel's order."""
    rows, channels, columns = shape
    path, work, unit = _path(shape, weight_bits, act_bits, device)
    gpu = gpu_of(device)
    kernel = kernel_for(weight_bits, act_bits, (rows, columns), gpu.architecture)
    given = _operands(shape, weight_bits, device)
    acts = quantize_tiles(given.x, given.clip, ActCoding(act_bits), as_bytes=kernel in BYTE_KERNELS)
    weight = Weight(*given.weight)
    operand = expand(weight, columns) if kernel in INT8_KERNELS else weight
    moved = operand.tiles.numel() + acts.tiles.numel() + 2 * rows * channels
    count, bits = _sets(moved, device), (act_bits, weight_bits)
    ys = torch.empty(count, rows, channels, dtype=torch.float16, device=device)
    xs = [_copies(part, count) for part in (acts.tiles, acts.sums, acts.steps)]
    weights, sums, scales = (_copies(part, count) for part in (operand.tiles, operand.row_sums, operand.scales))
    products = [
        Product(
            Activations(*(x[i] for x in xs)),
            Weight(weights[i], sums[i], scales[i]),
            None,
            ys[i],
            columns,
            bits,
            weights_ready=True,
        )
        for i in range(count)
    ]
    calls = [lambda one=one: run_product(one, kernel, gpu) for one in products]
    return Case(f"w{weight_bits}a{act_bits}", shape, calls, work, unit, path)


def _bursts(shape: Shape, device: torch.device) -> list[dict[str, Any]]:
    """The products of a shape in short bursts, all cases in turns."""
    cases = [case for case in _baselines(shape, device) if case.what in _BASELINE_UNITS]
    cases += [_product(shape, p, q, device) for p, q in WIDTHS]
    found = measure_bursts([case.calls for case in cases], device)
    return [case.entry(burst.seconds, burst.sm_mhz) for case, burst in zip(cases, found, strict=True)]


def run() -> dict[str, Any]:
    """Measure every shape; raises BenchError without a GPU of compute capability 9.0 or above 100 % of peak."""
    device = needed_gpu()
    if torch.cuda.get_device_capability(device) != (9, 0):
        raise BenchError("the tables need a GPU of compute capability 9.0 (H100, H200)")
    entries: list[dict[str, Any]] = []
    for shape in [*SQUARES, *LLAMA_2_7B, *LLAMA_ATTENTION, *DECODING]:
        entries += [_timed(case, device) for case in _baselines(shape, device)]
        if shape not in DECODING:
            entries += [_timed(_product(shape, p, q, device), device) for p, q in WIDTHS]
        entries += [_op(shape, p, q, device) for p, q in WIDTHS]
        torch.cuda.empty_cache()
    bursts = []
    for shape in BURSTS:
        bursts += _bursts(shape, device)
        torch.cuda.empty_cache()
    peaks = {**_peaks(device), "memory": peak_bandwidth(device)}
    return {"environment": environment(device), "peaks": peaks, "entries": entries, "bursts": bursts}


def render(entries: Sequence[dict[str, Any]], shapes: Sequence[Shape], *, tops: bool = False) -> str:
    """A Markdown table of one row per width: microseconds (times fp16, percent of the peak of the units used).

    tops: 10**12 operations of useful work per second instead (2 M N K over the time), as in Figs 5-6.
    """
    measured = {(e["what"], e["M"], e["N"], e["K"]): e for e in entries}
    shapes = [shape for shape in shapes if ("fp16", *shape) in measured]
    names = [name for name in dict.fromkeys(e["what"] for e in entries) if any((name, *s) in measured for s in shapes)]
    title = "Top/s" if tops else "us (x fp16, % of peak)"
    lines = []
    for name in names:
        cells = [_cell(measured.get((name, *shape)), measured["fp16", *shape]["us"], tops) for shape in shapes]
        lines.append([name, *cells])
    return markdown_table([title, *(f"{m} x {n} x {k}" for m, n, k in shapes)], lines)


def _cell(found: dict[str, Any] | None, fp16_us: float, tops: bool) -> str:
    if found is None:
        return ""
    if tops:
        return f"{2e-6 * found['M'] * found['N'] * found['K'] / found['us']:.0f}"
    percent = f", {found['percent_of_peak']:.0f} %" if "percent_of_peak" in found else ""
    path = {"gemv": " GEMV", "int8": " INT8"}.get(found.get("path", ""), "")
    return f"{found['us']:.1f} ({fp16_us / found['us']:.2f}{percent}{path})"


def render_bursts(entries: Sequence[dict[str, Any]], bursts: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of both times of each case, up to a second without pause and in bursts, with the clocks."""
    sustained, short = ({(e["what"], e["M"], e["N"], e["K"]): e for e in times} for times in (entries, bursts))
    shapes = list(dict.fromkeys((e["M"], e["N"], e["K"]) for e in bursts))
    titles = [title for m, n, k in shapes for title in (f"{m} x {n} x {k}, sustained", "burst")]
    lines = []
    for name in dict.fromkeys(e["what"] for e in bursts):
        cells = [
            _cell(times.get((name, *shape)), times["fp16", *shape]["us"], False) + _clock(times.get((name, *shape)))
            for shape in shapes
            for times in (sustained, short)
        ]
        lines.append([name, *cells])
    return markdown_table(["us (x fp16, % of peak)", *titles], lines)


def _clock(found: dict[str, Any] | None) -> str:
    return f" at {found['sm_mhz']} MHz" if found and "sm_mhz" in found else ""


def report(entries: Sequence[dict[str, Any]], bursts: Sequence[dict[str, Any]] = ()) -> str:
    """Every table of a run, with the paper's number of it above each; without bursts, not that of them."""
    products = [e for e in entries if not e["what"].endswith(" op")]
    names = {e["what"] for e in products if "path" not in e}
    ops = [e for e in entries if e["what"] in names or e["what"].endswith(" op")]
    return "\n\n".join(
        [
            f"Table 1 (squares)\n\n{render(products, SQUARES[3:])}",
            f"Table 2 (Llama-2-7B, M x N x K)\n\n{render(products, LLAMA_2_7B)}",
            f"Fig 5\n\n{render(products, SQUARES, tops=True)}",
            f"Fig 6\n\n{render(products, [*LLAMA_ATTENTION, *LLAMA_2_7B], tops=True)}",
            f"Whole op\n\n{render(ops, [SQUARES[5], SQUARES[6], *LLAMA_2_7B])}",
            f"Few tokens (whole op)\n\n{render(ops, DECODING)}",
            *([f"Sustained and in bursts\n\n{render_bursts(products, bursts)}"] if bursts else []),
        ]
    )


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="measure, and write the numbers here")
    parser.add_argument("--render", type=Path, help="print the tables of a finished run")
    options = parser.parse_args()
    check_json_path(options.json)
    document = json.loads(options.render.read_text()) if options.render else run()
    write_document(options.json, document)
    print(report(document["entries"], document.get("bursts", ())))


if __name__ == "__main__":
    run_script(main)
