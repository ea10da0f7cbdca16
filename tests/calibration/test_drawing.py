"""Windows to calibrate on: of a text, written, or both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from quantkit.calibration.drawing import WRITTEN, Written, digest, draw_windows
from quantkit.data.corpora import Corpus
from quantkit.data.windows import shuffled_windows, tokenize
from quantkit.errors import DataError
from quantkit.models.stream import ModelStream, in_memory_stream
from tests.tiny import VOCABULARY, build_model

SEQ_LEN, SEED = 16, 5


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Any) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model("llama"))


@pytest.fixture
def stream() -> ModelStream:
    return in_memory_stream(build_model("llama").eval())


def test_windows_of_both_kinds_are_mixed_and_their_texts_are_told(
    stream: ModelStream, corpus: Corpus, tokenizer: Any
) -> None:
    own = torch.randint(0, VOCABULARY, (8, SEQ_LEN))
    drawn = draw_windows(
        stream, tokenizer, corpus, windows=24, seq_len=SEQ_LEN, seed=SEED, written=Written(8, lambda: own)
    )
    assert [(text.name, text.windows) for text in drawn.texts] == [("sample.txt", 16), (WRITTEN, 8)]
    assert drawn.texts[1].sha256 == digest(own)
    of_text = shuffled_windows(tokenize(tokenizer, corpus.text, name="sample.txt"), SEQ_LEN, 16, seed=SEED, name="")
    assert sorted(drawn.windows.tolist()) == sorted([*of_text.tolist(), *own.tolist()])
    known = {tuple(row) for row in own.tolist()}
    by_model = [tuple(row) in known for row in drawn.windows.tolist()]
    assert any(by_model[:12])
    assert any(by_model[12:])


def test_text_alone_stays_in_the_order_that_the_seed_gives(stream: ModelStream, corpus: Corpus, tokenizer: Any) -> None:
    drawn = draw_windows(stream, tokenizer, corpus, windows=4, seq_len=SEQ_LEN, seed=SEED)
    ids: Tensor = tokenize(tokenizer, corpus.text, name="sample.txt")
    assert torch.equal(drawn.windows, shuffled_windows(ids, SEQ_LEN, 4, seed=SEED, name="sample.txt"))


def test_a_text_that_is_too_short_is_told_before_anything_is_written(
    stream: ModelStream, corpus: Corpus, tokenizer: Any
) -> None:
    def write() -> Tensor:
        raise AssertionError("written in vain")

    with pytest.raises(DataError, match="99999 were asked for"):
        draw_windows(stream, tokenizer, corpus, windows=100_000, seq_len=SEQ_LEN, seed=SEED, written=Written(1, write))
