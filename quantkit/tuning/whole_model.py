"""Tuning end to end: the quantized model's predictions are moved towards the original's, both in memory as a whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quantkit.memory import total_bytes
from quantkit.models.families import linear_weight
from quantkit.models.logits import log_probabilities
from quantkit.models.structure import embedding_matrices
from quantkit.tuning.install import tunable
from quantkit.tuning.optimize import FP32, HIDDEN_COPIES, LOGIT_COPIES, TuneReport, divergence, tune
from quantkit.tuning.settings import TuneSettings, for_whole_model
from quantkit.tuning.steps import Objective
from quantkit.tuning.target import Target

# Windows of a graph that is held at a time have so many tokens: the fewest on a CPU, so that logits stay below 2 GB for
# most models; on a GPU, which short kernels leave idle, the most that take no more than a share of its memory.
_TOKENS_AT_ONCE = (8192, 4096, 2048)
_GPU_SHARE = 0.6
# Of a device's memory, what the original's states of all windows may take. Where they take more, its blocks read the
# windows of every step, which is a third more work.
_STATES_SHARE = 0.3
# Values held per quantized weight: what it stands for, in the graph and its gradient; with codes also the latent, its
# gradient, two moments and the best so far. Per value of embeddings that are tuned: the last four, and two copies while
# the held-out loss is taken.
_FIXED_VALUES, _LATENT_VALUES, _EMBEDDING_VALUES = 2, 5, 6


def tune_model(original: Any, model: Any, windows: Tensor, settings: TuneSettings, *, dtype: torch.dtype) -> TuneReport:
    """Lower KL(original || model) per token over windows [n, seq_len] of token ids; the model is changed in place.

    original: in floating point; with ``codes``, in the basis of the model (rotations applied). Both compute in fp32, on
    one device. dtype: what is not quantized is stored in.
    """

    def weight(name: str) -> Tensor:
        return linear_weight(original.get_submodule(name)).detach()

    device = next(original.parameters()).device
    windows = windows.to(device)
    original.requires_grad_(False)
    matrices = embedding_matrices(model) if settings.embeddings else {}
    with tunable(model, weight if settings.codes else None, matrices) as tuned:
        model.to(device)
        quantized = sum(math.prod(part.shape) for part in tuned.parts.values())
        held = held_tokens(original, windows.numel(), device)
        tokens = tokens_of_graph(original, quantized, held, settings, device)
        at_once = max(1, tokens // windows.shape[1])
        with _short_products():
            target = Target(original, windows, at_once, held=held > 0)

            def loss(numbers: Tensor) -> Tensor:
                return divergence_loss(target.log_probabilities(numbers), model, windows[numbers])

            objective = Objective(loss, len(windows), at_once, dtype, device=device)
            parts, others = list(tuned.parts.values()), list(tuned.others.values())
            report = tune(parts, others, objective, for_whole_model(settings))
        model.to("cpu")
    return report


@contextmanager
def _short_products() -> Iterator[None]:
    """While entered, a GPU multiplies fp32 in TF32: its rounding is far below that of the codes."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def tokens_of_passes(windows: Tensor, settings: TuneSettings) -> int:
    """Tokens of the whole model's passes: of the calibration's windows [n, seq_len] and of those that are written."""
    return windows.numel() + settings.written * windows.shape[1]


def held_tokens(model: Any, tokens: int, device: torch.device) -> int:
    """Of so many tokens in all windows, those whose states of the original are held on a device: all or none."""
    states = FP32 * tokens * model.config.get_text_config().hidden_size
    return tokens if states <= _STATES_SHARE * total_bytes(device) else 0


def tokens_of_graph(model: Any, quantized: int, tokens: int, settings: TuneSettings, device: torch.device) -> int:
    """How many tokens are in a graph at a time on a device; the rest as tuning_bytes takes it."""
    if device.type != "cuda":
        return _TOKENS_AT_ONCE[-1]
    room = _GPU_SHARE * total_bytes(device)
    fits = (n for n in _TOKENS_AT_ONCE if tuning_bytes(model, quantized, tokens, settings, at_once=n) <= room)
    return next(fits, _TOKENS_AT_ONCE[-1])


def tuning_bytes(model: Any, quantized: int, tokens: int, settings: TuneSettings, *, at_once: int) -> int:
    """What tune_model holds at its peak, of a model (on any device) of which so many weights are quantized, with so
    many held tokens, of which ``at_once`` are in a graph at a time."""
    config = model.config.get_text_config()
    total = sum(parameter.numel() for parameter in model.parameters())
    values = 2 * total + quantized * (_FIXED_VALUES + (_LATENT_VALUES if settings.codes else 0))
    if settings.embeddings:
        values += _EMBEDDING_VALUES * sum(matrix.numel() for matrix in embedding_matrices(model).values())
    graph = HIDDEN_COPIES * config.hidden_size * config.num_hidden_layers + LOGIT_COPIES * config.vocab_size
    return FP32 * (values + at_once * graph + tokens * config.hidden_size)


def divergence_loss(wanted: Tensor, model: Any, tokens: Tensor) -> Tensor:
    """KL(original || model) in nats per token of windows [b, seq_len]; wanted: the original's log-probabilities."""
    return divergence(log_probabilities(model, tokens), wanted)
