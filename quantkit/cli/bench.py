"""``quantkit bench``: how fast, never without a check of the result."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.common import JsonOption, Program, check_json_path, print_facts, print_table, write_json
from quantkit.errors import BenchError
from quantkit.progress import track

if TYPE_CHECKING:
    import torch

    from quantkit.bench.decode import DecodeResult
    from quantkit.bench.experts import ExpertsResult
    from quantkit.bench.kernels import LinearResult
    from quantkit.bench.prefill import PrefillResult

app = typer.Typer(
    cls=Program,
    help="Measure speed: one Linear, a block's experts, a whole model's decoding, or its context pass.",
    no_args_is_help=True,
)

LINE_SECONDS = 10.0  # between lines of progress where stderr is no terminal

DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default a GPU if there is one.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Also draw the results.")]


def _device(name: str | None) -> torch.device:
    """The device to run on. Raises DeviceError for one that is not there."""
    from quantkit.cuda.device import usable_device
    from quantkit.models.loading import first_device

    return usable_device(name or first_device())


def _integers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise BenchError(f"{option} {text}: expected whole numbers separated by commas") from error


@app.command()
def linear(
    shapes: Annotated[str, typer.Option(help="NxK or a name (opt-30b, nuqmm-table2, ...), separated by commas.")],
    methods: Annotated[str, typer.Option("--method", help="bcq-w4-g128, nuqmm-q2-grow, ...; separated by commas.")],
    bits: Annotated[str | None, typer.Option(help="Added to each method: bipolar with w1a2,w2a2.")] = None,
    tokens: Annotated[
        str, typer.Option("--tokens", "--rows", help="Tokens multiplied at once, separated by commas.")
    ] = "1,8,512",
    device: DeviceOption = None,
    energy: Annotated[bool, typer.Option("--energy", help="Also read the GPU's energy counter.")] = False,
    json_path: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """One Linear in a packed format against the same Linear in floating point, timed in the same run."""
    check_json_path(json_path)
    from quantkit.bench.kernels import LinearBench, run_linear
    from quantkit.bench.methods import method_names
    from quantkit.bench.report import check_plot_path, environment, plot_linear, to_json
    from quantkit.bench.shapes import parse_shapes
    from quantkit.bench.timing import peak_bandwidth

    check_plot_path(plot)
    where = _device(device)
    counts = _integers("--tokens", tokens)
    bench = LinearBench(parse_shapes(shapes), method_names(methods, bits), counts, where, energy)
    facts = environment(where)
    total = len(bench.shapes) * len(bench.methods) * len(counts)
    results = list(track(run_linear(bench), "compiling and timing", total, every=LINE_SECONDS))
    print_facts(facts)
    _print_linear(results)
    if where.type == "cpu":
        typer.echo("On the CPU this times the reference implementation, which is not made to be fast.")
    write_json(json_path, to_json(facts, results=[asdict(result) for result in results]))
    if plot is not None:
        plot_linear(plot, results, facts["device"], peak_bandwidth(where))


def _print_linear(results: list[LinearResult]) -> None:
    energy = any(result.energy for result in results)
    columns = ("shape", "method", "tokens", "ran", "us", "p10", "p90", "x float", "MB", "GB/s", "% peak", "error")
    rows = []
    for r in results:
        peak = "-" if r.peak_percent is None else f"{r.peak_percent:.0f}"
        row = [r.shape, r.method, str(r.tokens), r.implementation]
        row += [f"{value:.2f}" for value in (r.median_us, r.p10_us, r.p90_us, r.speed_up, r.bytes / 1e6)]
        row += [f"{r.gigabytes_per_second:.0f}", peak, f"{r.error:.1e}"]
        if r.energy and r.baseline_energy:
            row += [f"{r.energy.millijoules:.2f}", f"{r.baseline_energy.millijoules:.2f}", f"{r.energy.watts:.0f}"]
        rows.append(row)
    extra = ("mJ", "mJ float", "W") if energy else ()
    print_table(f"median of {min(r.repeats for r in results)} or more repeats", columns + extra, rows)


@app.command()
def experts(
    shapes: Annotated[str, typer.Option(help="qwen3-30b-a3b or mixtral-8x7b, separated by commas.")],
    methods: Annotated[str, typer.Option("--method", help="bcq-w4-g128, nuqmm-q2-g128, ...; separated by commas.")],
    tokens: Annotated[
        str, typer.Option(help="Tokens at once, separated by commas; each chooses its experts at random.")
    ] = "1,4,16,64,256,1024",
    device: DeviceOption = None,
    json_path: JsonOption = None,
) -> None:
    """The products of a block's experts, one launch each, against torch's grouped product, timed in the same run."""
    check_json_path(json_path)
    from quantkit.bench.experts import ExpertsBench, run_experts
    from quantkit.bench.methods import method_names
    from quantkit.bench.report import environment, to_json
    from quantkit.bench.shapes import experts_shapes

    where = _device(device)
    bench = ExpertsBench(experts_shapes(shapes), method_names(methods), _integers("--tokens", tokens), where)
    facts = environment(where)
    total = len(bench.shapes) * len(bench.methods) * len(bench.tokens)
    results = list(track(run_experts(bench), "compiling and timing", total, every=LINE_SECONDS))
    print_facts(facts)
    _print_experts(results)
    write_json(json_path, to_json(facts, results=[asdict(result) for result in results]))


def _print_experts(results: list[ExpertsResult]) -> None:
    columns = ("shape", "method", "tokens", "active", "ran", "us", "x grouped", "MB", "GB/s", "% peak", "error")
    rows = []
    for r in results:
        peak = "-" if r.peak_percent is None else f"{r.peak_percent:.0f}"
        faster = "-" if r.speed_up is None else f"{r.speed_up:.2f}"
        row = [r.shape, r.method, str(r.tokens), f"{r.active:.1f}", r.implementation, f"{r.median_us:.2f}", faster]
        rows.append([*row, f"{r.bytes / 1e6:.2f}", f"{r.gigabytes_per_second:.0f}", peak, f"{r.error:.1e}"])
    print_table(f"median of {min(r.repeats for r in results)} or more repeats", columns, rows)


@app.command()
def decode(
    model: Annotated[str, typer.Argument(help="A shape's name (opt-30b, llama-2-7b, ...) or a folder.")],
    method: Annotated[
        str | None, typer.Option(help="With a shape: bcq-w4-g128, nuqmm-q2-g128, bcq-w4-g128-head6, ...")
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 128,
    new: Annotated[int, typer.Option(help="Tokens to generate.")] = 128,
    batches: Annotated[
        str, typer.Option("--batch", help="Sequences at once, separated by commas; above 4 in the order for batches.")
    ] = "1",
    device: DeviceOption = None,
    json_path: JsonOption = None,
) -> None:
    """Time per step of generation with a static KV cache; on a GPU each step is one CUDA graph."""
    check_json_path(json_path)
    from quantkit.bench.decode import DecodeBench, run_decode
    from quantkit.bench.report import environment, to_json

    where = _device(device)
    facts = environment(where)
    bench = DecodeBench(model, method, prompt, new, where, _integers("--batch", batches))
    results = list(run_decode(bench))
    print_facts(facts)
    _print_decode(results)
    if method is not None and all(result.method == method for result in results):
        typer.echo(f"quantkit: {model} in floating point does not fit into memory: not timed", err=True)
    write_json(json_path, to_json(facts, results=[asdict(result) for result in results]))


def _print_decode(results: list[DecodeResult]) -> None:
    columns = (
        "model",
        "batch",
        "first ms",
        "first ms, own code",
        "ms/step",
        "p99",
        "tokens/s",
        "peak GB",
        "weights GB",
        "GB/s",
        "% peak",
        "x float",
    )
    floats = {r.batch: r.median_ms for r in results if r.method == "float"}
    rows = []
    for r in results:
        peak = "-" if r.peak_percent is None else f"{r.peak_percent:.0f}"
        values = (r.first_token_ms, r.own_code_first_token_ms, r.median_ms, r.p99_ms, r.tokens_per_second)
        sizes = (r.peak_memory_bytes / 1e9, r.weight_bytes / 1e9, r.weight_gigabytes_per_second)
        faster = f"{floats[r.batch] / r.median_ms:.2f}" if r.batch in floats else "-"
        numbers = [f"{value:.2f}" for value in (*values, *sizes)]
        rows.append([f"{r.model} {r.method}", str(r.batch), *numbers, peak, faster])
    first = results[0]
    print_table(f"{first.prompt} tokens of prompt, {first.new} generated", columns, rows)


@app.command()
def prefill(
    model: Annotated[str, typer.Argument(help="A shape's name (opt-13b, opt-30b, ...) or a folder.")],
    methods: Annotated[
        str,
        typer.Option(
            "--method", help="With a shape: fp16, smoothquant, flatten-o1, flatten-o3, flatten-o1-int8-attention."
        ),
    ] = "",
    batches: Annotated[str, typer.Option("--batch", help="Sequences at once, separated by commas.")] = "1,8",
    lengths: Annotated[str, typer.Option("--seq", help="Tokens per sequence, separated by commas.")] = "256,2048",
    device: DeviceOption = None,
    json_path: JsonOption = None,
) -> None:
    """One context pass of a whole model; on a GPU it is one CUDA graph."""
    check_json_path(json_path)
    from quantkit.bench.prefill import PrefillBench, run_prefill
    from quantkit.bench.report import environment, to_json

    where = _device(device)
    facts = environment(where)
    sizes = _integers("--batch", batches), _integers("--seq", lengths)
    bench = PrefillBench(model, tuple(filter(None, methods.split(","))), *sizes, where)
    results = list(run_prefill(bench))
    print_facts(facts)
    _print_prefill(results)
    write_json(json_path, to_json(facts, results=[asdict(result) for result in results]))


def _print_prefill(results: list[PrefillResult]) -> None:
    columns = (
        "method",
        "batch",
        "tokens",
        "ms",
        "p90",
        "tokens/s",
        "TOPS",
        "% peak",
        "peak GB",
        "INT4 layers",
        "x fp16",
    )
    base = {(r.batch, r.length): r.ms for r in results if r.method == "fp16"}
    rows = []
    for r in results:
        fp16 = base.get((r.batch, r.length))
        gigabytes = None if r.peak_memory_bytes is None else r.peak_memory_bytes / 1e9
        numbers = [(r.ms, 2), (r.p90_ms, 2), (r.tokens_per_second, 0), (r.tera_ops, 0), (r.peak_percent, 0)]
        cells = ["-" if value is None else f"{value:.{digits}f}" for value, digits in (*numbers, (gigabytes, 2))]
        faster = "-" if fp16 is None or r.ms is None else f"{fp16 / r.ms:.2f}"
        rows.append([r.method, str(r.batch), str(r.length), *cells, f"{r.int4_share:.0%}", faster])
    print_table(f"{results[0].model}: one context pass", columns, rows)
    if any(r.method == "flatten-o3" for r in results):
        typer.echo("INT4 layers save memory everywhere; they are faster only where the GPU has INT4 products.")
