"""Perplexity by the three recipes that published figures use; field figures are only comparable within one recipe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.data.corpora import Corpus, text_digest
from quantkit.data.windows import check_seq_len, check_vocabulary, max_positions, sequential_windows, tokenize
from quantkit.errors import DataError, StatsError
from quantkit.models.logits import window_logits
from quantkit.models.stream import structure

_ROWS_AT_ONCE = 256  # log-softmax rows in fp32 at a time: 50 MB at a vocabulary of 50,000


@dataclass(frozen=True)
class Window:
    """One forward pass over ids[begin:end]: the last ``scored`` tokens are targets, their mean counts ``weight``."""

    begin: int
    end: int
    scored: int
    weight: int


@dataclass(frozen=True)
class PerplexityRecipe:
    """How a text becomes a perplexity.

    seq_len: default window. cut: (tokens, seq_len) -> windows. raw: reads the text as the file was, not the
    row join. bos_per_window: overwrite token 0 of every window by BOS where the tokenizer adds BOS.
    """

    seq_len: int
    cut: Callable[[int, int], list[Window]]
    raw: bool = False
    bos_per_window: bool = False


@dataclass(frozen=True)
class PerplexityResult:
    """A perplexity and everything needed to reproduce it.

    stderr: standard error of the perplexity, from the spread of the scored tokens' NLL (as llama.cpp states it).
    tokens: in the windows read; scored_tokens: of these, predicted and averaged over.
    bos: "stream" (once, at the start), "window" (at the start of every window) or "none".
    """

    perplexity: float
    stderr: float
    windows: int
    tokens: int
    scored_tokens: int
    text: str
    text_sha256: str
    bos: str
    recipe: str
    seq_len: int
    tokenizer: str
    seconds: float


def _every_target(tokens: int, seq_len: int) -> list[Window]:
    """gptq: non-overlapping windows, tail dropped, all targets inside a window; mean of equal windows."""
    starts = range(0, tokens - seq_len + 1, seq_len)
    return [Window(start, start + seq_len, scored=seq_len - 1, weight=seq_len) for start in starts]


def _second_half(tokens: int, seq_len: int) -> list[Window]:
    """llama.cpp: non-overlapping windows, tail dropped; only targets with half a window of context are scored."""
    return [replace(w, scored=seq_len - 1 - seq_len // 2, weight=1) for w in _every_target(tokens, seq_len)]


def _strided(tokens: int, seq_len: int) -> list[Window]:
    """Sliding windows that advance by half a window; the tail counts, the first token of the text has no context."""
    stride = seq_len // 2
    windows = []
    for start in range(0, tokens, stride):
        begin, end = max(start + stride - seq_len, 0), min(start + stride, tokens)
        fresh = end - start
        windows.append(Window(begin, end, scored=min(fresh, end - begin - 1), weight=fresh))
    return windows


RECIPES: dict[str, PerplexityRecipe] = {
    "gptq": PerplexityRecipe(2048, _every_target),
    "llamacpp": PerplexityRecipe(512, _second_half, raw=True, bos_per_window=True),
    "strided": PerplexityRecipe(1024, _strided),
}


def perplexity(
    model: Any,
    tokenizer: Any,
    corpus: Corpus,
    *,
    seq_len: int | None = None,
    max_windows: int | None = None,
    recipe: str = "gptq",
    activations: torch.dtype = torch.float32,
) -> PerplexityResult:
    """Perplexity of the model on the corpus, on the model's device: fp32 log-softmax, NLL summed in fp64.

    model: in memory, or a ModelStream. activations: what a stream's hidden states are stored in.
    seq_len: tokens per window; None is the recipe's own, or the model's limit where that is lower.
    max_windows: read only the first ones. recipe: a key of RECIPES.
    Raises DataError for an unknown recipe, a window that the model cannot take or that the text does not fill,
    ModelError for a foreign tokenizer (all before the first pass), StatsError if the model puts out NaN.
    """
    check_options(recipe, seq_len=seq_len, max_windows=max_windows)
    rule = RECIPES[recipe]
    shape = structure(model)
    seq_len = seq_len or min(rule.seq_len, max_positions(shape) or rule.seq_len)
    check_seq_len(seq_len, shape)
    text = corpus.raw if rule.raw else corpus.text
    ids = tokenize(tokenizer, text, name=corpus.name)
    check_vocabulary(ids, shape, name=corpus.name)
    sequential_windows(ids, seq_len, 1, name=corpus.name)
    windows = rule.cut(ids.numel(), seq_len)[:max_windows]
    bos = int(ids[0]) if int(ids[0]) == tokenizer.bos_token_id else None
    started = time.perf_counter()
    read = [ids[window.begin : window.end].clone() for window in windows]
    if rule.bos_per_window and bos is not None:
        for tokens in read:
            tokens[0] = bos
    found = window_logits(model, read, "perplexity", activations=activations)
    losses = [_token_losses(*each) for each in zip(found, read, windows, strict=True)]
    value, error = _summarize(windows, losses)
    return PerplexityResult(
        perplexity=value,
        stderr=error,
        windows=len(windows),
        tokens=windows[-1].end,
        scored_tokens=sum(window.scored for window in windows),
        text=corpus.name,
        text_sha256=text_digest(text),
        bos="none" if bos is None else "window" if rule.bos_per_window else "stream",
        recipe=recipe,
        seq_len=seq_len,
        tokenizer=type(tokenizer).__name__,
        seconds=time.perf_counter() - started,
    )


def check_options(recipe: str, *, seq_len: int | None, max_windows: int | None) -> None:
    """Refuse impossible options before a model is loaded; raises DataError."""
    if recipe not in RECIPES:
        raise DataError(f"`recipe` {recipe}: known are {', '.join(RECIPES)}")
    if seq_len is not None and seq_len < 4:
        raise DataError(f"`seq_len` {seq_len}: a window needs at least 4 tokens")
    if max_windows is not None and max_windows < 1:
        raise DataError(f"`max_windows` {max_windows}: at least 1 is needed")


def _token_losses(logits: Tensor, tokens: Tensor, window: Window) -> Tensor:
    """NLL [scored] fp64 of the window's last tokens; logits: [end - begin, vocabulary], tokens: [end - begin]."""
    logits, targets = logits[-1 - window.scored : -1], tokens[-window.scored :].to(logits.device)
    losses = [
        torch.nn.functional.cross_entropy(rows.float(), target, reduction="none").double()
        for rows, target in zip(logits.split(_ROWS_AT_ONCE), targets.split(_ROWS_AT_ONCE), strict=True)
    ]
    loss = torch.cat(losses).cpu()
    if not bool(loss.isfinite().all()):
        raise StatsError(f"the model puts out NaN or Inf on tokens {window.begin} to {window.end} of the text")
    return loss


def _summarize(windows: list[Window], losses: list[Tensor]) -> tuple[float, float]:
    """(perplexity, its standard error): weighted mean of the window means; spread over all scored tokens."""
    weight = sum(window.weight for window in windows)
    mean = sum(window.weight * float(loss.mean()) for window, loss in zip(windows, losses, strict=True)) / weight
    pooled = torch.cat(losses)
    value = math.exp(mean) if mean < 700 else math.inf
    return value, value * float(pooled.std(correction=0)) / math.sqrt(pooled.numel() - 1)
