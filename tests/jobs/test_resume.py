"""Work that is cut short and gone on with: the same bytes, and refusals where it is no longer the same work."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.models.stream import ModelStream
from quantkit.storage.resume import Workspace
from tests.cli.calls import refusal, run

TinyModel = Callable[[str], Path]
Calibrated = Callable[[str], Path]
Reference = Callable[..., dict[str, bytes]]
# What is solved is not the point.
QUICK = ("--recipe", "bcq-w4-g128-comp", "--set", "weight_bits=2", "--set", "rounds=1", "--set", "sweeps=0")
FLATTEN, RTN = ("--recipe", "flatten-o3"), ("--recipe", "rtn-w4-g128")
CALIBRATE = ("--seq-len", 32, "--windows", 4)
# Pieces are of the stream's making, whatever the method: so each number, each family and each method once.
# Mixtral's files have other names than its modules; those of gpt-oss hold its experts fused.
WORKS = [
    (QUICK, "llama", 1),
    (QUICK, "llama", 2),
    (QUICK, "llama", 3),
    (FLATTEN, "opt", 2),
    (RTN, "gpt2", 1),
    (QUICK, "mixtral", 2),
    (QUICK, "gpt_oss", 3),
]


def folder_content(out: Path) -> dict[str, bytes]:
    """Of a folder by the names of its files; of a file under no name."""
    return {path.name: path.read_bytes() for path in out.iterdir()} if out.is_dir() else {"": out.read_bytes()}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def cut_short(monkeypatch: pytest.MonkeyPatch, pieces: int, how: Callable[[], None]) -> None:
    """After so many finished pieces the work ends."""
    commit = Workspace.commit

    def counted(self: Workspace, *arguments: Any) -> None:
        commit(self, *arguments)
        if self.finished == pieces:
            how()

    monkeypatch.setattr(Workspace, "commit", counted)


def interrupt() -> None:
    raise KeyboardInterrupt


def blocks_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the blocks that are quantized from here on."""
    from quantkit.jobs import quantize_blocks

    seen: list[int] = []
    quantize = quantize_blocks._quantize_block

    def watched(job: Any, index: int, *rest: Any) -> None:
        seen.append(index)
        quantize(job, index, *rest)

    monkeypatch.setattr(quantize_blocks, "_quantize_block", watched)
    return seen


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """(the program's arguments) -> the files that they make in one go, made once."""
    made: dict[str, dict[str, bytes]] = {}

    def files(*command: Any) -> dict[str, bytes]:
        key = " ".join(map(str, command))
        if key not in made:
            out = tmp_path_factory.mktemp("whole") / ("c.safetensors" if command[0] == "calibrate" else "q")
            assert run(*command, "-o", out).exit_code == 0
            made[key] = folder_content(out)
        return made[key]

    return files


