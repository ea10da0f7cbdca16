"""Mixtures of experts from calibration to a loaded checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

import quantkit
from quantkit.calibration.artifact import load_calibration, save_calibration
from quantkit.checkpoint.summary import summarize
from quantkit.formats.trellis import TrellisSpec
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.models.experts import expert_linears, separate_experts
from quantkit.models.families import block_linears, linear_weight
from quantkit.recipe import load_recipe
from tests.tiny import EXPERTS, VOCABULARY

Tiny = Callable[[str], Path]
FP32_ATOL = 1e-5  # one GEMM against a GEMM with the same weights through another path
HUB = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w2",
    "phimoe": "model.layers.1.block_sparse_moe.experts.3.w2",
    "gpt_oss": "model.layers.1.mlp.experts.3.gate_up_proj",
    "llama4": "model.layers.1.feed_forward.experts.3.up_proj",
}
QUICK = ("weight_bits=2", "rounds=1", "sweeps=0")  # which codes an expert gets is not the point
TRELLIS = "{schema: 1, method: trellis, settings: {weight_bits: 2, taps: 4, compensate: false}, keep: [lm_head]}"
TOP_K = {"llama4": 1}


@pytest.fixture(scope="module")
def quantized(tiny_model: Tiny, calibrated: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """family -> its checkpoint, every expert calibrated and compensated."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("experts") / family
            _quantize(tiny_model(family), calibrated(family), made[family], "bcq-w3-g128-comp", *QUICK)
        return made[family]

    return folder


def _quantize(model: Path, calibration: Path, out: Path, recipe: str, *settings: str) -> None:
    chosen = load_recipe(recipe, ["group_size=32", *settings])
    quantize_model(str(model), chosen, out, calibration=calibration, options=QuantizeOptions())


@pytest.mark.parametrize("family", EXPERTS)
def test_loaded_model_computes_with_the_dequantized_experts(family: str, tiny_model: Tiny, quantized: Tiny) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(quantized(family))
    original = AutoModelForCausalLM.from_pretrained(tiny_model(family))
    separate_experts(original)
    for name, module in block_linears(original).items():
        linear_weight(module).data.copy_(loaded.get_submodule(name).dequantize())
    ids = torch.randint(0, VOCABULARY, (2, 24))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, original(ids).logits, atol=FP32_ATOL, rtol=0)
    tokens = loaded.generate(ids[:1], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert tokens.shape == (1, 27)


@pytest.mark.parametrize("family", EXPERTS)
def test_files_and_config_use_the_hubs_names(family: str, tiny_model: Tiny, quantized: Tiny) -> None:
    name = HUB.get(family, "model.layers.1.mlp.experts.3.down_proj")
    stored = load_file(quantized(family) / "model.safetensors")
    assert f"{name}.signs" in stored
    summary = summarize(quantized(family))
    assert name in {layer.name for layer in summary.layers}
    fused = {"gpt_oss", "llama4"}
    assert (f"{name}.weight" in load_file(tiny_model(family) / "model.safetensors")) == (family not in fused)


def _half_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Of the parameters of a model loaded in fp16."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", EXPERTS)
def test_saving_again_gives_the_same_tensors(family: str, quantized: Tiny, tmp_path: Path) -> None:
    quantkit.load(str(quantized(family))).save_pretrained(tmp_path)
    first, second = (load_file(folder / "model.safetensors") for folder in (quantized(family), tmp_path))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("family", EXPERTS)
def test_what_is_not_quantized_gets_the_dtype_of_the_original(family: str, tiny_model: Tiny, quantized: Tiny) -> None:
    original, loaded = (_half_dtypes(folder(family)) for folder in (tiny_model, quantized))
    kept = original.keys() & loaded.keys()
    assert any("norm" in name for name in kept)
    assert {name: loaded[name] for name in kept} == {name: original[name] for name in kept}


