"""The vLLM plugin without vLLM: what a layer keeps, multiplies and refuses, driven as vLLM drives it."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.checkpoint.config import AttentionScales, CheckpointConfig, StoredLayer, config_to_json
from quantkit.errors import CheckpointError
from quantkit.formats.bcq import BcqSpec
from quantkit.formats.bipolar import BipolarSpec
from quantkit.formats.flatten import FlattenSpec
from quantkit.formats.table import FORMATS, format_name
from quantkit.nn.table import LINEARS
from tests.formats.test_shard import random_tensors
from tests.integrations import vllm_stub
from tests.pipeline import quantize_tiny

K, Q_ROWS, KV_ROWS, TOKENS = 128, 64, 32, 5
BCQ, BCQ3 = BcqSpec(4, 64, True), BcqSpec(3, 32, True)
WEIGHT_ONLY = {
    "bcq": BCQ,
    "bcq-row": BcqSpec(2, -1, False),
    "bcq-scales8": BcqSpec(4, 64, True, scale_bits=8),
    "bipolar": BipolarSpec(3, 16, 64),
}
QUANTIZED_ACTS = {
    "bipolar-w4a8": BipolarSpec(4, 8),
    "flatten": FlattenSpec(8, 8, 160),
    "flatten-w4a4": FlattenSpec(4, 4, 160),
    "flatten-smooth": FlattenSpec(8, 8, 160, smooth=True),
}
SPECS = {**WEIGHT_ONLY, **QUANTIZED_ACTS}
FP32_RTOL, FP32_ATOL = 1e-4, 1e-3  # sums of 128 products in another order
QKV = "model.layers.0.self_attn.qkv_proj"
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
Stored = dict[str, tuple[Any, dict[str, Tensor]]]  # spec (None: floating point) and tensors of each Linear


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stub.install(monkeypatch)


def stored(name: str, spec: Any, shape: tuple[int, int]) -> Stored:
    if spec is None:
        return {name: (None, {"weight": torch.randn(shape)})}
    return {name: (spec, random_tensors(spec, shape))}


def attention(specs: tuple[Any, Any, Any]) -> Stored:
    linears: Stored = {}
    for name, spec, rows in zip(("q", "k", "v"), specs, (Q_ROWS, KV_ROWS, KV_ROWS), strict=True):
        linears |= stored(f"model.layers.0.self_attn.{name}_proj", spec, (rows, K))
    return linears


def config_of(linears: Stored, **more: Any) -> Any:
    from quantkit.integrations.vllm.config import QuantkitConfig

    layers = {
        name: StoredLayer(spec, shape_of(spec, tensors))
        for name, (spec, tensors) in linears.items()
        if spec is not None
    }
    document = config_to_json(CheckpointConfig(layers, (), {"recipe": "test", "calibration": None}, **more))
    config = QuantkitConfig.from_config(json.loads(json.dumps(document)))
    config.packed_modules_mapping = FUSED
    return config


def shape_of(spec: Any, tensors: dict[str, Tensor]) -> tuple[int, int]:
    first = next(iter(tensors.values()))
    if isinstance(spec, FlattenSpec):
        return first.shape[0], K
    return first.shape[-2], first.shape[-1] * (1 if spec is None else 8)


def weight_of(spec: Any, tensors: dict[str, Tensor]) -> Tensor:
    if spec is None:
        return tensors["weight"]
    return FORMATS[format_name(spec)].dequantize(spec, tensors, shape_of(spec, tensors))


def product_of(spec: Any, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    if spec is None:
        return x @ tensors["weight"].T
    return LINEARS[format_name(spec)].forward(spec, tensors, x, None)


def built(config: Any, prefix: str, rows: list[int], total: int, k: int = K, **place: int) -> tuple[Any, Any]:
    layer = vllm_stub.LinearBase(**place)
    method = config.get_quant_method(layer, prefix)
    method.create_weights(layer, k, rows, K, total, torch.float32, weight_loader=None)
    return layer, method


def loaded_attention(linears: Stored, **place: int) -> tuple[Any, Any]:
    """The fused layer on one rank."""
    ranks, replicas = place.get("ranks", 1), place.get("replicas", 1)
    rows = [Q_ROWS // ranks, KV_ROWS * replicas // ranks, KV_ROWS * replicas // ranks]
    layer, method = built(config_of(linears), QKV, rows, sum(rows) * ranks, **place)
    for shard_id, (_, tensors) in zip("qkv", linears.values(), strict=True):
        vllm_stub.feed(layer, tensors, shard_id)
    method.process_weights_after_loading(layer)
    return layer, method


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
    [(BCQ, BCQ, BCQ), (BCQ, BCQ3, BCQ3), (BCQ, BcqSpec(4, 64, True, 8), None), (SPECS["flatten"], BCQ, None)],
    ids=["equal", "two-specs", "float", "formats"],
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
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
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
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_dummy_weights_run(spec: Any, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_stub.SETTINGS.load_config, "load_format", "dummy")
    name = "model.layers.0.self_attn.o_proj"
    linears = stored(name, spec, (Q_ROWS, K))
    layer, method = built(config_of(linears), name, [Q_ROWS], Q_ROWS, part, ranks=K // part)
    vllm_stub.fill_as_dummy(layer)
    method.process_weights_after_loading(layer)
    assert bool(method.apply(layer, torch.randn(TOKENS, part)).isfinite().all())


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


def test_a_missing_tensor_is_refused_by_name() -> None:
    linears = attention((BCQ, BCQ, BCQ))
    layer, method = built(config_of(linears), QKV, [Q_ROWS, KV_ROWS, KV_ROWS], Q_ROWS + 2 * KV_ROWS)
    for shard_id, (_, tensors) in zip("qkv", linears.values(), strict=True):
        vllm_stub.feed(layer, {name: t for name, t in tensors.items() if (shard_id, name) != ("v", "offset")}, shard_id)
    with pytest.raises(CheckpointError, match=r"v_proj\.offset: missing"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize("damage", ["shape", "dtype", "nan"])
def test_a_tensor_that_does_not_fit_is_refused_by_name(damage: str) -> None:
    linears = attention((BCQ, BCQ, BCQ))
    layer, _ = built(config_of(linears), QKV, [Q_ROWS, KV_ROWS, KV_ROWS], Q_ROWS + 2 * KV_ROWS)
    tensors = dict(linears["model.layers.0.self_attn.k_proj"][1])
    scales = tensors["scales"]
    changed = {"shape": scales[:, :-1], "dtype": scales.float(), "nan": scales * float("nan")}[damage]
    with pytest.raises(CheckpointError, match=r"k_proj\.scales: "):
        vllm_stub.feed(layer, {**tensors, "scales": changed}, "k")


def test_a_map_that_leads_outside_is_refused() -> None:
    name, spec = "model.layers.0.mlp.fc", SPECS["flatten"]
    linears = stored(name, spec, (Q_ROWS, K))
    layer, _ = built(config_of(linears), name, [Q_ROWS], Q_ROWS)
    source = linears[name][1]["source_channel"].clone()
    source[-1] = K
    with pytest.raises(CheckpointError, match="fc: an index is wrong"):
        vllm_stub.feed(layer, {**linears[name][1], "source_channel": source})


def test_a_layer_that_vllms_model_lacks_is_refused_before_loading() -> None:
    linears = {**attention((BCQ, BCQ, BCQ)), **stored("model.layers.0.mlp.odd", BCQ, (Q_ROWS, K))}
    layer, _ = built(config_of(linears), QKV, [Q_ROWS, KV_ROWS, KV_ROWS], Q_ROWS + 2 * KV_ROWS)
    with pytest.raises(CheckpointError, match=r"mlp\.odd: .*not supported"):
        vllm_stub.feed(layer, linears["model.layers.0.self_attn.q_proj"][1], "q")


def test_blocks_of_other_pipeline_stages_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_stub.SETTINGS.parallel_config, "pipeline_parallel_size", 2)
    linears = {**attention((BCQ, BCQ, BCQ)), **stored("model.layers.1.mlp.fc", BCQ, (Q_ROWS, K))}
    layer, method = built(config_of(linears), QKV, [Q_ROWS, KV_ROWS, KV_ROWS], Q_ROWS + 2 * KV_ROWS)
    for shard_id, name in zip("qkv", linears, strict=False):
        vllm_stub.feed(layer, linears[name][1], shard_id)
    method.process_weights_after_loading(layer)
    assert method.apply(layer, torch.randn(TOKENS, K)).shape == (TOKENS, Q_ROWS + 2 * KV_ROWS)


def test_int8_attention_is_refused() -> None:
    with pytest.raises(CheckpointError, match="attention in INT8"):
        config_of(attention((BCQ, BCQ, BCQ)), attention={"model.layers.0.self_attn": AttentionScales(1.0, 1.0, 1.0)})


def test_a_quantized_head_is_refused() -> None:
    config = config_of(stored("lm_head", BCQ, (Q_ROWS, K)))
    with pytest.raises(CheckpointError, match="lm_head: is quantized, and vLLM runs it as ParallelLMHead"):
        config.get_quant_method(vllm_stub.ParallelLMHead(), "lm_head")


def test_a_shape_that_the_models_config_does_not_build_is_refused() -> None:
    linears = stored("model.layers.0.mlp.fc", BCQ, (Q_ROWS, K))
    with pytest.raises(CheckpointError, match=r"builds it as \(32, 128\), stored is \(64, 128\)"):
        built(config_of(linears), "model.layers.0.mlp.fc", [32], 32)


def test_columns_that_cannot_be_cut_are_refused() -> None:
    name = "model.layers.0.self_attn.o_proj"
    linears = stored(name, BCQ, (Q_ROWS, K))
    layer, _ = built(config_of(linears), name, [Q_ROWS], Q_ROWS, K // 32, rank=1, ranks=32)
    with pytest.raises(CheckpointError, match="within a byte"):
        vllm_stub.feed(layer, linears[name][1])


def test_a_newer_format_is_refused() -> None:
    from quantkit.integrations.vllm.config import QuantkitConfig

    with pytest.raises(CheckpointError, match="upgrade quantkit"):
        QuantkitConfig.from_config({"quant_method": "quantkit", "format_version": 99})


def test_an_altered_file_is_refused_when_the_engine_starts(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    quantize_tiny(tiny_model("opt"), tmp_path / "good")
    bad = Path(shutil.copytree(tmp_path / "good", tmp_path / "bad"))
    raw = bytearray((bad / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (bad / "model.safetensors").write_bytes(raw)
    config = config_of(attention((BCQ, BCQ, BCQ)))
    config.maybe_update_config(str(tmp_path / "good"))
    with pytest.raises(CheckpointError, match="sha256 differs"):
        config.maybe_update_config(str(bad))


def test_a_folder_without_weights_and_a_hub_id_are_left_to_vllm(tmp_path: Path) -> None:
    config = config_of(attention((BCQ, BCQ, BCQ)))
    config.maybe_update_config(str(tmp_path))
    config.maybe_update_config("someone/some-model")
