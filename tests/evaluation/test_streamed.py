"""A model that is read block by block gives the figures of the model in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantkit.data.corpora import Corpus
from quantkit.evaluation.divergence import divergence
from quantkit.evaluation.perplexity import RECIPES, perplexity
from quantkit.models.loading import load_model, open_evaluated
from tests.pipeline import quantize_tiny
from tests.tiny import sample_text

# A window's logits from experts one by one instead of transformers' grouped product: another order of sums in fp32.
EXPERTS_RTOL = 1e-5
BF16_RTOL = 0.02  # hidden states rounded to 8 bits twice, of a random model whose losses are all near log(320)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus("sample", (sample_text(words=300),))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gpt2"])
def test_perplexity_of_a_stream_is_that_of_the_model(
    family: str, recipe: str, tiny_model: Callable[[str], Path], corpus: Corpus
) -> None:
    folder = str(tiny_model(family))
    whole, streamed = (
        perplexity(*opened, corpus, seq_len=50, max_windows=5, recipe=recipe)
        for opened in (load_model(folder), open_evaluated(folder, device="cpu"))
    )
    assert replace(streamed, seconds=whole.seconds) == whole


@pytest.mark.parametrize("recipe", ["bcq-w4-g128", "nuqmm-q4-g128"])
@pytest.mark.parametrize("family", ["llama", "opt", "qwen3_moe"])
def test_a_checkpoint_is_streamed_too(
    family: str, recipe: str, tiny_model: Callable[[str], Path], corpus: Corpus, tmp_path: Path
) -> None:
    quantize_tiny(tiny_model(family), tmp_path / "q", recipe)
    stream, tokenizer = open_evaluated(str(tmp_path / "q"), device="cpu")
    assert all(parameter.is_meta for parameter in stream.model.parameters())
    whole = perplexity(*load_model(str(tmp_path / "q")), corpus, seq_len=64, max_windows=3)
    for _ in range(2):
        streamed = perplexity(stream, tokenizer, corpus, seq_len=64, max_windows=3)
        assert replace(streamed, seconds=whole.seconds) == whole
        assert all(parameter.is_meta for parameter in stream.model.parameters())


def test_divergence_of_two_streams_is_that_of_the_models(
    tiny_model: Callable[[str], Path], corpus: Corpus, tmp_path: Path
) -> None:
    quantize_tiny(tiny_model("llama"), tmp_path / "q", "bcq-w2-g64")
    folders = [str(tiny_model("llama")), str(tmp_path / "q")]
    (reference, tokenizer), (model, _) = map(load_model, folders)
    (first, _), (second, _) = (open_evaluated(folder, device="cpu") for folder in folders)
    whole = divergence(reference, model, tokenizer, corpus, seq_len=50, max_windows=4)
    streamed = divergence(first, second, tokenizer, corpus, seq_len=50, max_windows=4)
    assert replace(streamed, seconds=whole.seconds) == whole
    assert whole.mean_kl > 0


def test_fused_experts_are_streamed_one_by_one(tiny_model: Callable[[str], Path], corpus: Corpus) -> None:
    folder = str(tiny_model("mixtral"))
    whole, streamed = (
        perplexity(*opened, corpus, seq_len=64, max_windows=3)
        for opened in (load_model(folder), open_evaluated(folder, device="cpu"))
    )
    assert streamed.perplexity == pytest.approx(whole.perplexity, rel=EXPERTS_RTOL)


def test_blocks_that_read_the_text_are_put_into_memory_and_a_line_says_so(
    tiny_model: Callable[[str], Path], corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny_model("gemma3n"))
    whole, streamed = (
        perplexity(*opened, corpus, seq_len=64, max_windows=2)
        for opened in (load_model(folder), open_evaluated(folder, device="cpu"))
    )
    assert replace(streamed, seconds=whole.seconds) == whole
    assert "all of it is put into memory" in capsys.readouterr().err


def test_hidden_states_in_bf16_change_little(tiny_model: Callable[[str], Path], corpus: Corpus) -> None:
    folder = str(tiny_model("llama"))
    full, half = (
        perplexity(*open_evaluated(folder, device="cpu"), corpus, seq_len=64, max_windows=3, activations=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert half.perplexity != full.perplexity
    assert half.perplexity == pytest.approx(full.perplexity, rel=BF16_RTOL)
