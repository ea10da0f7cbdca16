"""``quantkit bench experts``: the products of a block's experts in one launch against torch's grouped product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.bench.memory import check_fits
from quantkit.bench.methods import method_spec, random_tensors
from quantkit.bench.shapes import ExpertsShape
from quantkit.bench.timing import Timing, check_peak, check_result, measure, peak_bandwidth, rotation_length
from quantkit.cuda.device import gpu_of
from quantkit.errors import BenchError
from quantkit.formats.bcq import BcqSpec, BcqTensors, dequantize_stored
from quantkit.formats.table import stored_bytes
from quantkit.ops.bcq.experts import choose_experts_kernel, fits_experts
from quantkit.ops.bcq.instances import TILE_N
from quantkit.ops.bcq.layout import BcqTiles, split_experts, tile, untile
from quantkit.ops.bcq.op import bcq_experts

_TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float32: 1e-5}  # relative error in norm: the type's rounding, with slack
_CHECKED_PAIRS = 8
_ROUTES = 16  # different choices that are timed in turn
_SCRATCH_BYTES = 8  # of a weight, while random ones are made


@dataclass(frozen=True)
class ExpertsResult:
    """One row of the report.

    shape, experts, top_k, out_features, in_features: the weights [experts, N, K], of which a token takes top_k.
    active: experts with tokens, on average. *_us: microseconds per call, with the sorting of tokens by expert.
    baseline_us: torch's grouped product of as many tokens, already sorted, in ``baseline``, same run; None without one.
    bytes: weights of the active experts, activations and outputs. peak_percent: of the device's read bandwidth, or None
    where that is unknown. error: ||y - ref|| / ||ref||.
    """

    shape: str
    experts: int
    top_k: int
    out_features: int
    in_features: int
    method: str
    tokens: int
    active: float
    implementation: str
    median_us: float
    p10_us: float
    p90_us: float
    repeats: int
    baseline: str
    baseline_us: float | None
    speed_up: float | None
    bytes: int
    gigabytes_per_second: float
    peak_percent: float | None
    error: float


@dataclass(frozen=True)
class ExpertsBench:
    """What to time, and on what: bcq methods as in bench/methods.py, each at every number of tokens."""

    shapes: Sequence[ExpertsShape]
    methods: Sequence[str]
    tokens: Sequence[int]
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Activations and baseline: bf16 on a GPU, where grouped products of it are in every version of torch."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def run_experts(bench: ExpertsBench) -> Iterable[ExpertsResult]:
    """Time every method at every shape and number of tokens, routed at random, the baseline of a shape once per number.

    Raises BenchError for an unknown method, one that is no bcq, a wrong result, or a bandwidth above the device's.
    """
    specs = {name: _spec(name) for name in bench.methods}
    if any(count < 1 for count in bench.tokens):
        raise BenchError("`tokens`: numbers must be positive")
    for shape in bench.shapes:
        _check(bench, shape, specs)
    for shape in bench.shapes:
        routes = {tokens: _routes(shape, tokens, bench.device) for tokens in bench.tokens}
        baselines = _baselines(bench, shape, routes)
        for name, spec in specs.items():
            weights = _random_weights(bench, shape, spec)
            for tokens in bench.tokens:
                yield _time(bench, shape, (name, spec), weights, routes[tokens], baselines[tokens])


def _spec(name: str) -> BcqSpec:
    spec = method_spec(name)
    if not isinstance(spec, BcqSpec):
        raise BenchError(f"method {name}: experts are multiplied at once in the bcq format only; name such a method")
    return spec


def _check(bench: ExpertsBench, shape: ExpertsShape, specs: dict[str, BcqSpec]) -> None:
    weights = shape.experts * shape.out_features * shape.in_features
    width = bench.dtype.itemsize
    copies = rotation_length(weights * width, bench.device) if bench.device.type == "cuda" else 0
    check_fits(shape.name, weights * max(copies * width, _SCRATCH_BYTES), bench.device)
    if bench.device.type != "cuda":
        return
    row = gpu_of(bench.device).architecture
    for name, spec in specs.items():
        sizes = {"weight_bits": spec.weight_bits, "group_size": spec.group_size, "in_features": shape.in_features}
        if not fits_experts(bench.dtype, row, **sizes) or shape.out_features % TILE_N:
            raise BenchError(f"method {name} at {shape.name}: no kernel of {row.title} multiplies such experts at once")


def _routes(shape: ExpertsShape, tokens: int, device: torch.device) -> list[Tensor]:
    """Choices [tokens * top_k] of different experts for every token, at random but the same each time."""
    generator = torch.Generator().manual_seed(tokens)
    found = []
    for _ in range(_ROUTES):
        order = torch.rand(tokens, shape.experts, generator=generator).argsort(dim=1)
        found.append(order[:, : shape.top_k].reshape(-1).to(device))
    return found


def _inputs(shape: ExpertsShape, tokens: int) -> int:
    return tokens if shape.shared_input else tokens * shape.top_k


def _random_weights(bench: ExpertsBench, shape: ExpertsShape, spec: BcqSpec) -> list[BcqTiles]:
    """All experts' weights, as often as L2 is not to hold them."""
    whole = shape.experts * shape.out_features, shape.in_features
    weights = []
    for _ in range(rotation_length(stored_bytes(spec, whole), bench.device)):
        stored = BcqTensors.of(random_tensors(spec, whole, bench.device))
        weights.append(replace(tile(stored, shape.in_features, spec.group_size), out_features=shape.out_features))
    return weights


