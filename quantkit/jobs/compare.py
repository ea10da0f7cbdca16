"""Several models side by side: size, bits per weight, perplexity, divergence, tasks and time per token in one table."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import quantkit
from quantkit.checkpoint.config import bits_per_weight
from quantkit.checkpoint.read import read_checkpoint
from quantkit.checkpoint.write import folder_bytes
from quantkit.data.corpora import Corpus
from quantkit.errors import EvaluationError
from quantkit.evaluation.divergence import DivergenceResult, check_same_tokens, divergence
from quantkit.evaluation.tasks import TaskOptions, TaskScore, check_tasks, evaluate_tasks
from quantkit.formats.table import FORMATS, format_name
from quantkit.memory import free_bytes
from quantkit.models.loading import is_quantized, load_model, open_evaluated, resolve_model, stored_dtype
from quantkit.models.stream import structure
from quantkit.models.streaming import activations_dtype
from quantkit.progress import say
from quantkit.runtime.expanded_weights import expanded_on_cpu
from quantkit.runtime.generation import captured_step, start

_PROMPT_TOKENS, _NEW_TOKENS = 32, 16


@dataclass(frozen=True)
class Row:
    """One model. label: its format, such as ``bcq q3 g128``, ``mixed`` or ``float16``. bytes: of its weight files, None
    for a hub id. bits_per_weight: of its quantized layers, or of all.

    divergence: from the first model; perplexities are in it. milliseconds_per_token: median of greedy decoding, batch
    of one; None where the model does not fit into memory. scores: of the tasks, where some were asked for.
    """

    model: str
    label: str
    bytes: int | None
    bits_per_weight: float
    divergence: DivergenceResult
    milliseconds_per_token: float | None
    scores: tuple[TaskScore, ...]


@dataclass(frozen=True)
class Comparison:
    """rows: in the order given, the first being the reference. quantkit, torch: versions. device: where it was
    measured; machine: which GPU or processor that is."""

    rows: tuple[Row, ...]
    quantkit: str
    torch: str
    device: str
    machine: str

    def to_json(self) -> dict[str, Any]:
        """All of it as a JSON document that ``quantkit report`` reads."""
        return {"kind": "comparison", **asdict(self)}


def check_models(models: Sequence[str], tasks: TaskOptions | None) -> None:
    """Refuse, before anything is loaded, what cannot be compared.

    Raises EvaluationError for fewer than two models or one named twice, and as check_tasks and resolve_model do.
    """
    if len(set(models)) < max(len(models), 2):
        raise EvaluationError("compare takes two or more different models; the first is the reference")
    for model in models:
        resolve_model(model)
    if tasks is not None:
        check_tasks(tasks)


def compare(
    models: Sequence[str],
    corpus: Corpus,
    *,
    seq_len: int | None,
    max_windows: int | None,
    tasks: TaskOptions | None,
    device: str,
    activations: str = "fp32",
) -> Comparison:
    """Measure every model on one text; the first is the reference that the others' divergence is from.

    Divergence is taken block by block. Tasks and time per token need a model in memory as a whole, one at a time.
    activations: what hidden states are stored in between blocks. Raises QuantkitError as its parts do, and
    EvaluationError, before the tasks, for a model that does not fit.
    """
    check_models(models, tasks)
    reference, tokenizer = open_evaluated(models[0], device=device)
    rows = []
    for model in models:
        opened, own_tokenizer = (reference, tokenizer) if model == models[0] else open_evaluated(model, device=device)
        check_same_tokens(tokenizer, own_tokenizer, corpus)
        result = divergence(
            reference,
            opened,
            tokenizer,
            corpus,
            seq_len=seq_len,
            max_windows=max_windows,
            activations=activations_dtype(activations),
        )
        speed, scores = _run_whole(model, opened, tasks, device)
        rows.append(Row(model, *_size(model), result, speed, scores))
    machine = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    return Comparison(tuple(rows), quantkit.__version__, str(torch.__version__), device, machine)


def _run_whole(
    model: str, opened: Any, tasks: TaskOptions | None, device: str
) -> tuple[float | None, tuple[TaskScore, ...]]:
    """(milliseconds per token, or None where the model does not fit into memory, scores of the tasks)."""
    need, free = weight_bytes(structure(opened)), free_bytes(torch.device(device))
    if need > free:
        short = f"{model}: takes {need / 1e9:.1f} GB as a whole, {free / 1e9:.1f} GB are free on {device}"
        if tasks is not None:
            raise EvaluationError(f"{short}; tasks cannot be run")
        say(f"{short}; its time per token is left out")
        return None, ()
    loaded, tokenizer = load_model(model, device=device)
    scores = []
    if tasks is not None:
        with expanded_on_cpu(loaded):
            scores = evaluate_tasks(loaded, tokenizer, tasks)
    return milliseconds_per_token(loaded), tuple(scores)


def milliseconds_per_token(model: Any) -> float:
    """Median time of 16 greedy tokens, batch of one, after a prompt of 32 tokens; on a GPU from a captured graph."""
    device = next(model.parameters()).device
    prompt = torch.arange(_PROMPT_TOKENS, device=device)[None] % model.config.get_text_config().vocab_size
    session = start(model, prompt, _PROMPT_TOKENS + _NEW_TOKENS + 1)
    advance = captured_step(session)
    spans = []
    for _ in range(_NEW_TOKENS):
        _synchronize(device)
        began = time.perf_counter()
        advance()
        _synchronize(device)
        spans.append(time.perf_counter() - began)
    return 1e3 * statistics.median(spans)


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's weights, wherever they are."""
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _size(model: str) -> tuple[str, int | None, float]:
    """(format, bytes of the weight files or None, bits per weight)."""
    folder = Path(model)
    size = folder_bytes(folder) if folder.is_dir() else None
    if folder.is_dir() and is_quantized(model):
        config = read_checkpoint(folder)
        labels = {_label(layer.spec) for layer in config.layers.values()}
        return labels.pop() if len(labels) == 1 else "mixed", size, bits_per_weight(config)
    dtype = stored_dtype(model)
    return str(dtype).removeprefix("torch."), size, 8.0 * dtype.itemsize


