"""Quantized checkpoints of every family through the real transformers loader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import quantkit
from quantkit.errors import CheckpointError
from quantkit.models.families import block_linears, linear_weight
from quantkit.nn.quantized_linear import QuantizedLinear
from tests.pipeline import FAMILIES, quantize_tiny

TinyModel = Callable[[str], Path]
PROMPT = torch.tensor([[5, 40, 100, 7, 22]])
FP32_ATOL = 1e-5  # one GEMM against a GEMM with the same weights through another path


@pytest.fixture(scope="module")
def checkpoint(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("quantized") / family
            quantize_tiny(tiny_model(family), made[family])
        return made[family]

    return folder


@pytest.fixture
def broken(checkpoint: TinyModel, tmp_path: Path) -> Path:
    """A copy of the Llama checkpoint to damage."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "broken"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_and_generates(family: str, checkpoint: TinyModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint(family))
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) > 0
    tokens = model.generate(PROMPT, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert tokens.shape[1] > PROMPT.shape[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_model_computes_with_the_dequantized_weights(
    family: str, checkpoint: TinyModel, tiny_model: TinyModel
) -> None:
    quantized = quantkit.load(str(checkpoint(family)))
    original = AutoModelForCausalLM.from_pretrained(tiny_model(family))
    for name, module in block_linears(original).items():
        linear_weight(module).data.copy_(quantized.get_submodule(name).dequantize())
    with torch.no_grad():
        torch.testing.assert_close(quantized(PROMPT).logits, original(PROMPT).logits, atol=FP32_ATOL, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_save_pretrained_round_trips_bit_for_bit(family: str, checkpoint: TinyModel, tmp_path: Path) -> None:
    model = quantkit.load(str(checkpoint(family)))
    model.save_pretrained(tmp_path)
    first, second = (load_file(folder / "model.safetensors") for folder in (checkpoint(family), tmp_path))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(model(PROMPT).logits, again(PROMPT).logits)


def test_base_model_loads_from_the_same_folder(checkpoint: TinyModel) -> None:
    base = AutoModel.from_pretrained(checkpoint("llama"))
    whole = quantkit.load(str(checkpoint("llama")))
    with torch.no_grad():
        assert torch.equal(base(PROMPT).last_hidden_state, whole.model(PROMPT).last_hidden_state)


def test_half_precision_leaves_the_stored_tensors_alone(checkpoint: TinyModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.bfloat16).to(torch.float16)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert (layer.signs.dtype, layer.scales.dtype) == (torch.uint8, torch.float16)
    moved = model.to(torch.bfloat16)
    assert moved.get_submodule("model.layers.0.mlp.up_proj").scales.dtype == torch.float16
    assert moved(PROMPT).logits.dtype == torch.bfloat16


def test_truncated_file_is_refused(broken: Path) -> None:
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        quantkit.load(str(broken))


@pytest.mark.parametrize("change", ["missing", "shape", "dtype"])
def test_tensor_that_does_not_fit_is_refused_by_name(change: str, broken: Path) -> None:
    path, name = broken / "model.safetensors", "model.layers.1.mlp.up_proj.scales"
    tensors = load_file(path)
    scales = tensors.pop(name)
    if change != "missing":
        tensors[name] = scales[:, :-1].contiguous() if change == "shape" else scales.float()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        quantkit.load(str(broken))


def test_unknown_format_version_is_refused(broken: Path) -> None:
    path = broken / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["format_version"] = 99
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="format_version is 99"):
        quantkit.load(str(broken))


def test_layer_the_model_lacks_is_refused(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_VERIFY", "0")  # else the edited config.json is refused as such
    path = broken / "config.json"
    config = json.loads(path.read_text())
    config["num_hidden_layers"] = 1
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1"):
        quantkit.load(str(broken))
