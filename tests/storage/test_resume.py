"""What an unfinished work must hold to be gone on with."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import OutputError
from quantkit.storage.resume import workspace


class Stopped(Exception):
    """The work is cut short."""


def begin(place: Path) -> Path:
    """Leave one finished piece; its file."""
    with suppress(Stopped), workspace(place, {"work": 1}, restart=False) as work:
        work.commit({"a": torch.arange(4.0)}, {"layers": {}})
        raise Stopped
    return work.piece(0)


def test_a_finished_piece_is_gone_on_with(tmp_path: Path) -> None:
    begin(tmp_path / "q")
    with workspace(tmp_path / "q", {"work": 1}, restart=False) as work:
        assert work.finished == 1
        assert work.document(0) == {"layers": {}}


def test_a_piece_without_digests_is_refused(tmp_path: Path) -> None:
    """It was not written by this program, or by one that cannot say whether it is whole."""
    piece = begin(tmp_path / "q")
    save_file(load_file(piece), piece)
    with (
        pytest.raises(OutputError, match="its pieces hold no digests; `restart` begins anew"),
        workspace(tmp_path / "q", {"work": 1}, restart=False),
    ):
        pytest.fail("the work went on")
