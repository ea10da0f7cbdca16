"""kill -9, a full disk and a broken one at every step of writing: the old result or the new one is whole, always."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.calibration.artifact import load_calibration, write_calibration
from quantkit.checkpoint.read import read_headers, weight_files
from quantkit.checkpoint.write import foreign, save_checkpoint, save_surroundings
from quantkit.errors import OutputError, refusing
from quantkit.integrations.transformers import load_checkpoint
from quantkit.models.loading import load_model
from quantkit.storage import rename as rename_module
from quantkit.storage.output import output_file, output_folder, write_file
from tests.pipeline import quantize_tiny
from tests.reliability.faults import BROKEN_DISK, ERRORS, NO_SPACE, killed, refusal, steps_of

Content = dict[str, bytes]
Write = Callable[[Path, str], None]


def content(folder: Path) -> Content:
    """Every file below a folder, by its path in there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def put(standing: Path | None, place: Path) -> None:
    """Make a folder hold ``out``, a copy of another folder, or nothing."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    if standing is not None:
        shutil.copytree(standing, place / "out")


@pytest.fixture(scope="module")
def write_checkpoint(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Write:
    """(place, a word for the report) -> writes a quantized model there as ``quantize --overwrite`` does."""
    folder = tmp_path_factory.mktemp("faults") / "q"
    quantize_tiny(tiny_model("opt"), folder)
    model = load_checkpoint(str(folder), device="cpu", dtype=None)
    _, tokenizer = load_model(str(tiny_model("opt")))
    stored = {name: file for file in read_headers(weight_files(folder)) for name in file.tensors}

    def write(out: Path, word: str) -> None:
        failure = refusing("output cannot be written", OutputError)
        with output_folder(out, replace=True, foreign=foreign) as output, failure:
            save_surroundings(model, tokenizer, output.work)
            save_checkpoint(model, {"model": word, "layers": {}}, output.work, stored)
            output.publish()

    return write


@pytest.fixture(params=[True, False], ids=["over-an-old-one", "new"])
def case(
    request: pytest.FixtureRequest, write_checkpoint: Write, tmp_path: Path
) -> tuple[Path | None, Content, Content]:
    """(what stands there or None, its content, the content of what is written)."""
    for word in ("old", "new"):
        write_checkpoint(tmp_path / word, word)
    standing = tmp_path / "old" if request.param else None
    return standing, content(tmp_path / "old") if standing else {}, content(tmp_path / "new")


def test_a_kill_at_any_step_leaves_the_old_or_the_new_checkpoint(
    case: tuple[Path | None, Content, Content], write_checkpoint: Write, tmp_path: Path
) -> None:
    (standing, old, new), place = case, tmp_path / "place"

    def job() -> None:
        write_checkpoint(place / "out", "new")

    put(standing, place)
    steps = steps_of(job)
    assert len(steps) > 30
    for at, step in enumerate(steps):
        put(standing, place)
        assert killed(job, at), step
        assert content(place / "out") in (old, new), step
        with output_folder(place / "out", replace=True, foreign=foreign):
            """The next writer removes what was left."""
        assert names(place) in (["out"], []), step
        assert content(place / "out") in (old, new), step


def test_a_kill_between_two_renames_leaves_the_old_checkpoint_to_the_next_writer(
    write_checkpoint: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that cannot exchange two folders."""
    monkeypatch.setattr(rename_module, "_rename", lambda source, target, flags: False)
    for word in ("old", "new"):
        write_checkpoint(tmp_path / word, word)
    old, new, place = content(tmp_path / "old"), content(tmp_path / "new"), tmp_path / "place"

    def job() -> None:
        write_checkpoint(place / "out", "new")

    put(tmp_path / "old", place)
    renames = [at for at, step in enumerate(steps_of(job)) if step.startswith("rename")]
    assert len(renames) == 4  # the attempt to exchange, then old aside, new in, old to be deleted
    for at in renames:
        put(tmp_path / "old", place)
        assert killed(job, at)
        beside = [content(path) for path in place.iterdir() if path.name.startswith(".out.quantkit-old")]
        assert content(place / "out") in (old, new) or old in beside
        with output_folder(place / "out", replace=True, foreign=foreign):
            assert content(place / "out") in (old, new)


@pytest.mark.parametrize(
    ("fault", "exchanges"), [(NO_SPACE, True), (BROKEN_DISK, False)], ids=["no space-exchange", "I/O error-two-renames"]
)
def test_a_disk_error_at_any_step_is_one_line_and_leaves_the_old_or_the_new_checkpoint(
    fault: str,
    exchanges: bool,
    case: tuple[Path | None, Content, Content],
    write_checkpoint: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (standing, old, new), place = case, tmp_path / "place"
    if not exchanges:
        if standing is None:
            pytest.skip("nothing is exchanged where nothing stands")
        monkeypatch.setattr(rename_module, "_rename", lambda source, target, flags: False)

    def job() -> None:
        write_checkpoint(place / "out", "new")

    put(standing, place)
    for at, step in enumerate(steps_of(job)):
        put(standing, place)
        message = refusal(job, at, fault)
        found = content(place / "out")
        assert found == new or (message and found == old), step
        assert "\n" not in message
        if found != new:
            assert names(place) == (["out"] if standing else []), step


def _write_json(path: Path) -> None:
    write_file(path, b'{"numbers": [1, 2, 3]}', "--json")


@pytest.fixture
def write_artifact(calibrated: Callable[[str], Path]) -> Callable[[Path], None]:
    calibration = load_calibration(calibrated("opt"))

    def write(path: Path) -> None:
        with output_file(path) as work:
            write_calibration(calibration, work, "calibration")

    return write


@pytest.mark.parametrize("kind", ["json-over-an-old-one", "json", "calibration"])
def test_a_file_is_the_old_or_the_new_one_after_every_fault(
    kind: str, write_artifact: Callable[[Path], None], tmp_path: Path
) -> None:
    place = tmp_path / "place"
    write: Any = write_artifact if kind == "calibration" else _write_json
    write(tmp_path / "new")
    old, new = (b"old" if kind == "json-over-an-old-one" else None), (tmp_path / "new").read_bytes()

    def job() -> None:
        write(place / "out")

    def start() -> None:
        put(None, place)
        if old is not None:
            (place / "out").write_bytes(old)

    def found() -> bytes | None:
        return (place / "out").read_bytes() if (place / "out").exists() else None

    start()
    for at, step in enumerate(steps_of(job)):
        if step.startswith("write") and at % 8:  # one write of a tensor is like the next
            continue
        start()
        assert killed(job, at), step
        assert found() in (old, new), step
        for fault in ERRORS:
            start()
            message = refusal(job, at, fault)
            assert found() == new or (message and found() == old), (step, fault)
            if not step.startswith("unlink"):  # what cannot be removed stays, hidden
                assert names(place) == ([] if found() is None else ["out"]), (step, fault)


def test_everything_is_on_the_disk_before_it_is_renamed(write_checkpoint: Write, tmp_path: Path) -> None:
    place = tmp_path / "place"
    put(None, place)
    steps = steps_of(lambda: write_checkpoint(place / "out", "new"))
    renamed = next(at for at, step in enumerate(steps) if step.startswith("rename"))
    synced = [step for step in steps[:renamed] if step.startswith("fsync")]
    assert len(synced) == len(content(place / "out")) + 1  # every file, and the folder
    assert not any(step.startswith(("write", "open")) for step in steps[renamed:])
    assert steps[renamed + 1].startswith("fsync")  # the folder that holds it
