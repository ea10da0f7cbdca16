"""The vLLM plugin without vLLM: what a layer keeps, multiplies and refuses, driven as vLLM drives it."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats.bcq import BcqSpec
from quantkit.formats.shard import shard
from quantkit.formats.table import format_name
from quantkit.formats.trellis import TrellisSpec
from quantkit.integrations.vllm.parts import made_up_filter
from quantkit.nn.table import LINEARS, LinearRow
from tests.formats.test_shard import random_tensors
from tests.integrations import vllm_stub
from tests.integrations.vllm_layers import (
    BCQ,
    BCQ3,
    CUT_AT_ANY_ROW,
    FP32_ATOL,
    FP32_RTOL,
    FUSED,
    KV_ROWS,
    Q_ROWS,
    QKV,
    QUANTIZED_ACTS,
    ROTATED,
    SPECS,
    TOKENS,
    WEIGHT_ONLY,
    K,
    attention,
    built,
    config_of,
    loaded_attention,
    product_of,
    stored,
    weight_of,
)

FP16_RTOL = 1e-2  # two kernels' sums of 128 products of fp16


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stub.install(monkeypatch)


def test_registering_again_changes_nothing() -> None:
    from quantkit.integrations.vllm import register

    register()
    first = vllm_stub.REGISTERED["quantkit"]
    register()
    assert vllm_stub.REGISTERED["quantkit"] is first


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_format_multiplies_as_quantkit_does(spec: Any, bias: bool) -> None:
    linears = stored("model.layers.0.mlp.fc", spec, (Q_ROWS, K))
    layer, method = built(config_of(linears), "model.layers.0.mlp.fc", [Q_ROWS], Q_ROWS)
    vllm_stub.feed(layer, linears["model.layers.0.mlp.fc"][1])
    method.process_weights_after_loading(layer)
    x, added = torch.randn(TOKENS, K), torch.randn(Q_ROWS) if bias else None
    row = LINEARS[format_name(spec)]
    assert torch.equal(method.apply(layer, x, added), row.forward(spec, linears["model.layers.0.mlp.fc"][1], x, added))


@pytest.mark.parametrize(
    "specs",
    [
        (BCQ, BCQ, BCQ),
        (BCQ, BCQ3, BCQ3),
        (BCQ, BcqSpec(4, 64, True, 8), None),
        (SPECS["flatten"], BCQ, None),
        (SPECS["trellis"], SPECS["trellis"], BCQ),
    ],
    ids=["equal", "two-specs", "float", "formats", "trellis"],
)
def test_fused_linears_keep_their_own_formats(specs: tuple[Any, Any, Any]) -> None:
    linears = attention(specs)
    layer, method = loaded_attention(linears)
    x, bias = torch.randn(TOKENS, K), torch.randn(Q_ROWS + 2 * KV_ROWS)
    expected = torch.cat([product_of(spec, tensors, x) for spec, tensors in linears.values()], -1) + bias
    torch.testing.assert_close(method.apply(layer, x, bias), expected, rtol=FP32_RTOL, atol=FP32_ATOL)


@pytest.mark.parametrize(
    ("specs", "products"),
    [((BCQ, BCQ, BCQ), 1), ((BCQ, BCQ3, BCQ3), 2), ((BCQ, BCQ3, BCQ), 3), ((BCQ, None, None), 2)],
    ids=["equal", "k-and-v", "apart", "float"],
)
def test_neighbours_of_one_spec_are_one_product(specs: tuple[Any, Any, Any], products: int) -> None:
    _, method = loaded_attention(attention(specs))
    assert len(method.products) == products


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("spec", CUT_AT_ANY_ROW.values(), ids=CUT_AT_ANY_ROW)
def test_ranks_share_out_the_rows(spec: Any, ranks: int) -> None:
    linears = attention((spec, spec, spec))
    x = torch.randn(TOKENS, K)
    own = [loaded_attention(linears, rank=rank, ranks=ranks) for rank in range(ranks)]
    shares = [
        method.apply(layer, x).split([Q_ROWS // ranks, KV_ROWS // ranks, KV_ROWS // ranks], -1) for layer, method in own
    ]
    for index, (stored_spec, tensors) in enumerate(linears.values()):
        together = torch.cat([share[index] for share in shares], -1)
        torch.testing.assert_close(together, product_of(stored_spec, tensors, x), rtol=FP32_RTOL, atol=FP32_ATOL)


def test_heads_of_keys_and_values_are_held_by_several_ranks() -> None:
    linears = attention((BCQ, BCQ, BCQ))
    ranks, replicas = 8, 2  # four heads of k and v on eight ranks
    x = torch.randn(TOKENS, K)
    _, keys, values = (product_of(spec, tensors, x) for spec, tensors in linears.values())
    for rank in range(ranks):
        layer, method = loaded_attention(linears, rank=rank, ranks=ranks, replicas=replicas)
        own = slice(rank // replicas * 8, rank // replicas * 8 + 8)
        expected = torch.cat([keys[:, own], values[:, own]], -1)
        torch.testing.assert_close(method.apply(layer, x)[:, 8:], expected, rtol=FP32_RTOL, atol=FP32_ATOL)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("spec", WEIGHT_ONLY.values(), ids=WEIGHT_ONLY)
def test_ranks_share_out_the_columns(spec: Any, ranks: int) -> None:
    name, part = "model.layers.0.self_attn.o_proj", K // ranks
    linears, x, total = stored(name, spec, (Q_ROWS, K)), torch.randn(TOKENS, K), torch.zeros(TOKENS, Q_ROWS)
    for rank in range(ranks):
        layer, method = built(config_of(linears), name, [Q_ROWS], Q_ROWS, part, rank=rank, ranks=ranks)
        vllm_stub.feed(layer, linears[name][1])
        method.process_weights_after_loading(layer)
        total += method.apply(layer, x[:, rank * part : (rank + 1) * part].contiguous())
    torch.testing.assert_close(total, product_of(spec, linears[name][1], x), rtol=FP32_RTOL, atol=FP32_ATOL)


@pytest.mark.parametrize("on_disk", ["fused", "apart"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_rings_of_the_trellis_format_are_shared_out_whole(on_disk: str, ranks: int) -> None:
    spec, sizes, x = SPECS["trellis"], (256, 128, 128), torch.randn(TOKENS, K)
    whole = random_tensors(spec, (sum(sizes), K))
    apart = {
        name: (spec, shard(spec, whole, (sum(sizes), K), out_spans=[span], in_span=(0, K))[1])
        for name, span in zip(FUSED["qkv_proj"], ((0, 256), (256, 384), (384, 512)), strict=True)
    }
    linears = {QKV: (spec, whole)}
    if on_disk == "apart":
        linears = {f"model.layers.0.self_attn.{name}": own for name, own in apart.items()}
    outputs, rows = [], [size // ranks for size in sizes]
    for rank in range(ranks):
        layer, method = built(config_of(linears), QKV, rows, sum(sizes), rank=rank, ranks=ranks)
        for shard_id, (_, tensors) in zip("qkv", linears.values(), strict=False):
            vllm_stub.feed(layer, tensors, shard_id)
        method.process_weights_after_loading(layer)
        assert len(method.products) == 1
        outputs.append(method.apply(layer, x).split(rows, -1))
    together = torch.cat([torch.cat([output[index] for output in outputs], -1) for index in range(3)], -1)
    torch.testing.assert_close(together, product_of(spec, whole, x), rtol=FP32_RTOL, atol=FP32_ATOL)


@pytest.mark.parametrize(
    ("rows", "products"),
    [((64, 64, 64), 1), ((64, 64, 32), 1), ((64, 32, 64), 3)],
    ids=["whole", "shorter-last", "shorter-within"],
)
def test_the_trellis_format_is_one_product_where_rings_stay_whole(rows: tuple[int, int, int], products: int) -> None:
    spec, x = SPECS["trellis"], torch.randn(TOKENS, K)
    filter = torch.randn(2, 4)
    linears = {
        f"model.layers.0.self_attn.{name}": (spec, {**random_tensors(spec, (own, K)), "filter": filter})
        for name, own in zip(FUSED["qkv_proj"], rows, strict=True)
    }
    layer, method = built(config_of(linears), QKV, list(rows), sum(rows))
    for shard_id, (_, tensors) in zip("qkv", linears.values(), strict=True):
        vllm_stub.feed(layer, tensors, shard_id)
    method.process_weights_after_loading(layer)
    assert len(method.products) == products
    expected = torch.cat([product_of(spec, tensors, x) for _, tensors in linears.values()], -1)
    torch.testing.assert_close(method.apply(layer, x), expected, rtol=FP32_RTOL, atol=FP32_ATOL)


def test_ranks_share_out_rotated_columns_between_blocks() -> None:
    spec, name, part, k = ROTATED["bcq-rotated"], "model.layers.0.mlp.down_proj", 256, 512
    linears, x, total = stored(name, spec, (Q_ROWS, k)), torch.randn(TOKENS, k), torch.zeros(TOKENS, Q_ROWS)
    for rank in range(2):
        layer, method = built(config_of(linears), name, [Q_ROWS], Q_ROWS, part, k, rank=rank, ranks=2)
        vllm_stub.feed(layer, linears[name][1])
        method.process_weights_after_loading(layer)
        total += method.apply(layer, x[:, rank * part : (rank + 1) * part])
    torch.testing.assert_close(total, product_of(spec, linears[name][1], x), rtol=FP32_RTOL, atol=FP32_ATOL)
    with pytest.raises(CheckpointError, match="over which the input is rotated; serve it on fewer GPUs"):
        built(config_of(linears), name, [Q_ROWS], Q_ROWS, k // 4, k, rank=0, ranks=4)


def test_columns_of_flatten_add_up_exactly() -> None:
    """Static activation scales: integer sums of the ranks are those of the whole."""
    spec, name = SPECS["flatten"], "model.layers.0.self_attn.o_proj"
    linears, x, total = stored(name, spec, (Q_ROWS, K)), torch.randn(TOKENS, K), torch.zeros(TOKENS, Q_ROWS)
    for rank in range(2):
        layer, method = built(config_of(linears), name, [Q_ROWS], Q_ROWS, K // 2, rank=rank, ranks=2)
        vllm_stub.feed(layer, linears[name][1])
        method.process_weights_after_loading(layer)
        total += method.apply(layer, x[:, rank * 64 : rank * 64 + 64].contiguous())
    torch.testing.assert_close(total, product_of(spec, linears[name][1], x), rtol=FP32_RTOL, atol=FP32_ATOL)


@pytest.mark.parametrize("ranks", [1, 2])
def test_linears_fused_on_disk_are_cut_by_their_parts(ranks: int) -> None:
    whole = stored(QKV, BCQ, (Q_ROWS + 2 * KV_ROWS, K))
    weight, x, outputs = weight_of(*whole[QKV]), torch.randn(TOKENS, K), []
    rows = [Q_ROWS // ranks, KV_ROWS // ranks, KV_ROWS // ranks]
    for rank in range(ranks):
        layer, method = built(config_of(whole), QKV, rows, sum(rows) * ranks, rank=rank, ranks=ranks)
        vllm_stub.feed(layer, whole[QKV][1])
        method.process_weights_after_loading(layer)
        outputs.append(method.apply(layer, x).split(rows, -1))
    together = torch.cat([torch.cat([output[index] for output in outputs], -1) for index in range(3)], -1)
    torch.testing.assert_close(together, x @ weight.T, rtol=FP32_RTOL, atol=FP32_ATOL)


@pytest.mark.parametrize("part", [K, K // 2], ids=["whole", "cut"])
@pytest.mark.parametrize("spec", [*WEIGHT_ONLY.values(), *QUANTIZED_ACTS.values()], ids=[*WEIGHT_ONLY, *QUANTIZED_ACTS])
def test_dummy_weights_run(spec: Any, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_stub.SETTINGS.load_config, "load_format", "dummy")
    name = "model.layers.0.self_attn.o_proj"
    linears = stored(name, spec, (Q_ROWS, K))
    layer, method = built(config_of(linears), name, [Q_ROWS], Q_ROWS, part, ranks=K // part)
    vllm_stub.fill_as_dummy(layer)
    method.process_weights_after_loading(layer)
    assert bool(method.apply(layer, torch.randn(TOKENS, part)).isfinite().all())


@pytest.mark.parametrize("spec", WEIGHT_ONLY.values(), ids=WEIGHT_ONLY)
def test_dummy_weights_have_no_mean(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean grows from layer to layer, to NaN in a deep model."""
    monkeypatch.setattr(vllm_stub.SETTINGS.load_config, "load_format", "dummy")
    name = "model.layers.0.self_attn.o_proj"
    layer, method = built(config_of(stored(name, spec, (Q_ROWS, K))), name, [Q_ROWS], Q_ROWS)
    vllm_stub.fill_as_dummy(layer)
    method.process_weights_after_loading(layer)
    sums = method.apply(layer, torch.ones(1, K))
    assert float(sums.std()) > 0
    assert abs(float(sums.mean())) < 4 * float(sums.std()) / Q_ROWS**0.5  # four standard errors


