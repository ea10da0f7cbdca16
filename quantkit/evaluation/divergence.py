"""How far a model's predictions are from a reference model's: KL divergence per token, window by window."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.data.corpora import Corpus
from quantkit.data.windows import check_seq_len, check_vocabulary, max_positions, sequential_windows, tokenize
from quantkit.errors import ModelError, StatsError
from quantkit.models.logits import window_logits
from quantkit.models.stream import structure

_SEQ_LEN = 2048  # as perplexity's gptq recipe, so that both describe the same predictions
_ROWS_AT_ONCE = 64  # fp64 log-probabilities of both models: 50 MB at a vocabulary of 50,000

# Bins of the KL histogram: four per factor of ten; what lies outside goes to the first and last bin.
_DECADES, _BINS_PER_DECADE = (-6, 1), 4


@dataclass(frozen=True)
class TokenScores:
    """Of each predicted token, all [tokens] on the CPU.

    kl: fp64, KL(reference || model) in nats, >= 0. same_top1: bool, both rank the same token first.
    reference_loss, loss: fp64, -log probability that each gives to the token that follows.
    """

    kl: Tensor
    same_top1: Tensor
    reference_loss: Tensor
    loss: Tensor


@dataclass(frozen=True)
class Histogram:
    """Counts of tokens by KL; edges (one more than counts) in nats. Outliers are in the outermost bins."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class DivergenceResult:
    """KL(reference || model) over the predicted tokens of a text, in nats, with standard errors.

    same_top1: share of tokens, 0 to 1. perplexity, reference_perplexity: over the same tokens.
    The errors take tokens as independent: of a mean, deviation / sqrt(n); of a quantile, half the distance of the
    order statistics one binomial deviation to either side.
    """

    mean_kl: float
    mean_kl_stderr: float
    median_kl: float
    median_kl_stderr: float
    p90_kl: float
    p90_kl_stderr: float
    p99_kl: float
    p99_kl_stderr: float
    same_top1: float
    same_top1_stderr: float
    perplexity: float
    reference_perplexity: float
    windows: int
    tokens: int
    scored_tokens: int
    text: str
    text_sha256: str
    seq_len: int
    seconds: float
    histogram: Histogram


def divergence(
    reference: Any,
    model: Any,
    tokenizer: Any,
    corpus: Corpus,
    *,
    seq_len: int | None = None,
    max_windows: int | None = None,
    activations: torch.dtype = torch.float32,
) -> DivergenceResult:
    """Divergence of a model from a reference on non-overlapping windows of a text; each on its own device.

    Both are in memory, or ModelStreams, whose hidden states are stored in ``activations``.
    One window's logits of both models are held at a time. The tokens scored are those of perplexity's gptq recipe.
    seq_len: None is 2048, or the shorter of the two models' limits.
    Raises DataError for a window that a model cannot take or the text does not fill, ModelError for vocabularies
    that differ, StatsError if a model puts out NaN.
    """
    shapes = structure(reference), structure(model)
    limits = [limit for limit in map(max_positions, shapes) if limit]
    seq_len = seq_len or min([_SEQ_LEN, *limits])
    for shape in shapes:
        check_seq_len(seq_len, shape)
    check_same_vocabulary(*shapes)
    ids = tokenize(tokenizer, corpus.text, name=corpus.name)
    check_vocabulary(ids, shapes[0], name=corpus.name)
    windows = sequential_windows(ids, seq_len, max_windows, name=corpus.name)
    started = time.perf_counter()
    found = (
        window_logits(each, list(windows), what, activations=activations)
        for each, what in ((reference, "reference"), (model, "model"))
    )
    parts = [score_logits(p[:-1], q[:-1], ids[1:]) for p, q, ids in zip(*found, windows, strict=True)]
    scores = TokenScores(*(torch.cat(columns) for columns in zip(*map(_fields, parts), strict=True)))
    return DivergenceResult(
        **_summary(scores),
        windows=len(windows),
        tokens=windows.numel(),
        scored_tokens=scores.kl.numel(),
        text=corpus.name,
        text_sha256=corpus.sha256,
        seq_len=seq_len,
        seconds=time.perf_counter() - started,
        histogram=_histogram(scores.kl),
    )


