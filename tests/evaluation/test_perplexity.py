"""The three recipes against naive loops written from their descriptions."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertTokenizerFast

from quantkit.data.corpora import Corpus, text_digest
from quantkit.errors import DataError, ModelError, StatsError
from quantkit.evaluation.perplexity import RECIPES, perplexity
from quantkit.models.loading import load_model
from tests.tiny import POSITIONS, sample_text

RTOL = 1e-6  # the naive loops take fp32 means, ours fp64

Loaded = tuple[Any, Any]


@pytest.fixture(params=["llama", "opt", "bloom", "gpt2"])
def loaded(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Loaded:
    return load_model(str(tiny_model(request.param)))


@pytest.fixture
def llama(tiny_model: Callable[[str], Path]) -> Loaded:
    return load_model(str(tiny_model("llama")))


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """Rows that are lines, as WikiText's are on the hub."""
    return Corpus("sample", ("", *(f"{line}\n" for line in sample_text(words=240).splitlines())))


def _loss(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean NLL where targets are not -100; both [1, L]."""
    logits = model(ids).logits.double()
    return nn.functional.cross_entropy(logits[0, :-1], targets[0, 1:], ignore_index=-100)


@torch.no_grad()
def _naive_gptq(model: nn.Module, ids: torch.Tensor, seq_len: int) -> float:
    count = ids.shape[1] // seq_len
    nlls = []
    for i in range(count):
        batch = ids[:, i * seq_len : (i + 1) * seq_len]
        nlls.append(_loss(model, batch, batch) * seq_len)
    return math.exp(float(sum(nlls)) / (count * seq_len))


@torch.no_grad()
def _naive_llamacpp(model: nn.Module, ids: torch.Tensor, seq_len: int, bos: int | None) -> float:
    total, scored, first = 0.0, 0, seq_len // 2
    for i in range(ids.shape[1] // seq_len):
        batch = ids[:, i * seq_len : (i + 1) * seq_len].clone()
        if bos is not None:
            batch[0, 0] = bos
        logprobs = model(batch).logits[0].double().log_softmax(-1)
        for position in range(first, seq_len - 1):
            total -= float(logprobs[position, batch[0, position + 1]])
            scored += 1
    return math.exp(total / scored)


@torch.no_grad()
def _naive_strided(model: nn.Module, ids: torch.Tensor, seq_len: int) -> float:
    stride, tokens, nlls, end = seq_len // 2, ids.shape[1], [], 0
    for start in range(0, tokens, stride):
        begin, end = max(start + stride - seq_len, 0), min(start + stride, tokens)
        fresh = end - start
        targets = ids[:, begin:end].clone()
        targets[:, :-fresh] = -100
        nlls.append(_loss(model, ids[:, begin:end], targets) * fresh)
    return math.exp(float(sum(nlls)) / end)


def _ids(tokenizer: Any, text: str) -> torch.Tensor:
    return torch.tensor([tokenizer(text)["input_ids"]])


@pytest.mark.parametrize("seq_len", [64, 33], ids=["even", "odd"])
def test_gptq_is_the_mean_over_non_overlapping_windows(loaded: Loaded, corpus: Corpus, seq_len: int) -> None:
    model, tokenizer = loaded
    result = perplexity(model, tokenizer, corpus, seq_len=seq_len)
    ids = _ids(tokenizer, corpus.text)
    assert result.perplexity == pytest.approx(_naive_gptq(model, ids, seq_len), rel=RTOL)
    assert result.windows == ids.shape[1] // seq_len
    assert result.tokens == result.windows * seq_len
    assert result.scored_tokens == result.windows * (seq_len - 1)
    assert result.text_sha256 == text_digest(corpus.text)


@pytest.mark.parametrize("seq_len", [64, 33], ids=["even", "odd"])
def test_llamacpp_scores_the_second_half_of_the_raw_text(loaded: Loaded, corpus: Corpus, seq_len: int) -> None:
    model, tokenizer = loaded
    result = perplexity(model, tokenizer, corpus, seq_len=seq_len, recipe="llamacpp")
    ids = _ids(tokenizer, corpus.raw)
    assert result.perplexity == pytest.approx(_naive_llamacpp(model, ids, seq_len, None), rel=RTOL)
    assert result.scored_tokens == result.windows * (seq_len - 1 - seq_len // 2)
    assert result.text_sha256 == text_digest(corpus.raw) != text_digest(corpus.text)
    assert result.bos == "none"


@pytest.mark.parametrize("seq_len", [64, 33], ids=["even", "odd"])
def test_strided_slides_by_half_a_window_and_keeps_the_tail(loaded: Loaded, corpus: Corpus, seq_len: int) -> None:
    model, tokenizer = loaded
    result = perplexity(model, tokenizer, corpus, seq_len=seq_len, recipe="strided")
    ids = _ids(tokenizer, corpus.text)
    assert result.perplexity == pytest.approx(_naive_strided(model, ids, seq_len), rel=RTOL)
    assert result.tokens == ids.shape[1]
    assert result.scored_tokens == ids.shape[1] - 1


def _with_bos(tokenizer: Any) -> Any:
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_bos_is_repeated_per_window_by_llamacpp_only(llama: Loaded, corpus: Corpus) -> None:
    model, tokenizer = llama[0], _with_bos(llama[1])
    streamed = perplexity(model, tokenizer, corpus, seq_len=64)
    repeated = perplexity(model, tokenizer, corpus, seq_len=64, recipe="llamacpp")
    ids = _ids(tokenizer, corpus.raw)
    assert int(ids[0, 0]) == tokenizer.bos_token_id
    assert (streamed.bos, repeated.bos) == ("stream", "window")
    assert repeated.perplexity == pytest.approx(_naive_llamacpp(model, ids, 64, tokenizer.bos_token_id), rel=RTOL)
    assert repeated.perplexity != pytest.approx(_naive_llamacpp(model, ids, 64, None), rel=RTOL)


def test_max_windows_reads_the_first_ones(llama: Loaded, corpus: Corpus) -> None:
    model, tokenizer = llama
    result = perplexity(model, tokenizer, corpus, seq_len=64, max_windows=2)
    assert (result.windows, result.tokens) == (2, 128)
    first = _ids(tokenizer, corpus.text)[:, :128]
    assert result.perplexity == pytest.approx(_naive_gptq(model, first, 64), rel=RTOL)


def test_stderr_is_the_spread_of_the_token_losses(llama: Loaded, corpus: Corpus) -> None:
    model, tokenizer = llama
    result = perplexity(model, tokenizer, corpus, seq_len=64, max_windows=1)
    ids = _ids(tokenizer, corpus.text)[:, :64]
    with torch.no_grad():
        losses = nn.functional.cross_entropy(model(ids).logits[0, :-1].double(), ids[0, 1:], reduction="none")
    expected = result.perplexity * math.sqrt(float(losses.var(correction=0)) / (len(losses) - 1))
    assert result.stderr == pytest.approx(expected, rel=1e-5)


def test_default_window_is_the_recipes_capped_by_the_model(llama: Loaded, corpus: Corpus) -> None:
    model, tokenizer = llama
    assert {name: rule.seq_len for name, rule in RECIPES.items()} == {"gptq": 2048, "llamacpp": 512, "strided": 1024}
    assert perplexity(model, tokenizer, corpus, max_windows=1).seq_len == POSITIONS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "gguf"}, "known are gptq, llamacpp, strided"),
        ({"seq_len": POSITIONS + 1}, f"the model has {POSITIONS} positions"),
        ({"seq_len": 1}, "at least 4 tokens"),
        ({"max_windows": 0}, "at least 1"),
    ],
    ids=["recipe", "positions", "tiny-window", "no-window"],
)
def test_impossible_options_are_refused(llama: Loaded, corpus: Corpus, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        perplexity(*llama, corpus, **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_short_text_is_refused_with_both_counts(llama: Loaded, recipe: str) -> None:
    with pytest.raises(DataError, match=r"text short: \d+ tokens, but one window takes 64"):
        perplexity(*llama, Corpus("short", ("a line of text",)), seq_len=64, recipe=recipe)


def test_foreign_tokenizer_is_refused(llama: Loaded, corpus: Corpus, tmp_path: Path) -> None:
    words = sorted(set(sample_text().replace(".", " .").split()))
    vocabulary = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", *(f"[unused{i}]" for i in range(400)), *words]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    foreign = BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"))
    with pytest.raises(ModelError, match="wrong tokenizer"):
        perplexity(llama[0], foreign, corpus, seq_len=64)


def test_model_that_puts_out_nan_is_refused(llama: Loaded, corpus: Corpus) -> None:
    with torch.no_grad():
        llama[0].model.norm.weight[0] = float("nan")
    with pytest.raises(StatsError, match="NaN or Inf on tokens 0 to 64"):
        perplexity(*llama, corpus, seq_len=64)