@pytest.mark.parametrize(
    ("recipe", "family", "pieces"), WORKS, ids=[f"{recipe[1]}-{family}-{pieces}" for recipe, family, pieces in WORKS]
)
def test_quantizing_goes_on_to_the_same_bytes(
    recipe: tuple[str, ...],
    family: str,
    pieces: int,
    tiny_model: TinyModel,
    calibrated: Calibrated,
    whole: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calibration = [] if recipe == RTN else ["--calibration", calibrated(family)]
    command = ["quantize", tiny_model(family), *recipe, *calibration]
    expected = whole(*command)
    with monkeypatch.context() as patch:
        cut_short(patch, pieces, interrupt)
        cut = run(*command, "-o", tmp_path / "parts")
    assert f"{pieces} finished pieces stay in" in cut.stderr
    assert not (tmp_path / "parts").exists()
    quantized = blocks_read(monkeypatch)
    again = run(*command, "-o", tmp_path / "parts")
    assert again.exit_code == 0, again.stderr
    assert f"{pieces} pieces are finished" in again.stderr
    assert quantized == list(range(pieces - 1, 2))
    assert folder_content(tmp_path / "parts") == expected
    assert names_in(tmp_path) == ["parts"]


@pytest.mark.parametrize(
    "recipe",
    [("--recipe", "bipolar-w4a4-rotated"), (*QUICK, "--set", "scale_bits=8", "--set", "rotate=online")],
    ids=["folded", "online"],
)
def test_an_untied_head_is_gone_on_with(
    recipe: tuple[str, ...],
    tiny_model: TinyModel,
    calibrated: Calibrated,
    whole: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["quantize", tiny_model("llama"), *recipe, "--calibration", calibrated("llama")]
    expected = whole(*command)
    with monkeypatch.context() as patch:
        cut_short(patch, 2, interrupt)
        run(*command, "-o", tmp_path / "parts")
    done = run(*command, "-o", tmp_path / "parts")
    assert (done.exit_code, "head and embedding become two weights, 0.1 MB more" in done.stderr) == (0, True)
    assert folder_content(tmp_path / "parts") == expected


@pytest.mark.parametrize(("family", "pieces"), [("opt", 1), ("opt", 2), ("mixtral", 1)])
def test_calibrating_goes_on_to_the_same_bytes(
    family: str,
    pieces: int,
    tiny_model: TinyModel,
    text_file: Path,
    whole: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["calibrate", tiny_model(family), "--text", text_file, *CALIBRATE]
    expected, parts = whole(*command), tmp_path / "parts.safetensors"
    with monkeypatch.context() as patch:
        cut_short(patch, pieces, interrupt)
        run(*command, "-o", parts)
    assert not parts.exists()
    again = run(*command, "-o", parts)
    assert f"{pieces} pieces are finished" in again.stderr
    assert folder_content(parts) == expected
    assert names_in(tmp_path) == ["parts.safetensors"]


def hold_in_memory(monkeypatch: pytest.MonkeyPatch, saved: int) -> None:
    """Hidden states are held in memory, as on a GPU; those behind the first ``saved`` pieces are saved, no others."""

    def room(_device: Any, _work: Any, _number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    for module in ("models.streaming", "calibration.runner", "jobs.quantize_blocks"):
        monkeypatch.setattr(f"quantkit.{module}.state_room", room)
    commit = Workspace.commit

    def counted(self: Workspace, *arguments: Any) -> None:
        commit(self, *arguments)
        if self.finished >= saved:
            monkeypatch.setattr("quantkit.storage.commits.SAVE_SECONDS", 1e9)

    monkeypatch.setattr("quantkit.storage.commits.SAVE_SECONDS", 0 if saved else 1e9)
    monkeypatch.setattr(Workspace, "commit", counted)


@pytest.mark.parametrize(
    ("pieces", "saved", "kept"),
    [(2, 2, 2), (2, 1, 1), (2, 0, 0), (3, 1, 3), (3, 0, 3)],
    ids=["last-state-saved", "earlier-state-saved", "no-state-saved", "all-finished", "all-finished-none-saved"],
)
def test_quantizing_goes_on_from_the_last_hidden_states_that_were_saved(
    pieces: int,
    saved: int,
    kept: int,
    tiny_model: TinyModel,
    calibrated: Calibrated,
    whole: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ["quantize", tiny_model("llama"), *QUICK, "--calibration", calibrated("llama")]
    expected = whole(*command)
    with monkeypatch.context() as patch:
        hold_in_memory(patch, saved)
        cut_short(patch, pieces, interrupt)
        cut = run(*command, "-o", tmp_path / "parts")
    assert (f"{kept} finished pieces stay in" in cut.stderr) == (kept > 0)
    quantized = blocks_read(monkeypatch)
    again = run(*command, "-o", tmp_path / "parts")
    assert again.exit_code == 0, again.stderr
    assert (f"{kept} pieces are finished" in again.stderr) == (kept > 0)
    assert quantized == list(range(max(0, kept - 1), 2))
    assert folder_content(tmp_path / "parts") == expected
    assert names_in(tmp_path) == ["parts"]


def killed_behind(pieces: int, hold: Callable[[pytest.MonkeyPatch], None], *command: Any) -> None:
    """The program in a child of this process, killed behind so many finished pieces."""
    child = os.fork()
    if not child:
        patch = pytest.MonkeyPatch()
        hold(patch)
        cut_short(patch, pieces, lambda: os.kill(os.getpid(), signal.SIGKILL))
        run(*command)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("saved", [0, 1], ids=["none-saved", "first-saved"])
@pytest.mark.parametrize("command", ["calibrate", "quantize"])
def test_a_run_that_was_killed_between_saves_goes_on_to_the_same_bytes(
    command: str,
    saved: int,
    tiny_model: TinyModel,
    calibrated: Calibrated,
    whole: Reference,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces, parts = 1 if command == "calibrate" else 2, tmp_path / "parts.safetensors"
    if command == "calibrate":
        arguments = [command, tiny_model("opt"), "--text", text_file, *CALIBRATE]
    else:
        arguments = [command, tiny_model("opt"), *QUICK, "--calibration", calibrated("opt")]
    expected = whole(*arguments)
    killed_behind(pieces, lambda patch: hold_in_memory(patch, saved), *arguments, "-o", parts)
    hold_in_memory(monkeypatch, 0)
    again = run(*arguments, "-o", parts)
    assert again.exit_code == 0, again.stderr
    assert ("going on" in again.stderr) == (saved > 0)
    assert folder_content(parts) == expected
    assert names_in(tmp_path) == ["parts.safetensors"]


@pytest.fixture(scope="module")
def killed(tiny_model: TinyModel, calibrated: Calibrated, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed behind the first block."""
    folder = tmp_path_factory.mktemp("killed")
    killed_behind(2, lambda _patch: None, *unfinished_command(tiny_model, calibrated, folder))
    return folder


def unfinished_command(tiny_model: TinyModel, calibrated: Calibrated, folder: Path) -> tuple[Any, ...]:
    return ("quantize", tiny_model("opt"), *QUICK, "--calibration", calibrated("opt"), "-o", folder / "q")


@pytest.fixture
def unfinished(killed: Path, tiny_model: TinyModel, calibrated: Calibrated, tmp_path: Path) -> tuple[Any, ...]:
    """A command whose first run was killed behind the first block; its work is copied."""
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    return unfinished_command(tiny_model, calibrated, tmp_path)


def test_what_a_killed_run_left_is_found(unfinished: tuple[Any, ...], tmp_path: Path) -> None:
    assert ".q.quantkit-work" in names_in(tmp_path)
    again = run(*unfinished)
    assert again.exit_code == 0, again.stderr
    assert "going on with the work of an earlier run" in again.stderr
    assert names_in(tmp_path) == ["q"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (["--set", "damping=0.25"], "another recipe"),
        (["--activations", "bf16"], "another activations"),
    ],
    ids=["recipe", "activations"],
)
def test_other_work_is_refused_and_begun_anew_when_asked(
    change: list[str], what: str, unfinished: tuple[Any, ...], tmp_path: Path
) -> None:
    message = refusal(*unfinished, *change)
    assert what in message
    assert "--restart" in message
    again = run(*unfinished, *change, "--restart")
    assert again.exit_code == 0, again.stderr
    assert "going on" not in again.stderr
    assert names_in(tmp_path) == ["q"]


def test_another_version_is_refused(unfinished: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.__version__", "9.9")
    assert "another version" in refusal(*unfinished)


@pytest.mark.parametrize("name", ["piece-00001.safetensors", "state-00002"])
def test_altered_pieces_are_refused(name: str, unfinished: tuple[Any, ...], tmp_path: Path) -> None:
    path = tmp_path / ".q.quantkit-work" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    refused = run(*unfinished)
    assert refused.exit_code == 2
    assert "is not what was written" in refused.stderr
    assert run(*unfinished, "--restart").exit_code == 0


def test_one_part_of_the_model_is_in_memory_at_a_time(
    tiny_model: TinyModel, calibrated: Calibrated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.jobs import quantize_blocks

    quantize, held = quantize_blocks._quantize_block, []

    def watched(job: Any, index: int, *rest: Any) -> None:
        stream: ModelStream = job.stream
        held.append({stream.owner(name) for name, one in stream.model.named_parameters() if not one.is_meta})
        quantize(job, index, *rest)

    monkeypatch.setattr(quantize_blocks, "_quantize_block", watched)
    command = ["quantize", tiny_model("opt"), *QUICK, "--calibration", calibrated("opt")]
    assert run(*command, "-o", tmp_path / "q").exit_code == 0
    assert held == [{"model.decoder.layers.0"}, {"model.decoder.layers.1"}]


def test_a_disk_without_room_for_hidden_states_is_refused(
    tiny_model: TinyModel, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quantkit.storage.resume.os.posix_fallocate", full)
    command = ["calibrate", tiny_model("opt"), "--text", text_file, "--seq-len", 32, "--windows", 2]
    assert "No space left on device" in refusal(*command, "-o", tmp_path / "c.safetensors")
    assert names_in(tmp_path) == []
