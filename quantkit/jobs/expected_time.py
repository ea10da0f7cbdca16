"""How long quantizing a model will take, from small samples of the work on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.calibration.artifact import Calibration
from quantkit.formats.base import Shape
from quantkit.methods import METHODS, LayerPlan
from quantkit.models.families import linear_shape
from quantkit.models.stream import ModelStream
from quantkit.quantizers.base import LayerInput
from quantkit.stats import HISTOGRAM_BINS, LayerStats
from quantkit.tuning.settings import TuneSettings
from quantkit.tuning.whole_model import held_tokens, tokens_of_passes

_ROWS, _COLUMNS = 128, 512  # of the sampled Linear
_PRODUCT = 1024  # rows, columns and depth of the sampled product
_SAMPLES = 2  # of each, the last of which counts: the first chooses and compiles what it needs
_PASSES = 2  # of the text through a block: for Hessians, and for what the next block reads
_TUNED_PRODUCTS = 3  # of a Linear while it is tuned: forward, and the gradients of its input and of its weight
_SOLVER_PRODUCTS = 6  # N x K x K products and factorizations of a solver that takes a Hessian, roughly
ERROR_FACTOR = 3
"""The time may be off by so much: samples are small, solvers stop early on some weights, and machines do other work."""


def expected_seconds(
    stream: ModelStream,
    plans: Mapping[str, LayerPlan],
    artifact: Calibration | None,
    tuning: TuneSettings | None = None,
) -> float:
    """Seconds of solving every layer, of running the calibration text and of tuning; reading and writing files not
    counted.

    A sample of each method and its settings gives the time per weight, a product the time per operation.
    """
    shapes = {name: linear_shape(stream.model.get_submodule(name)) for name in plans}
    calibrated = {name for name, plan in plans.items() if METHODS[plan.method].needs_hessian(plan.settings)}
    per_operation = _seconds_per_operation(stream.device)
    rates: dict[str, float] = {}
    seconds = 0.0
    for name, plan in plans.items():
        key = repr(plan)
        if key not in rates:
            rates[key] = _seconds_per_weight(plan, stream.device)
        seconds += rates[key] * math.prod(shapes[name])
        if name in calibrated:
            seconds += per_operation * _SOLVER_PRODUCTS * shapes[name][0] * shapes[name][1] ** 2
    if calibrated and artifact is not None:
        seconds += per_operation * artifact.windows.numel() * _text_operations(shapes, calibrated)
    if tuning is not None and artifact is not None:
        seconds += per_operation * _tuning_operations(stream, shapes, tuning, artifact.windows)
    return seconds


def _tuning_operations(
    stream: ModelStream, shapes: Mapping[str, Shape], tuning: TuneSettings, windows: Tensor
) -> float:
    """Every layer's products in every pass over windows [n, seq_len]; the head's in passes of the whole model, and in
    writing further windows for them."""
    config, weights = stream.model.config.get_text_config(), sum(map(math.prod, shapes.values()))
    whole, tokens = weights + config.vocab_size * config.hidden_size, tokens_of_passes(windows, tuning)
    read_again = 0 if held_tokens(stream.model, tokens, stream.device) else 1  # by the original
    operations = _TUNED_PRODUCTS * tuning.blocks * windows.numel() * weights
    operations += (_TUNED_PRODUCTS + read_again) * tuning.epochs * tokens * whole
    return 2.0 * (operations + (tokens - windows.numel()) * whole)


def _text_operations(shapes: Mapping[str, Shape], calibrated: set[str]) -> float:
    """Operations a token: every layer's product in every pass, and E[x x^T] of each input once."""
    products = sum(2.0 * _PASSES * math.prod(shape) for shape in shapes.values())
    inputs = {(name.rpartition(".")[0], shapes[name][1]) for name in calibrated}
    return products + sum(2.0 * columns**2 for _, columns in inputs)


def _seconds_per_operation(device: torch.device) -> float:
    x = torch.ones(_PRODUCT, _PRODUCT, device=device)
    seconds = 0.0
    for _ in range(_SAMPLES):
        began = _now(device)
        x @ x
        seconds = _now(device) - began
    return seconds / (2.0 * _PRODUCT**3)


def _seconds_per_weight(plan: LayerPlan, device: torch.device) -> float:
    """Of a small random Linear, calibrated on random inputs where its method asks for that."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(_ROWS, _COLUMNS, generator=generator).to(device)
    x = torch.randn(4 * _COLUMNS, _COLUMNS, generator=generator)
    square = x.square().mean(dim=0)
    stats = LayerStats(
        absmax=x.abs().amax(dim=0),
        mean_abs=x.abs().mean(dim=0),
        mean_square=square,
        histogram=torch.ones(HISTOGRAM_BINS, dtype=torch.int64),
        sample=x[:1],
        tokens=len(x),
    )
    method = METHODS[plan.method]
    layer = LayerInput("sample", weight, stats if method.needs_stats(plan.settings) else None)
    if method.needs_hessian(plan.settings):
        features = x if method.hessian_features is None else method.hessian_features(layer, plan.settings)(x.to(device))
        layer = LayerInput("sample", weight, layer.stats, (features.t() @ features / len(features)).to(device))
    seconds = 0.0
    for _ in range(_SAMPLES):
        began = _now(device)
        method.quantize(layer, plan.settings)
        seconds = _now(device) - began
    return seconds / weight.numel()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
