from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.jobs import serve
from tests.cli.calls import refusal, run
from tests.pipeline import quantize_tiny


@pytest.fixture
def checkpoint(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    quantize_tiny(tiny_model("opt"), tmp_path / "q")
    return tmp_path / "q"


@pytest.fixture
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_is_installed", lambda name: name == "vllm")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


@pytest.mark.usefixtures("_vllm")
def test_becomes_vllm_with_its_own_options(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, tuple[str, ...]]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append((path, arguments)))
    result = run("serve", checkpoint, "--port", "8001", "--tensor-parallel-size=2")
    assert result.exit_code == 0, result.stderr
    options = ("serve", str(checkpoint), "--port", "8001", "--tensor-parallel-size=2")
    assert started == [(sys.executable, (sys.executable, "-m", "vllm.entrypoints.cli.main", *options))]
    assert result.stderr == f"$ vllm serve {checkpoint} --port 8001 --tensor-parallel-size=2\n"


def test_without_vllm_the_pip_line_is_printed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_is_installed", lambda name: False)
    assert "pip install 'quantkit[vllm]'" in refusal("serve", checkpoint)


@pytest.mark.usefixtures("_vllm")
def test_a_plugin_that_is_switched_off_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "add quantkit" in refusal("serve", checkpoint)


@pytest.mark.usefixtures("_vllm")
def test_a_plugin_without_metadata_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    assert "install it with pip" in refusal("serve", checkpoint)


def test_the_installed_package_announces_the_plugin() -> None:
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="quantkit")
    assert callable(entry.load())


def test_a_folder_that_is_no_checkpoint_is_refused(tiny_model: Callable[[str], Path]) -> None:
    assert "is it a quantized model?" in refusal("serve", tiny_model("opt"))


@pytest.mark.usefixtures("_vllm")
def test_a_damaged_checkpoint_is_refused_before_vllm_starts(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "cannot be read" in refusal("serve", checkpoint)
