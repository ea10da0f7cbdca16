"""What an unfinished work must hold to be gone on with."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import OutputError
from quantkit.ranks import ALONE
from quantkit.storage.resume import Commits, workspace


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


def test_the_state_of_a_piece_is_in_its_file_wherever_it_was_made(tmp_path: Path, device: torch.device) -> None:
    with workspace(tmp_path / "q", {"work": 1}, restart=False) as work:
        with Commits(work, ALONE, device) as commits:
            state = work.state(1, (9, 5, 7), torch.bfloat16)
            made = torch.randn(9, 5, 7, device=device).bfloat16()
            place = made if device.type == "cuda" else state.copy_(made)
            commits.commit({"a": torch.arange(4.0)}, {}, place)
        assert torch.equal(work.state(1, (9, 5, 7), torch.bfloat16), made.cpu())
        work.check_state(made.cpu())