@pytest.mark.parametrize("spec", WEIGHT_ONLY.values(), ids=WEIGHT_ONLY)
def test_dummy_weights_have_a_models_deviation(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_stub.SETTINGS.load_config, "load_format", "dummy")
    name = "model.layers.0.self_attn.o_proj"
    layer, method = built(config_of(stored(name, spec, (Q_ROWS, K))), name, [Q_ROWS], Q_ROWS)
    vllm_stub.fill_as_dummy(layer)
    method.process_weights_after_loading(layer)
    assert 0.01 < float(method.apply(layer, torch.eye(K)).std()) < 0.05


@pytest.mark.parametrize("spec", [TrellisSpec(2, 6), TrellisSpec(1, 4)], ids=["of the quantizer", "made up"])
def test_filters_are_fp32_whatever_type_the_engine_loads_in(spec: TrellisSpec) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        assert made_up_filter(spec).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("sequences", "layout"), [(1, "latency"), (2, "few"), (4, "few"), (5, "batch"), (99, "batch")])
def test_weights_are_ordered_for_the_number_of_sequences(
    sequences: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_stub.SETTINGS.scheduler_config, "max_num_seqs", sequences)
    name = "model.layers.0.self_attn.o_proj"
    linears = stored(name, BCQ, (Q_ROWS, K))
    asked: list[str] = []
    monkeypatch.setattr(LinearRow, "preparation", lambda _, layout: asked.append(layout))
    layer, method = built(config_of(linears), name, [Q_ROWS], Q_ROWS)
    vllm_stub.feed(layer, linears[name][1])
    method.process_weights_after_loading(layer)
    assert asked == [layout]


