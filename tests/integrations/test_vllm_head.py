"""A quantized head through the vLLM plugin: its rows on every rank, padded as vLLM pads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantkit.errors import CheckpointError
from quantkit.methods import head_spec
from tests.integrations import vllm_stub
from tests.integrations.vllm_layers import FP32_ATOL, FP32_RTOL, TOKENS, K, config_of, product_of, stored

VOCABULARY = 200  # padded to 256: the last rank of two has 72 of its 128 rows, of four 8 of 64
SPEC = head_spec(6)


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stub.install(monkeypatch)


def head(config: Any, rank: int = 0, ranks: int = 1, vocabulary: int = VOCABULARY) -> tuple[Any, Any]:
    layer = vllm_stub.ParallelLMHead(vocabulary, rank, ranks)
    method = config.get_quant_method(layer, "lm_head")
    padded = layer.rows * ranks
    method.create_weights(layer, K, [layer.rows], K, padded, params_dtype=torch.float32, weight_loader=None)
    return layer, method


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_together_give_the_logits_of_the_whole_head(ranks: int) -> None:
    linears = stored("lm_head", SPEC, (VOCABULARY, K))
    x = torch.randn(TOKENS, K)
    logits = []
    for rank in range(ranks):
        layer, method = head(config_of(linears), rank, ranks)
        vllm_stub.feed(layer, linears["lm_head"][1])
        method.process_weights_after_loading(layer)
        logits.append(method.apply(layer, x))
        assert logits[-1].shape == (TOKENS, layer.rows)
    whole = torch.cat(logits, -1)
    expected = product_of(*linears["lm_head"], x)
    torch.testing.assert_close(whole[:, :VOCABULARY], expected, rtol=FP32_RTOL, atol=FP32_ATOL)
    assert not whole[:, VOCABULARY:].any()


def test_made_up_weights_fill_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_stub.SETTINGS.load_config, "load_format", "dummy")
    layer, method = head(config_of(stored("lm_head", SPEC, (VOCABULARY, K))))
    vllm_stub.fill_as_dummy(layer)
    method.process_weights_after_loading(layer)
    assert method.apply(layer, torch.randn(TOKENS, K)).isfinite().all()


def test_a_head_of_another_size_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"lm_head: .*builds it as \(320, 128\), stored is \(200, 128\)"):
        head(config_of(stored("lm_head", SPEC, (VOCABULARY, K))), vocabulary=320)


def test_a_rank_without_rows_is_refused() -> None:
    with pytest.raises(CheckpointError, match="do not reach all GPUs"):
        head(config_of(stored("lm_head", SPEC, (40, K))), 3, 4, vocabulary=40)


def test_a_missing_tensor_of_the_head_is_named() -> None:
    linears = stored("lm_head", SPEC, (VOCABULARY, K))
    layer, method = head(config_of(linears))
    linears["lm_head"][1].pop("scales")
    vllm_stub.feed(layer, linears["lm_head"][1])
    with pytest.raises(CheckpointError, match=r"lm_head\.scales: missing"):
        method.process_weights_after_loading(layer)


def test_a_tied_config_is_refused() -> None:
    layer, method = head(config_of(stored("lm_head", SPEC, (VOCABULARY, K))))
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        method.tie_weights(layer, None)