def check_same_vocabulary(reference: Any, model: Any) -> None:
    """Raise ModelError unless both models put out logits over equally many tokens."""
    sizes = [each.config.get_text_config().vocab_size for each in (reference, model)]
    if sizes[0] != sizes[1]:
        raise ModelError(f"the reference has {sizes[0]} tokens, the model {sizes[1]}; they cannot be compared")


def check_same_tokens(reference_tokenizer: Any, tokenizer: Any, corpus: Corpus) -> None:
    """Raise ModelError where two tokenizers disagree on the text: the models would predict different tokens."""
    first, second = (tokenize(each, corpus.text, name=corpus.name) for each in (reference_tokenizer, tokenizer))
    if not torch.equal(first, second):
        raise ModelError(f"the tokenizers of reference and model disagree on {corpus.name}; they cannot be compared")


@torch.no_grad()
def score_logits(reference: Tensor, logits: Tensor, targets: Tensor) -> TokenScores:
    """Scores from the logits [tokens, vocabulary] of both models, in fp64; targets: [tokens] int64, what followed."""
    parts = []
    for first, second, target in zip(
        reference.split(_ROWS_AT_ONCE), logits.split(_ROWS_AT_ONCE), targets.split(_ROWS_AT_ONCE), strict=True
    ):
        p, q = first.double().log_softmax(dim=-1), second.to(first.device).double().log_softmax(dim=-1)
        kl = (p.exp() * (p - q)).sum(dim=-1)
        losses = [-part.gather(-1, target.to(part.device)[:, None])[:, 0] for part in (p, q)]
        if not bool(kl.isfinite().all()):
            raise StatsError("a model puts out NaN or Inf; its divergence is undefined")
        parts.append((kl.clamp_min(0), first.argmax(dim=-1) == second.to(first.device).argmax(dim=-1), *losses))
    return TokenScores(*(torch.cat(columns).cpu() for columns in zip(*parts, strict=True)))


def _fields(scores: TokenScores) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return scores.kl, scores.same_top1, scores.reference_loss, scores.loss


def _summary(scores: TokenScores) -> dict[str, float]:
    count = scores.kl.numel()
    ordered = scores.kl.sort().values
    same = float(scores.same_top1.double().mean())
    numbers = {
        "mean_kl": float(ordered.mean()),
        "mean_kl_stderr": float(ordered.std(correction=0)) / math.sqrt(max(count - 1, 1)),
        "same_top1": same,
        "same_top1_stderr": math.sqrt(same * (1 - same) / max(count - 1, 1)),
        "perplexity": math.exp(min(float(scores.loss.mean()), 700.0)),
        "reference_perplexity": math.exp(min(float(scores.reference_loss.mean()), 700.0)),
    }
    for name, share in (("median_kl", 0.5), ("p90_kl", 0.9), ("p99_kl", 0.99)):
        numbers[name], numbers[f"{name}_stderr"] = _quantile(ordered, share)
    return numbers


def _quantile(ordered: Tensor, share: float) -> tuple[float, float]:
    """(quantile, its standard error) of rising values."""
    last = ordered.numel() - 1
    place = share * last
    below, spread = math.floor(place), math.sqrt(ordered.numel() * share * (1 - share))
    value = torch.lerp(ordered[below], ordered[math.ceil(place)], place - below)
    low, high = max(math.floor(place - spread), 0), min(math.ceil(place + spread), last)
    return float(value), float(ordered[high] - ordered[low]) / 2


def _histogram(kl: Tensor) -> Histogram:
    first, last = _DECADES
    exponents = torch.linspace(first, last, (last - first) * _BINS_PER_DECADE + 1, dtype=torch.float64)
    bins = torch.bucketize(kl.clamp_min(1e-300).log10(), exponents[1:-1], right=True)
    counts = torch.bincount(bins, minlength=len(exponents) - 1)
    return Histogram(tuple((10.0**exponents).tolist()), tuple(counts.tolist()))