def _label(spec: Any) -> str:
    name = format_name(spec)
    bits, group = FORMATS[name].weight_bits(spec), getattr(spec, "group_size", None)
    scales = " s8" if getattr(spec, "scale_bits", 16) == 8 else ""
    return f"{name} q{bits}" + ("" if group is None else " row" if group < 0 else f" g{group}") + scales


def comparison_table(document: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows of text) of a Comparison's JSON document."""
    tasks = [(score["task"], score["metric"]) for score in document["rows"][0]["scores"]]
    columns = ["model", "format", "MB", "bits/weight", "perplexity", "mean KL", "99% KL", "same top token", "ms/token"]
    rows = []
    for row in document["rows"]:
        d, scores = row["divergence"], {(s["task"], s["metric"]): s for s in row["scores"]}
        cells = [
            row["model"],
            row["label"],
            "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f}",
            f"{row['bits_per_weight']:.3f}",
            f"{d['perplexity']:.3f}",
            f"{d['mean_kl']:.5f} ± {d['mean_kl_stderr']:.5f}",
            f"{d['p99_kl']:.4f}",
            f"{d['same_top1']:.2%}",
            "" if row["milliseconds_per_token"] is None else f"{row['milliseconds_per_token']:.2f}",
        ]
        rows.append(cells + [_score(scores.get(key)) for key in tasks])
    return columns + [f"{task} {metric}" for task, metric in tasks], rows


def _score(score: dict[str, Any] | None) -> str:
    if score is None:
        return ""
    error = "" if score["stderr"] is None else f" ± {score['stderr']:.4f}"
    return f"{score['value']:.4f}{error}"
