"""Written folders: what save_pretrained would write, in shards, and recognised as ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantkit.checkpoint import write as write_module
from quantkit.checkpoint.summary import summarize
from quantkit.checkpoint.write import foreign, stored_tensors
from quantkit.integrations.transformers import load_checkpoint
from quantkit.models.loading import load_model
from tests.pipeline import FAMILIES, quantize_tiny


@pytest.fixture
def folder(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    quantize_tiny(tiny_model("opt"), tmp_path / "q")
    return tmp_path / "q"


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_tensors_are_those_of_save_pretrained(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, _ = load_model(str(tiny_model(family)))
    model.save_pretrained(tmp_path)
    stored, saved = stored_tensors(model), load_file(tmp_path / "model.safetensors")
    assert stored.keys() == saved.keys()
    assert all(torch.equal(stored[name], saved[name]) for name in saved)


def test_large_checkpoints_are_written_in_shards_that_load(
    tiny_model: Callable[[str], Path], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_module, "MAX_SHARD_BYTES", 60_000)
    quantize_tiny(tiny_model("opt"), tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 2
    assert summarize(tmp_path / "shards", verify=True).verified
    whole, sharded = (load_checkpoint(str(path), device="cpu", dtype=None) for path in (folder, tmp_path / "shards"))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), sharded.parameters(), strict=True))
    assert foreign(tmp_path / "shards") is None


def test_a_folder_is_ours_where_quantkit_wrote_all_of_it(folder: Path) -> None:
    assert foreign(folder) is None
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("mine")
    assert foreign(folder) == "holds notes/a.txt, which quantkit did not write there"


@pytest.mark.parametrize("name", ["notes.txt", "calibration.safetensors", "model-2.safetensors", "config.json.bak"])
def test_any_other_file_makes_it_foreign(name: str, folder: Path) -> None:
    (folder / name).write_text("mine")
    assert foreign(folder) == f"holds {name}, which quantkit did not write there"
    report = json.loads((folder / "quantkit.json").read_text())
    del report["files"]  # as an earlier quantkit wrote it
    (folder / "quantkit.json").write_text(json.dumps(report))
    if name == "model-2.safetensors":
        (folder / name).rename(folder / "model-00001-of-00002.safetensors")
        assert foreign(folder) is None
    else:
        assert foreign(folder) == f"holds {name}, which quantkit did not write there"


def test_a_link_is_no_file_of_ours(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (folder / "link").symlink_to(tmp_path / "precious")
    assert foreign(folder) == "holds link, which quantkit did not write there"


def test_a_folder_without_a_readable_report_is_foreign(folder: Path) -> None:
    (folder / "quantkit.json").write_text("{")
    assert foreign(folder) == "holds a quantkit.json that cannot be read"
    (folder / "quantkit.json").unlink()
    assert foreign(folder) == "holds no quantkit checkpoint"
