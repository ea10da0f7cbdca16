"""Windows to calibrate on: of a text, written by the model, or both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from quantkit.calibration.drawing import WRITTEN, DrawnWindows, draw_windows, written_windows
from quantkit.data.corpora import Corpus
from quantkit.data.windows import shuffled_windows, tokenize
from quantkit.errors import DataError
from quantkit.models.stream import in_memory_stream
from tests.tiny import build_model

SEQ_LEN = 16
# Counts of 4000 tokens drawn by a probability p differ from 4000 p by 4 standard errors in one of 16,000 draws.
STANDARD_ERRORS = 4


def _drawn(family: str, corpus: Corpus | None, tokenizer: Any, **counts: int) -> DrawnWindows:
    stream = in_memory_stream(build_model(family).eval())
    return draw_windows(stream, tokenizer, corpus, seq_len=SEQ_LEN, seed=5, **counts)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Any) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model("llama"))


@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gpt2", "qwen3_moe"])
def test_tokens_are_drawn_from_the_models_own_predictions(family: str, tokenizer: Any) -> None:
    model = sharpened(family)
    windows = written_windows(in_memory_stream(model), tokenizer, 200, SEQ_LEN, seed=1)
    assert windows.shape == (200, SEQ_LEN)
    assert windows.dtype == torch.int64
    assert torch.equal(windows[:, 0], torch.full((200,), tokenizer.bos_token_id))
    with torch.no_grad():
        log_p = model(windows).logits[:, :-1].float().log_softmax(dim=-1)
    surprise = -log_p.gather(-1, windows[:, 1:, None])[..., 0]
    expected = -(log_p.exp() * log_p).sum(dim=-1)  # the mean of what is drawn, given what stands before
    spread = (log_p.exp() * (log_p + expected[..., None]).square()).sum(dim=-1)
    assert (surprise - expected).sum().abs() < STANDARD_ERRORS * spread.sum().sqrt()
    assert expected.mean() < 0.8 * torch.tensor(float(model.config.vocab_size)).log()  # uniform ones would differ


def sharpened(family: str) -> Any:
    """A tiny model whose predictions are far from uniform."""
    model = build_model(family).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30)
    return model


def test_the_same_seed_writes_the_same_and_another_does_not(tokenizer: Any) -> None:
    stream = in_memory_stream(build_model("llama").eval())
    first, again, other = (written_windows(stream, tokenizer, 3, SEQ_LEN, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_windows_of_both_kinds_are_mixed_and_their_texts_are_told(corpus: Corpus, tokenizer: Any) -> None:
    drawn = _drawn("llama", corpus, tokenizer, windows=24, written=8)
    texts = [(text.name, text.windows) for text in drawn.texts]
    assert texts == [("sample.txt", 16), (WRITTEN, 8)]
    of_text = shuffled_windows(tokenize(tokenizer, corpus.text, name="sample.txt"), SEQ_LEN, 16, seed=5, name="")
    known = {tuple(row) for row in of_text.tolist()}
    by_model = [tuple(row) not in known for row in drawn.windows.tolist()]
    assert by_model.count(True) == 8
    assert any(by_model[:12])
    assert any(by_model[12:])


def test_text_alone_stays_in_the_order_that_the_seed_gives(corpus: Corpus, tokenizer: Any) -> None:
    drawn = _drawn("llama", corpus, tokenizer, windows=4)
    ids: Tensor = tokenize(tokenizer, corpus.text, name="sample.txt")
    assert torch.equal(drawn.windows, shuffled_windows(ids, SEQ_LEN, 4, seed=5, name="sample.txt"))


def test_a_tokenizer_without_a_first_token_is_told(tokenizer: Any) -> None:
    bare = type("Bare", (), {"bos_token_id": None, "eos_token_id": None})()
    with pytest.raises(DataError, match="no token that begins or ends a text"):
        written_windows(in_memory_stream(build_model("llama").eval()), bare, 1, SEQ_LEN, seed=0)
