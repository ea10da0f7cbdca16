from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import quantkit
from quantkit.cli.app import app
from tests.pipeline import quantize_tiny


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("inspect") / "out"
    quantize_tiny(tiny_model("opt"), out)
    return out


def test_every_layer_is_listed_with_its_storage(checkpoint: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(checkpoint)], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    line = next(line for line in result.stdout.splitlines() if "layers.1.fc1" in line)
    # q (1 + 16/g) + 16/g bits per weight at q = 4, g = 32
    assert all(part in line for part in ("bcq", "W4A16", "32", "128 x 64", "6.500"))
    assert "6.500 over 12 quantized layers" in result.stdout
    assert "lm_head" in result.stdout


def test_checkpoint_saved_by_transformers_is_still_described(checkpoint: Path, tmp_path: Path) -> None:
    quantkit.load(str(checkpoint)).save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "6.500 over 12 quantized layers" in result.stdout


def test_unquantized_model_is_refused(tiny_model: Callable[[str], Path]) -> None:
    result = CliRunner().invoke(app, ["inspect", str(tiny_model("opt"))])
    assert result.exit_code == 2
    assert "no quantization_config" in result.stderr


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 2
    assert "config.json cannot be read" in result.stderr
