"""KL divergence against sums written out, and its summary against known distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.data.corpora import Corpus
from quantkit.errors import DataError, ModelError, StatsError
from quantkit.evaluation.divergence import (
    TokenScores,
    check_same_tokens,
    check_same_vocabulary,
    divergence,
    score_logits,
)
from quantkit.evaluation.perplexity import perplexity
from quantkit.models.loading import load_model
from tests.pipeline import window_scores
from tests.tiny import sample_text

FP64_RTOL = 1e-12  # sums of a few hundred fp64 terms
FP32_LOSS_RTOL = 1e-6  # perplexity takes its losses in fp32


@pytest.fixture
def llama(tiny_model: Callable[[str], Path]) -> tuple[Any, Any]:
    return load_model(str(tiny_model("llama")))


@pytest.fixture
def disturbed(tiny_model: Callable[[str], Path]) -> Any:
    model, _ = load_model(str(tiny_model("llama")))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus("sample", (sample_text(words=400),))


def test_kl_of_two_known_distributions() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    scores = score_logits(torch.tensor([p]).log(), torch.tensor([q]).log() + 3.0, torch.tensor([0]))
    expected = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert scores.kl.item() == pytest.approx(expected, rel=FP32_LOSS_RTOL)  # the logits are fp32
    assert scores.same_top1.tolist() == [False]
    assert scores.reference_loss.item() == pytest.approx(math.log(2), rel=FP32_LOSS_RTOL)
    assert scores.loss.item() == pytest.approx(math.log(4), rel=FP32_LOSS_RTOL)


def test_more_rows_than_a_chunk_are_scored_one_by_one() -> None:
    first, second, targets = torch.randn(150, 11), torch.randn(150, 11), torch.randint(0, 11, (150,))
    whole = score_logits(first, second, targets)
    for row in (0, 63, 64, 149):
        p, q = first[row].double().softmax(0), second[row].double().softmax(0)
        assert whole.kl[row].item() == pytest.approx(float((p * (p / q).log()).sum()), rel=FP64_RTOL, abs=1e-14)
        assert whole.loss[row].item() == pytest.approx(-math.log(q[targets[row]]), rel=FP64_RTOL)


def test_a_model_does_not_diverge_from_itself(llama: tuple[Any, Any], corpus: Corpus) -> None:
    model, tokenizer = llama
    result = divergence(model, model, tokenizer, corpus, seq_len=64, max_windows=3)
    assert (result.mean_kl, result.median_kl, result.p90_kl, result.p99_kl) == (0, 0, 0, 0)
    assert result.same_top1 == 1
    assert result.perplexity == result.reference_perplexity
    assert sum(result.histogram.counts) == result.scored_tokens == 3 * 63


def test_summary_is_of_every_windows_tokens(llama: tuple[Any, Any], disturbed: Any, corpus: Corpus) -> None:
    model, tokenizer = llama
    result = divergence(model, disturbed, tokenizer, corpus, seq_len=50, max_windows=4)
    ids = torch.tensor(tokenizer(corpus.text)["input_ids"])[:200]
    parts = [window_scores(model, disturbed, window) for window in ids.split(50)]
    kl = torch.cat([part.kl for part in parts])
    assert len(kl) == 4 * 49
    assert result.mean_kl == pytest.approx(float(kl.mean()), rel=FP64_RTOL)
    assert result.mean_kl_stderr == pytest.approx(float(kl.std()) / math.sqrt(len(kl)), rel=FP64_RTOL)
    for value, share in ((result.median_kl, 0.5), (result.p90_kl, 0.9), (result.p99_kl, 0.99)):
        assert value == pytest.approx(float(kl.quantile(share)), rel=FP64_RTOL)
    same = torch.cat([part.same_top1 for part in parts]).double()
    assert result.same_top1 == float(same.mean()) < 1
    edges = torch.tensor(result.histogram.edges[1:-1], dtype=torch.float64)
    assert (
        list(result.histogram.counts) == torch.bincount(torch.bucketize(kl, edges, right=True), minlength=28).tolist()
    )


def test_perplexities_are_those_of_the_gptq_recipe(llama: tuple[Any, Any], disturbed: Any, corpus: Corpus) -> None:
    model, tokenizer = llama
    result = divergence(model, disturbed, tokenizer, corpus, seq_len=64, max_windows=2)
    for value, each in ((result.reference_perplexity, model), (result.perplexity, disturbed)):
        own = perplexity(each, tokenizer, corpus, seq_len=64, max_windows=2)
        assert value == pytest.approx(own.perplexity, rel=FP32_LOSS_RTOL)


def test_standard_errors_match_the_spread_over_repeated_samples() -> None:
    """Of 400 samples of 2000 exponential variables: within a quarter of the observed spread."""
    from quantkit.evaluation.divergence import _summary

    generator = torch.Generator().manual_seed(0)
    runs = []
    for _ in range(400):
        kl = torch.empty(2000, dtype=torch.float64).exponential_(generator=generator)
        top = torch.rand(2000, generator=generator) < 0.8
        runs.append(_summary(TokenScores(kl, top, kl, kl)))
    for name in ("mean_kl", "median_kl", "p90_kl", "p99_kl", "same_top1"):
        spread = float(torch.tensor([run[name] for run in runs]).std())
        stated = sum(run[f"{name}_stderr"] for run in runs) / len(runs)
        assert stated == pytest.approx(spread, rel=0.25), name


def test_unfit_input_is_refused(llama: tuple[Any, Any], corpus: Corpus, tiny_model: Callable[[str], Path]) -> None:
    model, tokenizer = llama
    other, other_tokenizer = load_model(str(tiny_model("opt")))
    with pytest.raises(DataError, match="256 positions"):
        divergence(model, model, tokenizer, corpus, seq_len=512)
    other.config.vocab_size += 1
    with pytest.raises(ModelError, match="320 tokens, the model 321"):
        check_same_vocabulary(model, other)
    check_same_tokens(tokenizer, other_tokenizer, corpus)
    with pytest.raises(ModelError, match="tokenizers of reference and model disagree"):
        check_same_tokens(tokenizer, lambda text, verbose: {"input_ids": [1, 2]}, corpus)
    with pytest.raises(StatsError, match="NaN or Inf"):
        score_logits(torch.zeros(1, 3), torch.full((1, 3), math.nan), torch.tensor([0]))
