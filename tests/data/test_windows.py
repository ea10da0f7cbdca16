"""Cutting token streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.data.windows import (
    check_seq_len,
    check_vocabulary,
    max_positions,
    sequential_windows,
    shuffled_windows,
    tokenize,
)
from quantkit.errors import DataError, ModelError
from quantkit.models.loading import load_model
from tests.tiny import POSITIONS, VOCABULARY

IDS = torch.arange(103)


def test_sequential_windows_run_from_the_start_and_drop_the_tail() -> None:
    windows = sequential_windows(IDS, 10, None, name="t")
    assert torch.equal(windows.flatten(), IDS[:100])
    assert sequential_windows(IDS, 10, 3, name="t").shape == (3, 10)
    assert sequential_windows(IDS, 10, 99, name="t").shape == (10, 10)


def test_shuffled_windows_are_distinct_seeded_grid_cells() -> None:
    windows = shuffled_windows(IDS, 10, 7, seed=3, name="t")
    assert torch.equal(windows, shuffled_windows(IDS, 10, 7, seed=3, name="t"))
    assert not torch.equal(windows, shuffled_windows(IDS, 10, 7, seed=4, name="t"))
    starts = windows[:, 0].tolist()
    assert len(set(starts)) == 7
    assert all(start % 10 == 0 for start in starts)
    assert torch.equal(windows, windows[:, :1] + torch.arange(10))


def test_short_text_is_refused_with_both_counts() -> None:
    with pytest.raises(DataError, match="103 tokens, but one window takes 104"):
        sequential_windows(IDS, 104, None, name="t")
    with pytest.raises(DataError, match="103 tokens, but one window takes 104"):
        shuffled_windows(IDS, 104, 1, seed=0, name="t")


def test_too_few_windows_are_refused_with_both_counts() -> None:
    with pytest.raises(DataError, match="103 tokens make 10 windows of 10, 11 were asked for; use 10 windows"):
        shuffled_windows(IDS, 10, 11, seed=0, name="t")


def test_tokenize_makes_one_stream(tiny_model: Callable[[str], Path]) -> None:
    _, tokenizer = load_model(str(tiny_model("llama")))
    ids = tokenize(tokenizer, "the line of text", name="t")
    assert ids.dtype == torch.int64
    assert tokenizer.decode(ids) == "the line of text"


def test_limits_of_the_model_are_checked(tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model("gpt2")))
    assert max_positions(model) == POSITIONS
    check_seq_len(POSITIONS, model)
    with pytest.raises(DataError, match=f"the model has {POSITIONS} positions"):
        check_seq_len(POSITIONS + 1, model)
    check_vocabulary(torch.tensor([VOCABULARY - 1]), model, name="t")
    with pytest.raises(ModelError, match="wrong tokenizer"):
        check_vocabulary(torch.tensor([VOCABULARY]), model, name="t")


def test_alibi_has_no_limit(tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model("bloom")))
    assert max_positions(model) is None
    check_seq_len(10**6, model)
