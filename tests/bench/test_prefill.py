from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantkit.bench import attention, prefill, shapes
from quantkit.bench.flatten_layers import (
    INT8_ATTENTION,
    check_flatten_linear,
    exact_sums,
    flatten_spec,
    random_flatten_linear,
)
from quantkit.bench.prefill import PrefillBench, check_linears, check_pairs, multiply_adds, prefill_model, run_prefill
from quantkit.bench.shapes import ModelShape
from quantkit.errors import BenchError
from quantkit.formats.flatten import FlattenSpec, pack_nibbles
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.runtime.fused_ffn import fused_pairs

CPU = torch.device("cpu")
TINY = ModelShape("opt", layers=3, hidden=64, ffn=128, heads=4, kv_heads=4, vocabulary=100, tied=True)


@pytest.fixture(autouse=True)
def _tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.MODELS, "tiny", TINY)
    monkeypatch.setattr(prefill, "_SECONDS", 0.01)


def _linears(model: torch.nn.Module) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


def test_specs_follow_the_papers_shares() -> None:
    specs = [flatten_spec("opt-13b", "flatten-o3", index, 5120) for index in range(240)]
    assert sum(spec.weight_bits == 4 for spec in specs) == 109  # 45.75 % of them
    assert {spec.extended_channels for spec in specs} == {6240}  # 5120 * 1.215, a multiple of 32
    assert {flatten_spec("opt-13b", "flatten-o1", index, 5120).weight_bits for index in range(240)} == {8}
    assert flatten_spec("opt-13b", "smoothquant", 0, 5120).extended_channels == 5120


def test_models_have_every_block_packed_and_their_own_codes() -> None:
    linears = _linears(prefill_model("tiny", TINY, "flatten-o3", CPU))
    assert len(linears) == 18
    assert len({module.tensors["codes"].data_ptr() for module in linears}) == 18
    assert {module.spec.weight_bits for module in linears} == {4, 8}
    assert not _linears(prefill_model("tiny", TINY, "fp16", CPU))


def test_every_blocks_ffn_is_a_fused_pair() -> None:
    pairs = fused_pairs(prefill_model("tiny", TINY, "flatten-o3", CPU))
    assert list(pairs) == [f"model.decoder.layers.{layer}" for layer in range(3)]
    assert {pair.activation for pair in pairs.values()} == {"relu"}
    assert not fused_pairs(prefill_model("tiny", TINY, "fp16", CPU))


def test_every_method_is_timed_at_every_size() -> None:
    methods = ("fp16", "smoothquant", "flatten-o1", "flatten-o3", INT8_ATTENTION)
    results = list(run_prefill(PrefillBench("tiny", methods, (1, 2), (4, 8), CPU)))
    assert [(r.method, r.batch, r.length) for r in results[:4]] == [("fp16", b, s) for b in (1, 2) for s in (4, 8)]
    assert len(results) == 20
    assert all(r.ms is not None and r.ms > 0 and r.repeats >= 2 for r in results)
    weights = {r.method: r.weight_bytes for r in results}
    assert weights["flatten-o3"] < weights["flatten-o1"] < weights["fp16"]


def test_int8_attention_is_in_every_block() -> None:
    model = prefill_model("tiny", TINY, INT8_ATTENTION, CPU)
    attentions = [m for m in model.modules() if hasattr(m, "quantkit_attention_scales")]
    assert len(attentions) == 3
    ids = torch.arange(20, 36)[None]
    with torch.no_grad():
        logits = model(ids).logits
        model.set_attn_implementation("sdpa")
        assert not torch.equal(model(ids).logits, logits)


def test_wrong_attention_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "int8_attention", lambda query, *rest: torch.zeros_like(query).transpose(1, 2))
    with pytest.raises(BenchError, match=r"INT8 attention differs in 100\.0% of the results"):
        list(run_prefill(PrefillBench("tiny", (INT8_ATTENTION,), (1,), (4,), CPU)))


def test_untimed_runs_measure_memory_alone() -> None:
    (result,) = run_prefill(PrefillBench("tiny", ("flatten-o1",), (1,), (4,), CPU, timed=False))
    assert result.ms is None
    assert result.weight_bytes > 0


def test_operations_are_those_of_the_unflattened_model() -> None:
    counts = {m: multiply_adds(prefill_model("tiny", TINY, m, CPU), 2, 8) for m in ("fp16", "flatten-o1")}
    linears = 3 * (4 * 64 * 64 + 2 * 64 * 128)
    assert counts["fp16"] == counts["flatten-o1"] == 16 * linears + 2 * (3 * 64 * 8 * 9 + 100 * 64)


@pytest.mark.parametrize(
    "spec",
    [
        FlattenSpec(4, 4, 96),
        FlattenSpec(8, 8, 96),
        FlattenSpec(8, 8, 96, rotate_inputs=True),
        FlattenSpec(8, 8, 96, row_scales=True),
    ],
)
def test_wrong_results_are_not_timed(device: torch.device, spec: FlattenSpec) -> None:
    module = random_flatten_linear(spec, (40, 64), torch.zeros(1, device=device, dtype=torch.float32))
    x = torch.randn(70, 64, device=device)
    check_flatten_linear("layer", module, x)
    module.forward = lambda x: torch.zeros(70, 40, device=device)  # type: ignore[method-assign]
    with pytest.raises(BenchError, match="layer: differs from exact integer arithmetic"):
        check_flatten_linear("layer", module, x)


def test_exact_sums_read_nibbles() -> None:
    acts, codes = (torch.randint(-7, 8, (n, 32), dtype=torch.int8) for n in (3, 5))
    assert torch.equal(exact_sums(acts, pack_nibbles(codes)).long(), acts.long() @ codes.long().T)


def test_a_folder_is_run_as_it_is(tiny_model: Callable[[str], Path]) -> None:
    folder = str(tiny_model("opt"))
    (result,) = run_prefill(PrefillBench(folder, (), (1,), (6,), CPU))
    assert (result.method, result.int4_share) == ("as stored", 0.0)
    with pytest.raises(BenchError, match="is run as it is"):
        list(run_prefill(PrefillBench(folder, ("fp16",), (1,), (6,), CPU)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ()}, "`methods`: needed"),
        ({"methods": ("int3",)}, "unknown; choose fp16"),
        ({"model": "opt-13"}, "did you mean 'opt-13b'"),
        ({"batches": (0,)}, "at least 1"),
    ],
    ids=["no-method", "unknown-method", "unknown-shape", "no-rows"],
)
def test_bad_requests_are_refused(change: dict[str, object], message: str) -> None:
    bench = PrefillBench("tiny", ("fp16",), (1,), (4,), CPU)
    with pytest.raises(BenchError, match=message):
        list(run_prefill(replace(bench, **change)))  # type: ignore[arg-type]


@pytest.mark.cuda
def test_a_pass_is_a_graph_on_a_gpu() -> None:
    device = torch.device("cuda")
    model = prefill_model("tiny", TINY, "flatten-o3", device)
    assert all(pair.is_ready() for pair in fused_pairs(model).values())
    check_linears(model, "flatten-o3")
    check_pairs(model, "flatten-o3")
    for result in run_prefill(PrefillBench("tiny", ("flatten-o3", INT8_ATTENTION), (2,), (8,), device)):
        assert result.ms is not None
        assert result.peak_memory_bytes
