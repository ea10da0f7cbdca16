"""Windows that a model writes: by its own predictions, the same for a seed, refused before they take long."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from quantkit.errors import DataError, GenerationError, ModelError
from quantkit.models.loading import open_stream
from quantkit.models.stream import in_memory_stream
from quantkit.runtime.writing import _PLACES, _copy_in, check_writes, write_windows, written_by
from tests.runtime.test_generation import windowed_model
from tests.tiny import build_model

SEQ_LEN = 16
STANDARD_ERRORS = 4  # of the mean surprise: more in one of 16,000 draws


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Any) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model("llama"))


@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gpt2", "qwen3_moe"])
def test_tokens_are_drawn_from_the_models_own_predictions(family: str, tokenizer: Any, device: torch.device) -> None:
    model = sharpened(family).to(device)
    windows = write_windows(in_memory_stream(model), tokenizer, 200, SEQ_LEN, seed=1)
    assert windows.shape == (200, SEQ_LEN)
    assert windows.dtype == torch.int64
    assert torch.equal(windows[:, 0], torch.full((200,), tokenizer.bos_token_id))
    with torch.no_grad():
        log_p = model.cpu()(windows).logits[:, :-1].float().log_softmax(dim=-1)
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


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_same_seed_writes_the_same_and_another_does_not(family: str, tokenizer: Any, device: torch.device) -> None:
    stream = in_memory_stream(build_model(family).eval().to(device))
    first, again, other = (write_windows(stream, tokenizer, 70, 2 * SEQ_LEN, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_copy_that_writes_leaves_the_model_as_it_was(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("llama").eval()
    model.lm_head.weight = model.model.embed_tokens.weight
    expected = write_windows(in_memory_stream(model), tokenizer, 5, SEQ_LEN, seed=1)
    monkeypatch.setitem(_PLACES, "cpu", replace(_PLACES["cpu"], copied=torch.float64))
    assert torch.equal(write_windows(in_memory_stream(model), tokenizer, 5, SEQ_LEN, seed=1), expected)
    assert model.dtype == torch.float32
    made = _copy_in(model, torch.float64)
    assert made.dtype == torch.float64
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert made.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_tokenizer_without_a_first_token_is_told(tokenizer: Any) -> None:
    bare = type("Bare", (), {"bos_token_id": None, "eos_token_id": None})()
    with pytest.raises(DataError, match="no token that begins or ends a text"):
        write_windows(in_memory_stream(build_model("llama").eval()), bare, 1, SEQ_LEN, seed=0)


def test_a_model_larger_than_memory_writes_nothing(
    tiny_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, _ = open_stream(str(tiny_model("llama")))
    monkeypatch.setattr("quantkit.runtime.writing.free_bytes", lambda device: 100_000)
    with pytest.raises(ModelError, match=r"writing windows takes 0\.0 GB, and 0\.0 GB are free on cpu"):
        write_windows(stream, tokenizer, 1, SEQ_LEN, seed=0)


def test_windows_beyond_a_sliding_one_are_refused_before_a_token_is_drawn(tokenizer: Any) -> None:
    stream = in_memory_stream(windowed_model())
    check_writes(stream, tokenizer, 1, 20)
    for call in (check_writes, partial(write_windows, seed=0)):
        with pytest.raises(GenerationError, match="the model's sliding window of 20"):
            call(stream, tokenizer, 1, 21)


def test_no_windows_are_no_writer(tokenizer: Any) -> None:
    stream = in_memory_stream(build_model("llama").eval())
    assert written_by(stream, tokenizer, 0, SEQ_LEN, seed=0) is None
    written = written_by(stream, tokenizer, 2, SEQ_LEN, seed=3)
    assert written is not None
    assert torch.equal(written.write(), write_windows(stream, tokenizer, written.count, SEQ_LEN, seed=3))
