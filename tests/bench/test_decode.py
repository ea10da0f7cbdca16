from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from quantkit.bench import decode, shapes
from quantkit.bench.decode import DecodeBench, run_decode, runner_error, shaped_model, weight_bytes
from quantkit.bench.shapes import ModelShape
from quantkit.errors import BenchError
from quantkit.formats.bcq import BcqSpec, BcqTensors
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.ops.bcq.layout import is_grid
from quantkit.runtime.generation import Runner, fused_runner

CPU = torch.device("cpu")
RTOL = 1e-4  # fp32 sums in other orders, three blocks
TINY = ModelShape("llama", layers=3, hidden=64, ffn=96, heads=4, kv_heads=2, vocabulary=100)


@pytest.mark.parametrize(("family", "linears"), [("llama", 7), ("opt", 6), ("bloom", 4)])
def test_shaped_model_has_its_layers_packed(family: str, linears: int) -> None:
    shape = replace(TINY, family=family, kv_heads=2 if family == "llama" else 4)
    model = shaped_model(shape, CPU, BcqSpec(2, 32, offset=True))
    packed = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(packed) == 3 * linears
    assert len({module.tensors["signs"].data_ptr() for module in packed}) == len(packed)
    assert weight_bytes(model) < sum(p.numel() * p.dtype.itemsize for p in model.parameters())


def test_decode_bench_times_float_and_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.MODELS, "tiny", TINY)
    first, second = run_decode(DecodeBench("tiny", "bcq-w2-g32", 6, 5, CPU))
    assert (first.method, second.method) == ("float", "bcq-w2-g32")
    assert second.weight_bytes < first.weight_bytes
    assert 0 < second.median_ms <= second.p99_ms
    assert second.tokens_per_second == pytest.approx(1e3 / second.median_ms)


def test_batches_and_a_quantized_head_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.MODELS, "tiny", replace(TINY, tied=True))
    results = list(run_decode(DecodeBench("tiny", "bcq-w2-g32-head6", 6, 5, CPU, (1, 3))))
    assert [(result.method, result.batch) for result in results] == [
        *(("float", batch) for batch in (1, 3)),
        *(("bcq-w2-g32-head6", batch) for batch in (1, 3)),
    ]
    plain, *_ = run_decode(DecodeBench("tiny", "bcq-w2-g32", 6, 5, CPU))
    assert results[2].weight_bytes == results[3].weight_bytes < plain.weight_bytes
    assert results[3].tokens_per_second == pytest.approx(3e3 / results[3].median_ms)


def test_a_quantized_head_is_in_equal_steps_as_quantizing_makes_it() -> None:
    model = shaped_model(TINY, CPU)
    decode._pack_head(model, BcqSpec(6, 32, offset=True), CPU, "latency")
    assert is_grid(BcqTensors.of(model.get_output_embeddings().tensors))


def test_a_runner_that_computes_something_else_is_seen() -> None:
    model, ids = shaped_model(TINY, CPU), torch.randint(10, 100, (16, 6))
    assert runner_error(model, ids, fused_runner(model)) < RTOL
    assert runner_error(model, ids, Runner(shaped_model(TINY, CPU))) > 0.1


def test_tokens_that_part_in_many_sequences_are_an_error() -> None:
    expected = torch.arange(32).view(8, 4)
    decode._check_tokens(expected, expected, "it")
    with pytest.raises(BenchError, match="differ in 8 of 8"):
        decode._check_tokens(expected + 1, expected, "it")
    with pytest.raises(BenchError, match="differ in 1 of 1"):
        decode._check_tokens(expected[:1] + 1, expected[:1], "it")


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
        ("opt-6.7b", None, "`method`: needed"),
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
    bench = DecodeBench("tiny", "bcq-w4-g128-head6", 12, 8, torch.device("cuda"), (1, 4))
    assert [result.method for result in run_decode(bench)] == ["float"] * 2 + ["bcq-w4-g128-head6"] * 2
