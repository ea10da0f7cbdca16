"""``quantkit bench decode``: time per token of a whole model, real or only its shape, against fp16 in the same run."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantkit.bench.kernels import TOLERANCE, compute_dtype, random_linear, relative_error
from quantkit.bench.memory import check_fits, fits, model_bytes
from quantkit.bench.methods import has_equal_steps, method_spec, with_head
from quantkit.bench.shapes import MODELS, LinearShape, ModelShape, model_shape, shape_config
from quantkit.bench.timing import check_peak, check_result, peak_bandwidth
from quantkit.errors import BenchError
from quantkit.formats.table import stored_bytes
from quantkit.models.families import decoder_blocks, linear_shape
from quantkit.models.structure import output_head, untie_head
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.nn.table import Layout, layout_for
from quantkit.progress import track
from quantkit.runtime.generation import Runner, Session, captured_step, next_logits, runner_for, start, step
from quantkit.runtime.shared_products import share_products

_CHECKED_STEPS = 4
_FIRST_TOKENS = 7  # timed on a GPU
_DIFFERING_SHARE = 0.25  # of the sequences
_TOKEN_TOLERANCE = 5e-2  # of the logits after dozens of blocks in fp16: rounding alone was seen to change them by 2e-2


@dataclass(frozen=True)
class DecodeResult:
    """One model's decoding of ``batch`` sequences. Times in milliseconds, of a step; *_percent: of the read bandwidth.

    own_code_first_token_ms: of the prompts read by transformers' code, as on a CPU. tokens_per_second: of all
    sequences. weight_bytes: read in a step.
    """

    model: str
    method: str
    batch: int
    prompt: int
    new: int
    first_token_ms: float
    own_code_first_token_ms: float
    median_ms: float
    p99_ms: float
    tokens_per_second: float
    peak_memory_bytes: int
    weight_bytes: int
    weight_gigabytes_per_second: float
    peak_percent: float | None


@dataclass(frozen=True)
class DecodeBench:
    """model: a shape's name or a folder. method: as in bench/methods.py, also with a head; None for a folder as it is.

    batches: numbers of sequences that are decoded at once; each has the order of weights that suits it (layout_for).
    """

    model: str
    method: str | None
    prompt: int
    new: int
    device: torch.device
    batches: tuple[int, ...] = (1,)


def run_decode(bench: DecodeBench) -> Iterator[DecodeResult]:
    """fp16 first where it fits (shapes only), then the method, or a folder as it is.

    Raises BenchError for a method with a folder, a missing method with a shape, a wrong result, or too little memory.
    """
    if min(bench.prompt, bench.new, *bench.batches) < 1:
        raise BenchError("prompt, new tokens and sequences must be at least 1 each")
    if Path(bench.model).is_dir():
        if bench.method is not None:
            raise BenchError(f"`method`: only with a shape's name; {bench.model} is a folder and is run as it is")
        yield from _run_folder(bench)
        return
    shape = model_shape(bench.model)
    if bench.method is None:
        raise BenchError(f"`method`: needed with the shape {bench.model}; for example bcq-w4-g128")
    method, head = with_head(bench.method)
    spec = method_spec(method)
    dtype = compute_dtype(bench.device)
    packed = model_bytes(shape, dtype, lambda _index, *size: stored_bytes(spec, size))
    check_fits(f"{bench.model}, {bench.method}", packed, bench.device)
    if fits(model_bytes(shape, dtype), bench.device):
        model = shaped_model(shape, bench.device)
        yield from _time_batches(bench, "float", model, bench.batches)
        del model
        _release(bench.device)
    for layout, batches in _by_layout(bench.batches):
        model = shaped_model(shape, bench.device, spec, layout, equal_steps=has_equal_steps(method))
        if head is not None:
            _pack_head(model, head, bench.device, layout)
        _check_linears(model, bench)
        yield from _time_batches(bench, bench.method, model, batches)
        del model
        _release(bench.device)


def _by_layout(batches: Sequence[int]) -> Iterator[tuple[Layout, list[int]]]:
    for layout, alike in groupby(batches, layout_for):
        yield layout, list(alike)


def _time_batches(bench: DecodeBench, method: str, model: Any, batches: Sequence[int]) -> Iterator[DecodeResult]:
    for batch in batches:
        yield _time(bench, method, model, batch)


def _run_folder(bench: DecodeBench) -> Iterator[DecodeResult]:
    from quantkit.integrations.transformers import load_checkpoint
    from quantkit.models.loading import is_quantkit, load_model

    dtype, device = compute_dtype(bench.device), bench.device
    if not is_quantkit(bench.model):
        model, _ = load_model(bench.model, dtype=dtype, device=device)
        yield from _time_batches(bench, "as stored", model.eval(), bench.batches)
        return
    for layout, batches in _by_layout(bench.batches):
        model = load_checkpoint(bench.model, device=str(device), dtype=dtype, layout=layout)
        yield from _time_batches(bench, "as stored", model, batches)
        del model
        _release(device)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def shaped_model(
    shape: ModelShape,
    device: torch.device,
    spec: Any = None,
    layout: Layout = "latency",
    *,
    equal_steps: bool = False,
) -> Any:
    """A model of the shape with random weights; ``spec`` packs the Linears of its blocks, in an order.

    One block is made and copied, so no more than one block is ever in floating point.
    """
    from transformers import AutoModelForCausalLM

    config = shape_config(shape)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=compute_dtype(device)).eval()
    ((_, block),) = decoder_blocks(model)
    if spec is not None:
        _pack_linears(block, spec, device, layout, equal_steps=equal_steps)
    blocks = next(parent for parent in model.modules() if isinstance(parent, nn.ModuleList) and block in list(parent))
    for index in track(range(1, shape.layers), "making blocks"):
        twin = copy.deepcopy(block)
        for module in twin.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index  # type: ignore[assignment]
        blocks.append(twin)
    config.num_hidden_layers = model.config.num_hidden_layers = shape.layers
    share_products(model)
    return model


def _pack_linears(block: nn.Module, spec: Any, device: torch.device, layout: Layout, *, equal_steps: bool) -> None:
    linears = [(name, module) for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    for name, module in linears:
        shape = LinearShape(name, *linear_shape(module))
        packed = random_linear(spec, shape, device, module.weight.dtype, layout, equal_steps=equal_steps)
        packed.bias = module.bias
        block.set_submodule(name, packed)


def _pack_head(model: Any, spec: Any, device: torch.device, layout: Layout) -> None:
    """As quantizing does it: a tied head gets a weight of its own, and steps are equal."""
    head = output_head(model)
    assert head is not None  # shapes are of families that have one
    name, module = head
    untie_head(model)
    shape = LinearShape(name, *linear_shape(module))
    model.set_submodule(name, random_linear(spec, shape, device, model.dtype, layout, equal_steps=True))


@torch.no_grad()
def _check_linears(model: Any, bench: DecodeBench) -> None:
    dtype = compute_dtype(bench.device)
    _, block = decoder_blocks(model)[0]
    for name, module in (*block.named_modules(), ("head", model.get_output_embeddings())):
        if isinstance(module, QuantizedLinear):
            x = torch.randn(1, module.in_features, device=bench.device, dtype=dtype)
            bias, y = module.bias, module(x)
            error = relative_error(module, x, y if bias is None else y - bias)
            check_result(f"{bench.method}, {name}", error, TOLERANCE[dtype])


def weight_bytes(model: Any) -> int:
    """Bytes of parameters that one token reads: all but embeddings that are only looked up."""
    output = model.get_output_embeddings()
    tied = output.weight.data_ptr() if output is not None else None
    lookups = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.weight.data_ptr() != tied
    }
    return sum(p.numel() * p.dtype.itemsize for p in model.parameters() if id(p) not in lookups)


def _time(bench: DecodeBench, method: str, model: Any, batch: int) -> DecodeResult:
    device = bench.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    ids = torch.randint(10, model.config.vocab_size, (batch, bench.prompt), device=device)
    capacity = bench.prompt + bench.new + 1
    runner = runner_for(model, device)
    start(model, ids, capacity, runner=runner)  # loads kernels and libraries
    if runner.model is not model:
        check_result(f"{method}, fused decoder blocks", runner_error(model, ids, runner), _TOKEN_TOLERANCE)
    expected = _eager_tokens(model, ids, capacity, runner, min(_CHECKED_STEPS, bench.new))
    session, first = _first_token(model, ids, capacity, runner)
    own_first = _first_token(model, ids, capacity, Runner(model))[1] if device.type == "cuda" else first
    advance = captured_step(session)
    spans = []
    # The thread behind a bar would keep a GPU waiting for its next launch.
    steps = range(bench.new) if device.type == "cuda" else track(range(bench.new), f"{method}: tokens")
    for _ in steps:
        began = _now(device)
        advance()
        spans.append(_now(device) - began)
    _check_tokens(session.tokens[:, bench.prompt : bench.prompt + expected.shape[1]], expected, method)
    moved, median = weight_bytes(model), float(np.median(spans))
    peak = peak_bandwidth(device)
    check_peak(f"{bench.model}, {method}", moved / median, peak)
    return DecodeResult(
        model=bench.model,
        method=method,
        batch=batch,
        prompt=bench.prompt,
        new=bench.new,
        first_token_ms=first * 1e3,
        own_code_first_token_ms=own_first * 1e3,
        median_ms=median * 1e3,
        p99_ms=float(np.percentile(spans, 99)) * 1e3,
        tokens_per_second=batch / median,
        peak_memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        weight_bytes=moved,
        weight_gigabytes_per_second=moved / median / 1e9,
        peak_percent=None if peak is None else 100 * moved / median / peak,
    )


def _first_token(model: Any, ids: Tensor, capacity: int, runner: Runner) -> tuple[Session, float]:
    """A session, and the median seconds until its first token: on a GPU the host takes part of them, and varies."""
    spans = []
    for _ in range(_FIRST_TOKENS if ids.is_cuda else 1):
        began = _now(ids.device)
        session = start(model, ids, capacity, runner=runner)
        spans.append(_now(ids.device) - began)
    return session, float(np.median(spans))


def runner_error(model: Any, ids: Tensor, runner: Runner) -> float:
    """How far the logits behind prompts and one equal token are from those of the model's own code, as a share."""
    plain, other = (start(model, ids, ids.shape[1] + 1, runner=each) for each in (Runner(model), runner))
    other.token.copy_(plain.token)  # each chose its own, and random weights make near ties
    expected = next_logits(plain).double()
    return float((next_logits(other).double() - expected).norm() / expected.norm())


def _eager_tokens(model: Any, ids: Tensor, capacity: int, runner: Runner, steps: int) -> Tensor:
    session = start(model, ids, capacity, runner=runner)
    for _ in track(range(steps), "checking tokens"):
        step(session)
    count = ids.shape[1]
    return session.tokens[:, count : count + steps + 1].clone()


def _check_tokens(got: Tensor, expected: Tensor, method: str) -> None:
    """Raise BenchError where a graph's tokens [B, steps] are not those of the same calls without it.

    Of several sequences a few may differ: cuBLAS chooses its algorithms anew while a graph is captured, and random
    weights make near ties.
    """
    differing = int((got != expected).any(dim=1).sum())
    if differing > _DIFFERING_SHARE * len(got):
        raise BenchError(f"{method}: the captured graph's tokens differ in {differing} of {len(got)} sequences")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def known_models() -> list[str]:
    """Names that stand for a shape."""
    return sorted(MODELS)
