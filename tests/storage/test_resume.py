"""What an unfinished work must hold to be gone on with."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.errors import OutputError
from quantkit.ranks import ALONE
from quantkit.storage.commits import Commits
from quantkit.storage.resume import passing_workspace, workspace


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


def saved_every(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr("quantkit.storage.commits.SAVE_SECONDS", seconds)


@pytest.mark.parametrize("held", ["in its file", "in memory"])
def test_the_state_of_a_piece_is_in_its_file_wherever_it_was_made(
    held: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_every(monkeypatch, 0)
    with workspace(tmp_path / "q", {"work": 1}, restart=False) as work:
        made = torch.randn(9, 5, 7, device=device).bfloat16()
        with Commits(work, ALONE, device) as commits:
            place = made if held == "in memory" else work.state(1, (9, 5, 7), torch.bfloat16).copy_(made)
            commits.commit({"a": torch.arange(4.0)}, {}, place)
        assert torch.equal(work.state(1, (9, 5, 7), torch.bfloat16), made.cpu())
        work.check_state(made.cpu())


def test_a_state_that_no_later_run_finds_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    saved_every(monkeypatch, 0)
    with passing_workspace({}) as work:
        with Commits(work, ALONE, torch.device("cpu")) as commits:
            commits.commit({"a": torch.arange(4.0)}, {}, torch.randn(3, 4))
        assert [path.name for path in work.folder.iterdir()] == [work.piece(0).name]
        assert torch.equal(load_file(work.piece(0))["a"], torch.arange(4.0))


def test_a_piece_whose_state_was_not_saved_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, piece = torch.randn(3, 4), {"a": torch.arange(4.0)}
    with suppress(Stopped), workspace(tmp_path / "q", {"work": 1}, restart=False) as work:
        with Commits(work, ALONE, torch.device("cpu")) as commits:
            for seconds in (0, 1e9, 1e9):
                saved_every(monkeypatch, seconds)
                commits.commit(piece, {}, state)
        assert work.finished == 3
        raise Stopped
    with workspace(tmp_path / "q", {"work": 1}, restart=False) as work:
        assert work.finished == 1
        assert not work.piece(1).exists()
        work.check_state(work.state(1, (3, 4), torch.float32))


def test_nothing_stays_of_pieces_of_which_no_state_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_every(monkeypatch, 1e9)
    with suppress(Stopped), workspace(tmp_path / "q", {"work": 1}, restart=False) as work:
        with Commits(work, ALONE, torch.device("cpu")) as commits:
            commits.commit({"a": torch.arange(4.0)}, {}, torch.randn(3, 4))
        raise Stopped
    assert list(tmp_path.iterdir()) == []


def test_a_piece_behind_one_that_the_disk_did_not_take_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces wait in line for a thread, as with a GPU; the second must not stand under the first one's number."""

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with suppress(Stopped), workspace(tmp_path / "q", {"work": 1}, restart=False) as work:
        saved_every(monkeypatch, 0)
        monkeypatch.setattr("quantkit.storage.resume.write_at", full)
        commits = Commits(work, ALONE, torch.device("cuda"))
        commits.commit({"a": torch.arange(4.0)}, {}, torch.randn(3, 4))
        commits.commit({"b": torch.arange(4.0)}, {})
        with pytest.raises(OutputError, match="No space left on device"):
            commits.__exit__(None, None, None)
        assert work.finished == 0
        assert not work.piece(0).exists()
        raise Stopped
