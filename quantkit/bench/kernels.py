"""``quantkit bench linear``: one Linear in a packed format against the same Linear in floating point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from quantkit.bench.energy import Energy, energy_per_call
from quantkit.bench.memory import check_fits
from quantkit.bench.methods import has_equal_steps, method_spec, random_tensors
from quantkit.bench.shapes import LinearShape
from quantkit.bench.timing import Timing, check_peak, check_result, measure, peak_bandwidth, rotation_length
from quantkit.cuda.device import gpu_of
from quantkit.errors import BenchError
from quantkit.formats.base import PackedWeight
from quantkit.formats.bipolar import act_values
from quantkit.formats.hadamard import unrotate
from quantkit.formats.table import FORMATS, format_name, stored_bytes
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.nn.table import Layout

TOLERANCE = {torch.float16: 3e-3, torch.float32: 1e-5}  # relative error in norm: the type's rounding, with slack
_CHECKED_TOKENS = 8
_REFERENCE_BYTES = 4 + 8  # of a weight, in fp32 and fp64, while a result is compared
_FLOAT_ACT_BITS = 16


@dataclass(frozen=True)
class LinearResult:
    """One row of the report.

    shape, out_features, in_features: the weight [N, K]. tokens: M of x. *_us: microseconds per call. baseline_*:
    F.linear in ``baseline`` on as many tokens, same run. bytes: stored weight, activations and output of one call.
    peak_percent: of the device's read bandwidth, or None where that is unknown. error: ||y - ref|| / ||ref||.
    energy, baseline_energy: None unless asked for.
    """

    shape: str
    out_features: int
    in_features: int
    method: str
    tokens: int
    implementation: str
    median_us: float
    p10_us: float
    p90_us: float
    repeats: int
    baseline: str
    baseline_us: float
    speed_up: float
    bytes: int
    gigabytes_per_second: float
    peak_percent: float | None
    error: float
    energy: Energy | None
    baseline_energy: Energy | None


@dataclass(frozen=True)
class LinearBench:
    """What to time, and on what: methods as in bench/methods.py, each at every number of tokens.

    layout: what the order of the weights on a GPU is for.
    """

    shapes: Sequence[LinearShape]
    methods: Sequence[str]
    tokens: Sequence[int]
    device: torch.device
    energy: bool = False
    layout: Layout = "latency"


def compute_dtype(device: torch.device) -> torch.dtype:
    """Activations and baseline: fp16 on a GPU, fp32 on the CPU."""
    return torch.float16 if device.type == "cuda" else torch.float32


def run_linear(bench: LinearBench) -> Iterable[LinearResult]:
    """Time every method at every shape and number of tokens, the baseline of a shape once per number.

    Raises BenchError for an unknown method, a wrong result, or a bandwidth above the device's.
    """
    specs = {name: method_spec(name) for name in bench.methods}
    if any(count < 1 for count in bench.tokens):
        raise BenchError("`tokens`: numbers must be positive")
    for shape in bench.shapes:
        _check_memory(bench, shape)
    for shape in bench.shapes:
        baselines = {tokens: _baseline(bench, shape, tokens) for tokens in bench.tokens}
        for name, spec in specs.items():
            yield from _time_method(bench, shape, name, spec, baselines)


def _check_memory(bench: LinearBench, shape: LinearShape) -> None:
    weights, width = shape.out_features * shape.in_features, compute_dtype(bench.device).itemsize
    rotation = rotation_length(weights * width, bench.device) * width
    check_fits(shape.name, weights * max(rotation, _REFERENCE_BYTES), bench.device)


def _baseline(bench: LinearBench, shape: LinearShape, tokens: int) -> tuple[Timing, Energy | None]:
    dtype = compute_dtype(bench.device)
    x = torch.randn(tokens, shape.in_features, device=bench.device, dtype=dtype)
    size = shape.out_features * shape.in_features * dtype.itemsize
    weights = [
        torch.randn(shape.out_features, shape.in_features, device=bench.device, dtype=dtype)
        for _ in range(rotation_length(size, bench.device))
    ]
    calls = [_linear_call(x, weight) for weight in weights]
    return measure(calls, bench.device), _energy(bench, calls)


def _linear_call(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    return lambda: linear(x, weight)


def _module_call(module: QuantizedLinear, x: Tensor) -> Callable[[], Tensor]:
    return lambda: module(x)


def _energy(bench: LinearBench, calls: Sequence[Callable[[], Any]]) -> Energy | None:
    return energy_per_call(calls, bench.device) if bench.energy else None


def random_linear(
    spec: Any,
    shape: LinearShape,
    device: torch.device,
    dtype: torch.dtype,
    layout: Layout = "latency",
    *,
    equal_steps: bool = False,
) -> QuantizedLinear:
    """A Linear with random content in the spec's format, in the order the device's kernels read."""
    size = (shape.out_features, shape.in_features)
    tensors = random_tensors(spec, size, device, equal_steps=equal_steps)
    module = QuantizedLinear.from_packed(PackedWeight(spec, size, tensors, {}), None, dtype)
    module.layout = layout
    module.prepare_for_device()
    return module


def read_bytes(module: QuantizedLinear, stored: int) -> int:
    """Of a weight of so many stored bytes, what a product reads at least: prepared, it may be padded or hold fewer."""
    return min(stored, sum(tensor.nbytes for tensor in module.held.values()))


def _time_method(
    bench: LinearBench,
    shape: LinearShape,
    name: str,
    spec: Any,
    baselines: dict[int, tuple[Timing, Energy | None]],
) -> Iterable[LinearResult]:
    dtype = compute_dtype(bench.device)
    stored = stored_bytes(spec, (shape.out_features, shape.in_features))
    count = rotation_length(stored, bench.device)
    steps = has_equal_steps(name)
    modules = [random_linear(spec, shape, bench.device, dtype, bench.layout, equal_steps=steps) for _ in range(count)]
    peak, weight_bytes = peak_bandwidth(bench.device), read_bytes(modules[0], stored)
    for tokens in bench.tokens:
        what = f"{name} at {shape.name}, {tokens} tokens"
        x = torch.randn(tokens, shape.in_features, device=bench.device, dtype=dtype)
        error = relative_error(modules[0], x[:_CHECKED_TOKENS], modules[0](x)[:_CHECKED_TOKENS])
        check_result(what, error, TOLERANCE[dtype])
        calls = [_module_call(module, x) for module in modules]
        timing = measure(calls, bench.device)
        moved = weight_bytes + tokens * (shape.out_features + shape.in_features) * dtype.itemsize
        bandwidth = moved / timing.median
        check_peak(what, bandwidth, peak)
        baseline, baseline_energy = baselines[tokens]
        yield LinearResult(
            shape=shape.name,
            out_features=shape.out_features,
            in_features=shape.in_features,
            method=name,
            tokens=tokens,
            implementation=implementation(modules[0], x),
            median_us=timing.median * 1e6,
            p10_us=timing.p10 * 1e6,
            p90_us=timing.p90 * 1e6,
            repeats=timing.repeats,
            baseline=str(dtype).removeprefix("torch."),
            baseline_us=baseline.median * 1e6,
            speed_up=baseline.median / timing.median,
            bytes=moved,
            gigabytes_per_second=bandwidth / 1e9,
            peak_percent=None if peak is None else 100 * bandwidth / peak,
            error=error,
            energy=_energy(bench, calls),
            baseline_energy=baseline_energy,
        )


def relative_error(module: QuantizedLinear, x: Tensor, y: Tensor) -> float:
    """||y - x W^T|| / ||x W^T||, W dequantized, x as the format rounds it, the product in fp64."""
    rounded = x.double()
    if FORMATS[module.format_name].act_bits(module.spec) != _FLOAT_ACT_BITS:
        if module.format_name not in ROUNDED_INPUTS:
            raise BenchError(f"format {module.format_name}: no reference for quantized activations in this benchmark")
        rounded = ROUNDED_INPUTS[module.format_name](module, x)
    expected = rounded @ module.dequantize().double().T
    return float((y.double() - expected).norm() / expected.norm())


def implementation(module: QuantizedLinear, x: Tensor) -> str:
    """What ran: the kernel's name on a GPU, "reference" on the CPU."""
    if not x.is_cuda:
        return "reference"
    chosen = IMPLEMENTATIONS.get(format_name(module.spec))
    return module.format_name if chosen is None else chosen(module, x)