def _call(x: Tensor, chosen: Tensor, weight: BcqTiles) -> Callable[[], Tensor]:
    sizes = weight.out_features, weight.group_size
    return lambda: bcq_experts(
        x, chosen, weight.tiles, weight.scale_tiles, None, *sizes, factor_tiles=weight.factor_tiles
    )


def _time(
    bench: ExpertsBench,
    shape: ExpertsShape,
    method: tuple[str, BcqSpec],
    weights: Sequence[BcqTiles],
    routes: Sequence[Tensor],
    baseline: Timing | None,
) -> ExpertsResult:
    (name, spec), pairs = method, len(routes[0])
    tokens = pairs // shape.top_k
    what = f"{name} at {shape.name}, {tokens} tokens"
    x = torch.randn(_inputs(shape, tokens), shape.in_features, device=bench.device, dtype=bench.dtype)
    calls = [_call(x, chosen, weights[number % len(weights)]) for number, chosen in enumerate(routes)]
    error = _error(x, routes[0], weights[0], calls[0]())
    check_result(what, error, _TOLERANCE[bench.dtype])
    timing = measure(calls, bench.device)
    active = sum(len(chosen.unique()) for chosen in routes) / len(routes)
    weight_bytes = stored_bytes(spec, (shape.out_features, shape.in_features))
    moved = int(active * weight_bytes) + (x.numel() + pairs * shape.out_features) * bench.dtype.itemsize
    bandwidth, peak = moved / timing.median, peak_bandwidth(bench.device)
    check_peak(what, bandwidth, peak)
    ran = "reference"
    if bench.device.type == "cuda":
        ran = str(choose_experts_kernel(pairs, shape.experts, gpu_of(bench.device).architecture))
    return ExpertsResult(
        shape=shape.name,
        experts=shape.experts,
        top_k=shape.top_k,
        out_features=shape.out_features,
        in_features=shape.in_features,
        method=name,
        tokens=tokens,
        active=active,
        implementation=ran,
        median_us=timing.median * 1e6,
        p10_us=timing.p10 * 1e6,
        p90_us=timing.p90 * 1e6,
        repeats=timing.repeats,
        baseline=str(bench.dtype).removeprefix("torch."),
        baseline_us=None if baseline is None else baseline.median * 1e6,
        speed_up=None if baseline is None else baseline.median / timing.median,
        bytes=moved,
        gigabytes_per_second=bandwidth / 1e9,
        peak_percent=None if peak is None else 100 * bandwidth / peak,
        error=error,
    )


def _error(x: Tensor, chosen: Tensor, weight: BcqTiles, y: Tensor) -> float:
    """||y - ref|| / ||ref|| over some pairs, the product in fp64."""
    experts, choices = split_experts(weight), len(chosen) // len(x)
    expected = []
    for pair, expert in enumerate(chosen[:_CHECKED_PAIRS].tolist()):
        dense = dequantize_stored(untile(experts[expert]), weight.in_features, weight.group_size)
        expected.append(dense.double() @ x[pair // choices].double())
    reference = torch.stack(expected)
    return float((y[: len(reference)].double() - reference).norm() / reference.norm())


def _baselines(bench: ExpertsBench, shape: ExpertsShape, routes: dict[int, list[Tensor]]) -> dict[int, Timing | None]:
    """torch's grouped product by number of tokens, on a GPU and where this torch has one."""
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if grouped is None or bench.device.type != "cuda":
        return dict.fromkeys(routes)
    size = (shape.experts, shape.out_features, shape.in_features)
    copies = rotation_length(shape.experts * shape.out_features * shape.in_features * 2, bench.device)
    dense = [torch.randn(size, device=bench.device, dtype=bench.dtype).transpose(1, 2) for _ in range(copies)]

    def call(x: Tensor, weight: Tensor, chosen: Tensor) -> Callable[[], Tensor]:
        ends = torch.bincount(chosen, minlength=shape.experts).cumsum(0).to(torch.int32)
        return lambda: grouped(x, weight, offs=ends)

    found: dict[int, Timing | None] = {}
    for tokens, chosen in routes.items():
        x = torch.randn(tokens * shape.top_k, shape.in_features, device=bench.device, dtype=bench.dtype)
        calls = [call(x, dense[number % copies], own) for number, own in enumerate(chosen)]
        found[tokens] = measure(calls, bench.device)
    return found
