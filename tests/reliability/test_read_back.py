"""quantize opens what it wrote before it is published: a disk that returns other bytes leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import CheckpointError
from quantkit.jobs import quantize as job
from quantkit.storage.tensors import VERIFY_VARIABLE
from tests.pipeline import quantize_tiny


def last_bit(folder: Path) -> None:
    """One weight of the last tensor."""
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def lost_end(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-64])


def lost_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize("verify", ["1", "0"])
@pytest.mark.parametrize("damage", [last_bit, lost_end, lost_tokenizer])
def test_what_was_written_wrong_is_refused_and_never_published(
    damage: Callable[[Path], None],
    verify: str,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where loading is told not to compare digests."""
    save = job.save_checkpoint

    def save_and_damage(model: Any, report: Any, folder: Path, tensors: Any) -> None:
        save(model, report, folder, tensors)
        damage(folder)

    monkeypatch.setattr(job, "save_checkpoint", save_and_damage)
    monkeypatch.setenv(VERIFY_VARIABLE, verify)
    with pytest.raises(CheckpointError):
        quantize_tiny(tiny_model("opt"), tmp_path / "q")
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".q.quantkit-work")]
    assert left == []  # but for the finished blocks, which the next run begins with
