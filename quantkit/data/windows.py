"""Cutting a token stream into windows: in order for evaluation, seeded and without overlap for calibration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantkit.errors import DataError, ModelError


def tokenize(tokenizer: Any, text: str, *, name: str) -> Tensor:
    """The text as one stream of token ids [tokens] int64, from one tokenizer call.

    Special tokens are those that the tokenizer adds by itself, so at most once at either end of the stream.
    Raises DataError for a text without tokens.
    """
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
    if ids.numel() == 0:
        raise DataError(f"text {name}: it has no tokens")
    return ids


def check_vocabulary(ids: Tensor, model: Any, *, name: str) -> None:
    """Raise ModelError if the tokenizer makes ids that the model has no embedding for."""
    rows = model.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= rows:
        raise ModelError(
            f"text {name}: token id {int(ids.max())}, but the model has {rows} embeddings; wrong tokenizer?"
        )


def check_seq_len(seq_len: int, model: Any) -> None:
    """Raise DataError for a window longer than the model's positions, or too short to predict a token."""
    limit = max_positions(model)
    if seq_len < 2:
        raise DataError(f"`seq_len` {seq_len}: a window needs at least 2 tokens")
    if limit is not None and seq_len > limit:
        raise DataError(f"`seq_len` {seq_len}: the model has {limit} positions; use `seq_len` {limit} or less")


def max_positions(model: Any) -> int | None:
    """The longest input the model takes, or None where its positions have no bound (alibi)."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def sequential_windows(ids: Tensor, seq_len: int, max_windows: int | None, *, name: str) -> Tensor:
    """Non-overlapping windows [n, seq_len] from the start of the stream; the tail shorter than one is dropped.

    Raises DataError, with both counts, if the stream is shorter than one window.
    """
    total = _window_count(ids, seq_len, name)
    count = total if max_windows is None else min(total, max_windows)
    return ids[: count * seq_len].reshape(count, seq_len)


def shuffled_windows(ids: Tensor, seq_len: int, count: int, *, seed: int, name: str) -> Tensor:
    """``count`` distinct windows [count, seq_len] of the non-overlapping grid, in seeded random order.

    Raises DataError, with both counts, if the stream holds fewer.
    """
    total = _window_count(ids, seq_len, name)
    if count > total:
        raise DataError(
            f"text {name}: {ids.numel()} tokens make {total} windows of {seq_len}, {count} were asked for; "
            f"use {total} windows or fewer, or a longer text"
        )
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count]
    return ids[: total * seq_len].reshape(total, seq_len)[order]


def _window_count(ids: Tensor, seq_len: int, name: str) -> int:
    if ids.numel() < seq_len:
        raise DataError(f"text {name}: {ids.numel()} tokens, but one window takes {seq_len}; use a longer text")
    return ids.numel() // seq_len
