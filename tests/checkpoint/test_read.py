"""What a checkpoint folder may hold, and what loading and ``inspect`` refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantkit.checkpoint.read import read_checkpoint, weight_files
from quantkit.checkpoint.summary import summarize
from quantkit.errors import CheckpointError
from quantkit.integrations.transformers import check_readable, load_checkpoint
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.recipe import load_recipe
from quantkit.storage.tensors import VERIFY_VARIABLE
from tests.pipeline import quantize_tiny

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def whole(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("read") / "q"
    quantize_tiny(tiny_model("llama"), out)
    return out


@pytest.fixture(scope="module")
def flat(
    tiny_model: Callable[[str], Path], calibrated: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out, recipe = tmp_path_factory.mktemp("read") / "flat", load_recipe("flatten-o1")
    model, calibration = str(tiny_model("llama")), calibrated("llama")
    quantize_model(model, recipe, out, calibration=calibration, options=QuantizeOptions())
    return out


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to alter."""
    return Path(shutil.copytree(whole, tmp_path / "q"))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(str(folder), device="cpu", dtype=None)
    return str(caught.value)


def without_digests(folder: Path, change: Callable[[Tensors], None] = lambda tensors: None) -> None:
    """Write the weights again as a quantkit before digests did, with a change; and as it did the report."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = json.loads((folder / "quantkit.json").read_text())
    report.pop("files", None)
    (folder / "quantkit.json").write_text(json.dumps(report))


def edit(folder: Path, file: str, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((folder / file).read_text())
    change(document)
    (folder / file).write_text(json.dumps(document))


def first_spec(config: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = config["quantization_config"]["groups"][0]["spec"]
    return spec


def test_checkpoints_without_digests_load_and_are_called_unverified(whole: Path, copy: Path) -> None:
    without_digests(copy)
    loaded, reference = (load_checkpoint(str(folder), device="cpu", dtype=None) for folder in (copy, whole))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), reference.parameters(), strict=True))
    assert summarize(copy).digests == 0
    with pytest.raises(CheckpointError, match="holds no digests to compare"):
        summarize(copy, verify=True)


def test_a_model_saved_again_by_transformers_is_unverified(whole: Path, tmp_path: Path) -> None:
    load_checkpoint(str(whole), device="cpu", dtype=None).save_pretrained(tmp_path / "again")
    assert summarize(tmp_path / "again").digests == 0
    load_checkpoint(str(tmp_path / "again"), device="cpu", dtype=None)


def test_verify_compares_every_tensor(whole: Path, copy: Path) -> None:
    summary = summarize(whole, verify=True)
    assert summary.verified
    assert summary.digests == len(load_file(whole / "model.safetensors"))
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert not summarize(copy).verified
    with pytest.raises(CheckpointError, match="is not what was written: its digest differs"):
        summarize(copy, verify=True)


def test_every_way_to_load_compares_digests_unless_it_is_turned_off(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert "digest differs" in refusal(copy)
    with pytest.raises(CheckpointError, match="digest differs"):
        AutoModelForCausalLM.from_pretrained(copy)
    with pytest.raises(CheckpointError, match="digest differs"):
        check_readable(copy)
    monkeypatch.setenv(VERIFY_VARIABLE, "0")
    load_checkpoint(str(copy), device="cpu", dtype=None)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_an_altered_small_file_is_refused_until_its_line_is_removed(file: str, copy: Path) -> None:
    (copy / file).write_text((copy / file).read_text() + "\n")
    assert f"{file} was altered after quantkit wrote it" in refusal(copy)
    edit(copy, "quantkit.json", lambda report: report["files"].pop(file))
    load_checkpoint(str(copy), device="cpu", dtype=None)


def test_weights_of_another_quantization_are_refused(copy: Path) -> None:
    """All shapes are the same: only the digest of quantization_config in the header tells."""
    edit(copy, "quantkit.json", lambda report: report["files"].pop("config.json"))
    edit(copy, "config.json", lambda config: config["quantization_config"]["meta"].update(recipe="another"))
    assert "written with another quantization_config" in refusal(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: spec.update(weight_bits=True), "weight_bits is True, not int"),
        (lambda spec: spec.update(weight_bits=4.0), "weight_bits is 4.0, not int"),
        (lambda spec: spec.update(offset=0), "offset is 0, not bool"),
        (lambda spec: spec.update(format=["bcq"]), "unknown format"),
        (lambda spec: spec.update(offset=False), "offset: is stored, but quantization_config knows no such tensor"),
    ],
    ids=["bool", "float", "int", "list", "offset-false-over-stored-offsets"],
)
def test_an_altered_spec_is_refused(change: Callable[[dict[str, Any]], None], message: str, copy: Path) -> None:
    edit(copy, "config.json", lambda config: change(first_spec(config)))
    assert message in refusal(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({f"{LAYER}.extra": torch.ones(1)}), f"{LAYER}.extra: is stored, but"),
        (lambda t: t.update({"model.extra.weight": torch.ones(1)}), "unexpected keys such as model.extra.weight"),
        (lambda t: t.pop("model.norm.weight"), "missing keys such as model.norm.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"model.norm.weight: stored as F32[3], the model"),
        (lambda t: t.update({"model.norm.weight": torch.ones(72, dtype=torch.int32)}), "stored as I32[72], the model"),
        (lambda t: t[f"{LAYER}.scales"].view(-1)[5].fill_(float("nan")), f"{LAYER}.scales: holds NaN or Inf"),
        (lambda t: t[f"{LAYER}.offset"].view(-1)[5].fill_(float("inf")), f"{LAYER}.offset: holds NaN or Inf"),
    ],
    ids=["of-a-layer", "of-none", "missing", "shape", "dtype", "nan", "inf"],
)
def test_tensors_that_do_not_fit_are_refused_without_digests_too(
    change: Callable[[Tensors], None], message: str, copy: Path
) -> None:
    without_digests(copy, change)
    assert message in refusal(copy)


def test_a_scale_code_beyond_its_range_is_refused_without_digests_too(
    tiny_model: Callable[[str], Path], calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, recipe = tmp_path / "q", load_recipe("bipolar-w4a8-g128")
    quantize_model(str(tiny_model("llama")), recipe, folder, calibration=calibrated("llama"), options=QuantizeOptions())
    load_checkpoint(str(folder), device="cpu", dtype=None)
    name = "model.layers.0.self_attn.q_proj.scales"
    without_digests(folder, lambda tensors: tensors[name][-1].fill_(9))
    assert f"{name}: holds a code above 8; copy" in refusal(folder)


@pytest.mark.parametrize(
    ("field", "column", "value", "message"),
    [
        ("source_channel", -1, 72, "source_channel holds 72; only 0 to 71 exist"),
        ("source_channel", -1, -1, "source_channel holds -1"),
        ("source_segment", -1, 10**6, "source_segment holds 1000000"),
        ("source_segment", -1, -5, "source_segment holds -5"),
        ("source_channel", 3, 4, "source_channel does not begin with the channels 0 to 71 in order"),
        ("source_segment", 3, 1, "source_channel does not begin with the channels 0 to 71 in order"),
    ],
    ids=["channel-high", "channel-low", "segment-high", "segment-low", "order", "first-slice"],
)
def test_indices_that_lead_outside_are_refused_without_digests_too(
    field: str, column: int, value: int, message: str, flat: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(flat, tmp_path / "q"))
    name = f"model.layers.0.self_attn.q_proj.{field}"
    without_digests(folder, lambda tensors: tensors[name][column].fill_(value))
    assert f"q_proj: an index is wrong ({message}" in refusal(folder)
    with pytest.raises(CheckpointError, match="an index is wrong"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[]", "is malformed"),
        ('{"weight_map": {}}', "is malformed"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "which is no file of this folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "which is no file of this folder"),
        ('{"weight_map": {"a": 3}}', "is malformed"),
        ("{", "cannot be read"),
    ],
    ids=["list", "empty", "above", "absolute", "number", "syntax"],
)
def test_an_index_names_files_of_the_folder(index: str, message: str, copy: Path) -> None:
    (copy / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        weight_files(copy)


def test_a_tensor_that_is_stored_twice_is_refused(copy: Path) -> None:
    without_digests(copy)
    shutil.copy(copy / "model.safetensors", copy / "other.safetensors")
    weight_map = {"a": "model.safetensors", "b": "other.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="is stored twice"):
        read_checkpoint(copy)
