"""``quantkit bench prefill``: one context pass of a whole model, real or only its shape, over batches and lengths.

On a GPU the pass is one CUDA graph and its time that of a replay; memory is that of the pass run eagerly. Every kind of
packed Linear is compared with exact integer arithmetic before anything is timed.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantkit.bench.attention import check_int8_attention, head_shape, install_int8_attention
from quantkit.bench.decode import shaped_model
from quantkit.bench.flatten_layers import (
    INT8_ATTENTION,
    METHODS,
    check_flatten_linear,
    check_fused_pair,
    flatten_spec,
    random_flatten_linear,
)
from quantkit.bench.kernels import TOLERANCE, compute_dtype, relative_error
from quantkit.bench.memory import LinearBytes, check_fits, model_bytes
from quantkit.bench.shapes import ModelShape, model_shape
from quantkit.bench.timing import check_result, device_peaks
from quantkit.errors import BenchError
from quantkit.formats.flatten import FlattenSpec
from quantkit.formats.table import stored_bytes
from quantkit.models.families import decoder_blocks, linear_shape
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.ops.flatten.launch import REQUANTIZED_DTYPES
from quantkit.runtime.batch_chunks import chunk_batches
from quantkit.runtime.causal_mask import plain_causal
from quantkit.runtime.fused_ffn import fuse_chains, fused_pairs

FP16 = "fp16"
_SECONDS, _LEAST, _MOST = 0.5, 2, 50  # of timed passes
_CHECKED_TOKENS = (8, 2048)  # on a CPU; on a GPU, whose kernels have tiles of their own for many tokens
_FIRST_ID = 10
_HIDDEN_TENSORS, _FFN_TENSORS = 8, 4  # alive at once, at most, of so many values per token


@dataclass(frozen=True)
class PrefillResult:
    """One model, method, batch and length.

    ms, p90_ms: median and 90th percentile of ``repeats`` passes, None where the pass did not fit into memory.
    tera_ops: 2 x multiply-adds of the model as it was before flattening, per second; peak_percent: of the GPU's INT8
    (fp16: fp16) rate. int4_share: of the block Linears. weight_bytes: all parameters.
    """

    model: str
    method: str
    batch: int
    length: int
    ms: float | None
    p90_ms: float | None
    repeats: int
    tokens_per_second: float | None
    tera_ops: float | None
    peak_percent: float | None
    peak_memory_bytes: int | None
    weight_bytes: int
    int4_share: float


@dataclass(frozen=True)
class PrefillBench:
    """model: a shape's name or a folder. methods: of a shape; empty for a folder, which is run as it is.

    timed: False measures memory alone, with one pass each. layers: blocks of a shape, None for all.
    """

    model: str
    methods: Sequence[str]
    batches: Sequence[int]
    lengths: Sequence[int]
    device: torch.device
    timed: bool = True
    layers: int | None = None


def run_prefill(bench: PrefillBench) -> Iterator[PrefillResult]:
    """Every method at every batch and length, largest last.

    Raises BenchError for an unknown method, a method with a folder, a wrong result, or a rate above the GPU's.
    """
    if min(*bench.batches, *bench.lengths) < 1:
        raise BenchError("`batches` and `lengths` must be at least 1")
    if Path(bench.model).is_dir():
        if bench.methods:
            raise BenchError(f"`methods`: only with a shape's name; {bench.model} is a folder and is run as it is")
        yield from _run_model(bench, "as stored", _load_folder(bench))
        return
    shape = model_shape(bench.model)
    if bench.layers is not None:
        shape = replace(shape, layers=bench.layers)
    for method in bench.methods:
        if method not in METHODS:
            raise BenchError(f"method {method}: unknown; choose {', '.join(METHODS)}")
    if not bench.methods:
        raise BenchError(f"`methods`: needed with the shape {bench.model}; for example flatten-o1,fp16")
    if bench.device.type == "cpu":  # where running out of memory ends the process
        _check_memory(bench, shape)
    for method in bench.methods:
        try:
            model = prefill_model(bench.model, shape, method, bench.device)
        except torch.cuda.OutOfMemoryError:
            _release(bench.device)
            yield from (
                _missing(bench, method, batch, length, 0, 0.0) for batch in bench.batches for length in bench.lengths
            )
            continue
        yield from _run_model(bench, method, model)
        del model
        _release(bench.device)


def _check_memory(bench: PrefillBench, shape: ModelShape) -> None:
    dtype = compute_dtype(bench.device)
    tokens = max(bench.batches) * max(bench.lengths)
    activations = tokens * (_HIDDEN_TENSORS * shape.hidden + _FFN_TENSORS * shape.ffn) * dtype.itemsize

    def linear_bytes(method: str) -> LinearBytes | None:
        if method == FP16:
            return None
        return lambda index, *size: stored_bytes(flatten_spec(bench.model, method, index, size[1]), size)

    for method in bench.methods:
        weights = model_bytes(shape, dtype, linear_bytes(method))
        check_fits(f"{bench.model}, {method}, {tokens} tokens", weights + activations, bench.device)


def _load_folder(bench: PrefillBench) -> Any:
    from quantkit.models.loading import load_model

    model, _ = load_model(bench.model, dtype=compute_dtype(bench.device), device=bench.device)
    return model.eval()


def prefill_model(name: str, shape: ModelShape, method: str, device: torch.device) -> Any:
    """A model of the shape with random weights, the Linears of its blocks packed as the method says (fp16: not).

    No more than one block is in floating point at a time.
    """
    if method == FP16:
        return shaped_model(shape, device)
    model = shaped_model(replace(shape, layers=1), device)
    ((_, template),) = decoder_blocks(model)
    blocks = next(
        parent for parent in model.modules() if isinstance(parent, nn.ModuleList) and template in list(parent)
    )
    del blocks[0]
    linears = [name for name, module in template.named_modules() if isinstance(module, nn.Linear)]
    for layer in range(shape.layers):
        block = copy.deepcopy(template, {id(model.config): model.config})  # one config says how all attend
        for index, linear_name in enumerate(linears, start=layer * len(linears)):
            module = block.get_submodule(linear_name)
            assert isinstance(module, nn.Linear)
            spec = flatten_spec(name, method, index, module.in_features)
            packed = random_flatten_linear(spec, linear_shape(module), module.weight)
            packed.bias = module.bias
            block.set_submodule(linear_name, packed)
        for module in block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = layer  # type: ignore[assignment]
        blocks.append(block)
    model.config.num_hidden_layers = shape.layers
    fuse_chains(model)
    chunk_batches(model)
    if method == INT8_ATTENTION:
        install_int8_attention(model)
    return model


def _run_model(bench: PrefillBench, method: str, model: Any) -> Iterator[PrefillResult]:
    weight = sum(p.numel() * p.dtype.itemsize for p in model.parameters())
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    int4 = [m for m in linears if isinstance(m.spec, FlattenSpec) and m.spec.weight_bits == 4]
    share = len(int4) / len(linears) if linears else 0.0
    check_linears(model, method)
    check_pairs(model, method)
    if method == INT8_ATTENTION:
        check_int8_attention(method, head_shape(model), next(model.parameters()))
    for batch, length in sorted((b, s) for b in bench.batches for s in bench.lengths):
        _release(bench.device)
        try:
            yield _measure(bench, method, model, (batch, length), (weight, share))
        except torch.cuda.OutOfMemoryError:
            yield _missing(bench, method, batch, length, weight, share)


def _missing(bench: PrefillBench, method: str, batch: int, length: int, weight: int, share: float) -> PrefillResult:
    return PrefillResult(bench.model, method, batch, length, None, None, 0, None, None, None, None, weight, share)


@torch.no_grad()
def check_linears(model: Any, what: str) -> None:
    """Compare every kind of packed Linear once: flatten bit for bit, other formats by the relative error.

    Raises BenchError naming the layer.
    """
    seen, few = set(), min(_CHECKED_TOKENS)
    for name, module in model.named_modules():
        if not isinstance(module, QuantizedLinear) or (module.spec, module.shape) in seen:
            continue
        seen.add((module.spec, module.shape))
        where = module.weight.device
        tokens = _CHECKED_TOKENS[where.type == "cuda"]
        x = torch.randn(tokens, module.in_features, dtype=module.compute_dtype, device=where)
        if isinstance(module.spec, FlattenSpec):
            check_flatten_linear(f"{what}, {name}", module, x)
            continue
        y = module(x)[:few] if module.bias is None else module(x)[:few] - module.bias
        check_result(f"{what}, {name}", relative_error(module, x[:few], y), TOLERANCE[x.dtype])


@torch.no_grad()
def check_pairs(model: Any, what: str) -> None:
    """Compare every kind of fused pair once with its layers one by one.

    Raises BenchError naming the module that calls it.
    """
    seen = set()
    for name, pair in fused_pairs(model).items():
        kind = pair.source.spec, pair.target.spec, pair.source.shape
        source = pair.source
        if kind in seen or not pair.is_ready() or source.compute_dtype not in REQUANTIZED_DTYPES:
            continue
        seen.add(kind)
        where = source.weight.device
        tokens = _CHECKED_TOKENS[where.type == "cuda"]
        x = torch.randn(tokens, source.in_features, dtype=source.compute_dtype, device=where)
        check_fused_pair(f"{what}, {name}", pair, x)


def multiply_adds(model: Any, batch: int, length: int) -> int:
    """Multiply-adds of one pass: block Linears at their unflattened width, causal attention, one row of logits."""
    config, tokens = model.config, batch * length
    linears = 0
    for _, block in decoder_blocks(model):
        for module in block.modules():
            if isinstance(module, nn.Linear | QuantizedLinear):
                linears += module.in_features * module.out_features
    attention = config.num_hidden_layers * config.hidden_size * length * (length + 1)  # QK^T and PV, half of each
    return tokens * linears + batch * attention + batch * config.vocab_size * config.hidden_size


@torch.no_grad()
def _measure(
    bench: PrefillBench, method: str, model: Any, size: tuple[int, int], known: tuple[int, float]
) -> PrefillResult:
    (batch, length), (weight, share), device = size, known, bench.device
    ids = torch.randint(_FIRST_ID, model.config.vocab_size, (batch, length), device=device)

    everything = torch.ones_like(ids)  # without it some models look for sequences packed into one

    def run() -> Tensor:
        with plain_causal(model):
            logits: Tensor = model(input_ids=ids, attention_mask=everything, use_cache=False, logits_to_keep=1).logits
        return logits

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    expected = run()
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    what = f"{bench.model}, {method}, batch {batch}, {length} tokens"
    if not torch.isfinite(expected).all():
        raise BenchError(f"{what}: the logits are not finite; not timed")
    if not bench.timed:
        return replace(_missing(bench, method, batch, length, weight, share), peak_memory_bytes=memory)
    spans = _graph_spans(run, expected, what) if device.type == "cuda" else _wall_spans(run)
    median, operations = float(np.median(spans)), 2 * multiply_adds(model, batch, length)
    peaks = device_peaks(device)
    rate = None if peaks is None else peaks.fp16 if method == FP16 else peaks.int8
    percent = None if rate is None else 100 * operations / median / rate
    if percent is not None and percent > 100:
        raise BenchError(f"{what}: {percent:.0f} % of this GPU's rate; not a valid measurement")
    return PrefillResult(
        model=bench.model,
        method=method,
        batch=batch,
        length=length,
        ms=median * 1e3,
        p90_ms=float(np.percentile(spans, 90)) * 1e3,
        repeats=len(spans),
        tokens_per_second=batch * length / median,
        tera_ops=operations / median / 1e12,
        peak_percent=percent,
        peak_memory_bytes=memory,
        weight_bytes=weight,
        int4_share=share,
    )


def _enough(spans: Sequence[float]) -> bool:
    return len(spans) >= _LEAST and (sum(spans) >= _SECONDS or len(spans) >= _MOST)


def _graph_spans(run: Any, expected: Tensor, what: str) -> list[float]:
    """Seconds of each replay of the pass as one graph, whose logits must be those of the eager pass."""
    _release(expected.device)  # the graph has memory of its own
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    spans: list[float] = []
    while not _enough(spans):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(start.elapsed_time(end) / 1e3)
    if not torch.equal(captured, expected):
        raise BenchError(f"{what}: the captured pass and the eager one differ; not timed")
    return spans


def _wall_spans(run: Any) -> list[float]:
    spans: list[float] = []
    while not _enough(spans):
        began = time.perf_counter()
        run()
        spans.append(time.perf_counter() - began)
    return spans


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