def test_only_the_final_tensors_stay_and_lora_finds_one() -> None:
    layer, _ = loaded_attention(attention((BCQ, BCQ, BCQ)))
    assert set(dict(layer.named_parameters())) == {"part0_signs", "part0_scales", "part0_offset"}
    assert layer.weight_packed.data_ptr() == layer.part0_signs.data_ptr()


def test_floating_point_linears_are_vllms_own() -> None:
    config = config_of(stored("model.layers.0.mlp.fc1", BCQ, (Q_ROWS, K)))
    method = config.get_quant_method(vllm_stub.LinearBase(), "model.layers.0.mlp.fc2")
    assert isinstance(method, vllm_stub.UnquantizedLinearMethod)
    assert config.get_quant_method(torch.nn.Identity(), "model.layers.0.self_attn.attn") is None


def test_the_config_travels_to_other_processes() -> None:
    config = config_of(attention((BCQ, BCQ, BCQ)))
    assert pickle.loads(pickle.dumps(config)).layers == config.layers


def test_names_are_translated_to_vllms() -> None:
    config = config_of(stored("transformer.h.0.fc", BCQ, (Q_ROWS, K)))
    config.apply_vllm_mapper(
        SimpleNamespace(apply_dict=lambda values: {f"model.{name}": layer for name, layer in values.items()})
    )
    assert config.get_quant_method(vllm_stub.LinearBase(), "model.transformer.h.0.fc").names == [
        "model.transformer.h.0.fc"
    ]


@pytest.mark.cuda
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_gpu_takes_the_kernels_order_and_a_graph_the_same_bits(spec: Any) -> None:
    linears, gpu = attention((spec, spec, spec)), torch.device("cuda")
    with gpu:
        layer, method = loaded_attention({name: (own, on(tensors, gpu)) for name, (own, tensors) in linears.items()})
    # of weights in the hundreds (8-bit scales) the sums must stay within fp16
    x = torch.randn(TOKENS, K, dtype=torch.float16, device=gpu) * (1e-2 if isinstance(spec, BcqSpec) else 1)
    y = method.apply(layer, x)  # also loads the kernels, as an engine's warm-up does
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = method.apply(layer, x)
    graph.replay()
    assert torch.equal(captured, y)
    expected = [product_of(own, on(tensors, gpu), x) for own, tensors in linears.values()]
    torch.testing.assert_close(y, torch.cat(expected, -1), rtol=FP16_RTOL, atol=FP16_RTOL * float(y.abs().max()))


def on(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
