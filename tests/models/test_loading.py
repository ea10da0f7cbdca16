"""Loading: every way a model can be missing or damaged, in one line; fingerprints."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.errors import DeviceError, ModelError
from quantkit.models.loading import fingerprint, is_quantized, load_model, resolve_model
from tests.network import HUB_ANSWER_SECONDS, cut_network
from tests.tiny import save_tiny_model


@pytest.fixture
def copy(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_network(monkeypatch)


def _refusal(model: str) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(model)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gpt2"])
def test_load_gives_an_fp32_eval_model_and_its_tokenizer(family: str, tiny_model: Callable[[str], Path]) -> None:
    model, tokenizer = load_model(str(tiny_model(family)))
    assert not model.training
    assert model.dtype == torch.float32
    assert tokenizer.decode(tokenizer("a line of text")["input_ids"]) == "a line of text"


def test_missing_folder_is_named() -> None:
    assert "/nowhere/model: no such folder" in _refusal("/nowhere/model")


def test_unreachable_hub_answers_in_time_and_names_the_offline_ways(no_network: None) -> None:
    started = time.perf_counter()
    message = _refusal("some/model")
    assert time.perf_counter() - started < HUB_ANSWER_SECONDS
    assert "cannot be reached" in message
    assert "smollm2-135m" in message
    assert "HF_HUB_OFFLINE=1" in message


def test_offline_mode_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in _refusal("some/model")


def test_config_missing_or_broken_is_named(copy: Path) -> None:
    (copy / "config.json").write_text("{broken")
    assert "config.json cannot be read" in _refusal(str(copy))
    (copy / "config.json").unlink()
    assert "no config.json" in _refusal(str(copy))


def test_unknown_architecture_is_refused(copy: Path) -> None:
    (copy / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    assert "unheard_of" in _refusal(str(copy))


def test_missing_weights_are_named(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "no weights" in _refusal(str(copy))


def test_truncated_weights_are_refused(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    assert "cannot be loaded" in _refusal(str(copy))


def test_absent_tensor_is_refused_instead_of_filled_with_noise(copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert "1 weights are missing, e.g. model.layers.1.mlp.down_proj.weight" in _refusal(str(copy))


def test_misshaped_tensor_is_refused(copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight" in _refusal(str(copy))


def test_missing_tokenizer_is_named(copy: Path) -> None:
    for file in copy.glob("*token*"):
        file.unlink()
    assert "tokenizer of" in _refusal(str(copy))


def test_gpu_that_is_not_there_is_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(DeviceError, match="no usable GPU"):
        load_model(str(tiny_model("llama")), device="cuda")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("banana", "not a device"),
        ("cuda:x", "not a device"),
        ("meta", "nothing here runs"),
        ("cuda:99", "no usable GPU"),
    ],
)
def test_other_devices_are_refused(name: str, reason: str, tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(DeviceError, match=rf"`device` {name}: {reason}.*; use"):
        load_model(str(tiny_model("llama")), device=name)


def test_quantized_folder_is_recognized(copy: Path) -> None:
    assert not is_quantized(str(copy))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "quantkit"}}))
    assert is_quantized(str(copy))


def test_fingerprint_survives_the_dtype_but_not_a_change(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = str(tiny_model("llama"))
    model, _ = load_model(folder)
    reference = fingerprint(model)
    assert fingerprint(load_model(folder, dtype=torch.bfloat16)[0]) == reference
    assert fingerprint(load_model(str(save_tiny_model("llama", tmp_path, seed=1)))[0]) != reference
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    assert fingerprint(model) != reference


def test_resolve_finds_folders_without_asking_the_hub(no_network: None, tiny_model: Callable[[str], Path]) -> None:
    source = resolve_model(str(tiny_model("opt")))
    assert source.offline is None
    assert Path(source.location) == tiny_model("opt")


def test_a_pipe_in_the_folder_is_refused_instead_of_waited_for(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    os.mkfifo(copy / "generation_config.json")
    assert "generation_config.json is no regular file" in _refusal(str(copy))


def test_code_of_a_model_is_never_run(copy: Path, tmp_path: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "cannot be loaded" in _refusal(str(copy))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", '{"version": []}'),
        ("tokenizer_config.json", "[1]"),
        ("config.json", '{"model_type": "llama", "hidden_size": "many"}'),
        ("config.json", '{"model_type": "llama", "hidden_size": true}'),
        ("config.json", '{"model_type": {}}'),
        ("config.json", '{"model_type": "llama", "model_type": "opt"}'),
    ],
    ids=["tokenizer", "tokenizer-list", "text", "bool", "type", "twice"],
)
def test_every_error_of_reading_metadata_is_one_line(file: str, content: str, copy: Path) -> None:
    (copy / file).write_text(content)
    assert _refusal(str(copy))