def test_base_model_loads_from_the_same_folder(quantized: Tiny) -> None:
    base, whole = AutoModel.from_pretrained(quantized("mixtral")), quantkit.load(str(quantized("mixtral")))
    ids = torch.randint(0, VOCABULARY, (1, 12))
    with torch.no_grad():
        assert torch.equal(base(ids).last_hidden_state, whole.model(ids).last_hidden_state)


@pytest.mark.parametrize("kept", ["*.experts.1.*", "*.experts.*", "model.layers.0.*"], ids=["one", "all", "a block"])
def test_experts_may_be_kept(kept: str, tiny_model: Tiny, calibrated: Tiny, tmp_path: Path) -> None:
    for family in ("mixtral", "gpt_oss"):
        out = tmp_path / family
        keep = f'keep=["lm_head", "{kept}"]'
        _quantize(tiny_model(family), calibrated(family), out, "bcq-w4-g128", "rounds=1", keep)
        loaded, original = (AutoModelForCausalLM.from_pretrained(folder) for folder in (out, tiny_model(family)))
        separate_experts(original)
        name = min(own for own in expert_linears(original) if ".layers.0." in own and ".experts.1." in own)
        assert torch.equal(loaded.get_submodule(name).weight, original.get_submodule(name).weight)


@pytest.mark.parametrize("family", EXPERTS)
def test_every_expert_reports_the_tokens_routed_to_it(family: str, calibrated: Tiny, quantized: Tiny) -> None:
    artifact = load_calibration(calibrated(family))
    layers = json.loads((quantized(family) / "quantkit.json").read_text())["layers"]
    tokens = {name: own["tokens"] for name, own in layers.items() if "tokens" in own}
    last = [count for name, count in tokens.items() if ".layers.1." in name and name.endswith(("down_proj", "w2"))]
    assert sum(last) == artifact.meta.tokens * TOP_K.get(family, 2)
    assert len(last) == (8 if family == "deepseek_v3" else 4)


def test_recipes_with_quantized_activations_take_an_expert_without_tokens(
    tiny_model: Tiny, calibrated: Tiny, tmp_path: Path, device: torch.device
) -> None:
    path = tmp_path / "none.safetensors"
    _without_tokens(calibrated("qwen3_moe"), "model.layers.0.mlp.experts.2.", path)
    for recipe in ("bipolar-w4a8", "w8a8-per-tensor"):
        out, chosen = tmp_path / recipe, load_recipe(recipe)
        options = QuantizeOptions(device=device.type)
        quantize_model(str(tiny_model("qwen3_moe")), chosen, out, calibration=path, options=options)
        assert summarize(out).layers
        quantkit.load(str(out), device=device.type)


def test_experts_of_the_trellis_format_run_one_by_one(tiny_model: Tiny, calibrated: Tiny, tmp_path: Path) -> None:
    """vLLM refuses them by name (test_vllm_experts.py)."""
    recipe, out, calibration = tmp_path / "trellis.yaml", tmp_path / "out", calibrated("mixtral")
    recipe.write_text(TRELLIS, encoding="utf-8")
    chosen = load_recipe(str(recipe))
    quantize_model(str(tiny_model("mixtral")), chosen, out, calibration=calibration, options=QuantizeOptions())
    loaded, original = (AutoModelForCausalLM.from_pretrained(folder) for folder in (out, tiny_model("mixtral")))
    separate_experts(original)
    for name, module in block_linears(original).items():
        assert isinstance(loaded.get_submodule(name).spec, TrellisSpec)
        linear_weight(module).data.copy_(loaded.get_submodule(name).dequantize())
    ids = torch.randint(0, VOCABULARY, (2, 24))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, original(ids).logits, atol=FP32_ATOL, rtol=0)


def _without_tokens(artifact: Path, experts: str, out: Path) -> None:
    """The artifact as if no token had gone to an expert."""
    calibration = load_calibration(artifact)
    for name, stats in calibration.layers.items():
        if name.startswith(experts):
            empty = {field: getattr(stats, field) * 0 for field in ("absmax", "mean_abs", "mean_square", "histogram")}
            calibration.layers[name] = replace(stats, **empty, sample=stats.sample[:0], tokens=0)
    save_calibration(calibration, out)
