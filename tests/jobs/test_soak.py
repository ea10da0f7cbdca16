"""Many jobs in one process: memory comes back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from quantkit.data.corpora import Corpus
from quantkit.evaluation.perplexity import perplexity
from quantkit.models.loading import load_model
from tests.pipeline import quantize_tiny

CYCLES = 20
WARM_UP = 3  # first cycles fill caches of libraries
GROWTH = 0.05  # of the resident set


@pytest.mark.slow
def test_twenty_cycles_do_not_grow(tiny_model: Callable[[str], Path], corpus: Corpus, tmp_path: Path) -> None:
    sizes = []
    for number in range(CYCLES):
        out = tmp_path / f"q{number}"
        quantize_tiny(tiny_model("llama"), out)
        model, tokenizer = load_model(str(out))
        perplexity(model, tokenizer, corpus, seq_len=64, max_windows=4)
        del model
        gc.collect()
        sizes.append(psutil.Process().memory_info().rss)
    assert max(sizes[WARM_UP:]) <= sizes[WARM_UP] * (1 + GROWTH), sizes