def _bcq_kernel(module: QuantizedLinear, x: Tensor) -> str:
    from quantkit.nn.bcq_linear import prepared_weight
    from quantkit.ops.bcq.autotune import choose

    spec, weight = module.spec, prepared_weight(module.spec, module.held, module.shape)
    return choose(x, spec.weight_bits, module.out_features, spec.group_size, spec.scale_bits, order=weight.order)


def _trellis_kernel(module: QuantizedLinear, x: Tensor) -> str:
    from quantkit.nn.trellis_linear import prepared_weight
    from quantkit.ops.trellis.op import implementation

    return implementation(x, prepared_weight(module.spec, module.held, module.shape))


def _bipolar_kernel(module: QuantizedLinear, x: Tensor) -> str:
    from quantkit.ops.bipolar.plan import kernel_for

    spec, shape, row = module.spec, (x.shape[0], x.shape[-1]), gpu_of(x.device).architecture
    if "tiles" not in module.held:
        return "bcq kernels"
    bits = spec.weight_bits, spec.act_bits
    return str(kernel_for(*bits, shape, row, act_zero=spec.act_zero, coded=spec.coded))


def _bipolar_input(module: QuantizedLinear, x: Tensor) -> Tensor:
    values, step = act_values(x, module.tensors["act_clip"], module.spec.coding)
    rounded = values.double() * step
    return unrotate(rounded).double() if module.spec.rotate_inputs else rounded


IMPLEMENTATIONS: dict[str, Callable[[QuantizedLinear, Tensor], str]] = {
    "bcq": _bcq_kernel,
    "bipolar": _bipolar_kernel,
    "trellis": _trellis_kernel,
}
ROUNDED_INPUTS: dict[str, Callable[[QuantizedLinear, Tensor], Tensor]] = {"bipolar": _bipolar_input}
