"""What the vLLM plugin refuses, without vLLM."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from quantkit.checkpoint.config import AttentionScales
from quantkit.errors import CheckpointError
from tests.integrations import vllm_stub
from tests.integrations.vllm_layers import (
    BCQ,
    KV_ROWS,
    Q_ROWS,
    QKV,
    SPECS,
    TOKENS,
    K,
    attention,
    built,
    config_of,
    stored,
)
from tests.pipeline import quantize_tiny


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stub.install(monkeypatch)


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


def test_a_scale_code_beyond_its_range_is_refused() -> None:
    name = "model.layers.0.mlp.fc"
    linears = stored(name, SPECS["bipolar-w4a8-codes"], (Q_ROWS, K))
    layer, _ = built(config_of(linears), name, [Q_ROWS], Q_ROWS)
    with pytest.raises(CheckpointError, match=r"fc\.scales: holds a code above 8"):
        vllm_stub.feed(layer, {**linears[name][1], "scales": torch.full_like(linears[name][1]["scales"], 9)})


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


def test_a_quantized_embedding_is_refused() -> None:
    config = config_of(stored("model.embed_tokens", BCQ, (Q_ROWS, K)))
    with pytest.raises(CheckpointError, match="embed_tokens: is quantized, and vLLM runs it as Embedding"):
        config.get_quant_method(nn.Embedding(1, 1), "model.embed_tokens")


def test_a_shape_that_the_models_config_does_not_build_is_refused() -> None:
    linears = stored("model.layers.0.mlp.fc", BCQ, (Q_ROWS, K))
    with pytest.raises(CheckpointError, match=r"builds it as \(32, 128\), stored is \(64, 128\)"):
        built(config_of(linears), "model.layers.0.mlp.fc", [32], 32)


def test_columns_that_cannot_be_cut_are_refused_before_anything_is_read() -> None:
    name = "model.layers.0.self_attn.o_proj"
    config = config_of(stored(name, BCQ, (Q_ROWS, K)))
    with pytest.raises(CheckpointError, match=r"o_proj: .*within a byte"):
        built(config, name, [Q_ROWS], Q_ROWS, K // 32, rank=1, ranks=32)


def test_rows_that_cut_a_ring_are_refused_before_anything_is_read() -> None:
    config = config_of(attention((SPECS["trellis"],) * 3))
    with pytest.raises(CheckpointError, match=r"q_proj: a shard of the rows 32 to 64 of 64 cuts a block of 64 rows"):
        built(config, QKV, [Q_ROWS // 2, KV_ROWS // 2, KV_ROWS // 2], Q_ROWS + 2 * KV_ROWS, rank=1, ranks=2)


def test_groups_too_fine_for_the_fastest_kernels_are_told() -> None:
    name = "model.layers.0.self_attn.o_proj"
    config = config_of(stored(name, BCQ, (Q_ROWS, K)))
    vllm_stub.Logger.said.clear()
    built(config, name, [Q_ROWS], Q_ROWS, K // 4, rank=1, ranks=4)
    assert vllm_stub.Logger.said == []
    built(config, name, [Q_ROWS], Q_ROWS, K // 8, rank=1, ranks=8)
    assert len(vllm_stub.Logger.said) == 1
    assert "groups of 16" in vllm_stub.Logger.said[0]


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
    with pytest.raises(CheckpointError, match="digest differs"):
        config.maybe_update_config(str(bad))


def test_a_folder_without_weights_and_a_hub_id_are_left_to_vllm(tmp_path: Path) -> None:
    config = config_of(attention((BCQ, BCQ, BCQ)))
    config.maybe_update_config(str(tmp_path))
    config.maybe_update_config("someone/some-model")
