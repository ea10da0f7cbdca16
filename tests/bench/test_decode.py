from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from quantkit.bench import decode, shapes
from quantkit.bench.decode import DecodeBench, run_decode, shaped_model, weight_bytes
from quantkit.bench.shapes import ModelShape
from quantkit.errors import BenchError
from quantkit.formats.bcq import BcqSpec
from quantkit.models.loading import load_model
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.runtime.generation import generate

CPU = torch.device("cpu")
TINY = ModelShape("llama", layers=3, hidden=64, ffn=96, heads=4, kv_heads=2, vocabulary=100)


@pytest.mark.parametrize(("family", "linears"), [("llama", 7), ("opt", 6), ("bloom", 4)])
def test_shaped_model_has_its_layers_packed(family: str, linears: int) -> None:
    shape = replace(TINY, family=family, kv_heads=2 if family == "llama" else 4)
    model = shaped_model(shape, CPU, BcqSpec(2, 32, offset=True))
    packed = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(packed) == 3 * linears
    assert len({module.tensors["signs"].data_ptr() for module in packed}) == len(packed)
    assert weight_bytes(model) < sum(p.numel() * p.dtype.itemsize for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gpt2"])
def test_greedy_tokens_equal_those_of_transformers(tiny_model: Callable[[str], Path], family: str) -> None:
    model, _ = load_model(str(tiny_model(family)))
    model.eval()
    ids = torch.randint(10, 300, (1, 7))
    expected = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(model, ids, 9), expected[0])


def test_generation_stops_at_the_end_token(tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model("llama")))
    ids = torch.randint(10, 300, (1, 5))
    tokens = generate(model.eval(), ids, 8)
    stop = int(tokens[7])
    first = tokens[5:].tolist().index(stop)
    assert generate(model, ids, 8, stop=stop).tolist() == tokens[: 5 + first + 1].tolist()


def test_prompt_beyond_the_positions_is_refused(tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model("llama")))
    with pytest.raises(BenchError, match="exceed the model's 256 positions"):
        generate(model, torch.ones(1, 250, dtype=torch.long), 20)


def windowed_model() -> Any:
    config = MistralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=300, sliding_window=20,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def test_tokens_within_a_sliding_window_equal_those_of_transformers() -> None:
    model, ids = windowed_model(), torch.randint(10, 300, (1, 9))
    expected = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(model, ids, 10), expected[0])


def test_a_text_beyond_the_sliding_window_is_refused() -> None:
    with pytest.raises(BenchError, match="21 tokens of prompt and answer exceed the model's sliding window of 20"):
        generate(windowed_model(), torch.ones(1, 9, dtype=torch.long), 12)


def test_decode_bench_times_float_and_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.MODELS, "tiny", TINY)
    first, second = run_decode(DecodeBench("tiny", "bcq-w2-g32", 6, 5, CPU))
    assert (first.method, second.method) == ("float", "bcq-w2-g32")
    assert second.weight_bytes < first.weight_bytes
    assert 0 < second.median_ms <= second.p99_ms
    assert second.tokens_per_second == pytest.approx(1e3 / second.median_ms)


def test_bars_show_how_far_a_slow_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    def track(items: range, description: str) -> Iterator[int]:
        for item in items:
            seen.append((description, item))
            yield item

    monkeypatch.setattr(decode, "track", track)
    monkeypatch.setitem(shapes.MODELS, "tiny", TINY)
    list(run_decode(DecodeBench("tiny", "bcq-w2-g32", 6, 5, CPU)))
    made = {description: [item for name, item in seen if name == description] for description, _ in seen}
    assert made["making blocks"] == [1, 2] * 2
    assert made["checking tokens"] == list(range(4)) * 2
    assert made["float: tokens"] == made["bcq-w2-g32: tokens"] == list(range(5))


@pytest.mark.parametrize(
    ("model", "method", "message"),
    [
        ("opt-7b", "bcq-w2-g32", "did you mean"),
        ("opt-6.7b", None, "--method is needed"),
        (".", "bcq-w2-g32", "is a folder"),
    ],
    ids=["unknown", "no-method", "folder-with-method"],
)
def test_bad_requests_are_one_line(model: str, method: str | None, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        list(run_decode(DecodeBench(model, method, 4, 4, CPU)))


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["llama", "opt", "bloom"])
def test_graph_replays_give_the_eager_tokens(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    shape = replace(TINY, family=family, hidden=256, ffn=512, kv_heads=2 if family == "llama" else 4)
    monkeypatch.setitem(shapes.MODELS, "tiny", shape)
    results = list(run_decode(DecodeBench("tiny", "bcq-w4-g128", 12, 8, torch.device("cuda"))))
    assert [result.method for result in results] == ["float", "bcq-w4-g128"]
