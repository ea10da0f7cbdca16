"""Places where results go: refused before the work where they cannot, whole or untouched afterwards."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quantkit.errors import OutputError
from quantkit.storage import place as place_module
from quantkit.storage import rename as rename_module
from quantkit.storage.output import output_file, output_folder, write_file

MARK = "ours.txt"


def foreign(folder: Path) -> str | None:
    """A folder is ours where all its files are named MARK."""
    odd = [path.name for path in folder.iterdir() if path.name != MARK]
    return f"holds {odd[0]}" if odd else None


def fill(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / MARK).write_text(text)


def nothing() -> None:
    """What happens meanwhile, most of the time."""


def fail() -> None:
    raise KeyError("work")


def write(out: Path, text: str = "new", *, replace: bool = False, meanwhile: Callable[[], None] = nothing) -> None:
    with output_folder(out, replace=replace, foreign=foreign) as output:
        fill(output.work, text)
        meanwhile()
        output.publish()


def write_new(out: Path, content: bytes, meanwhile: Callable[[], None] = nothing) -> None:
    with output_file(out) as work:
        work.write_bytes(content)
        meanwhile()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refusal(out: Path, *, replace: bool = False, source: Path | None = None) -> str:
    """Why a folder is refused before the work; what stands beside and at its place is left as it was."""
    before = names(out.parent) if out.parent.is_dir() else None
    with pytest.raises(OutputError) as caught, output_folder(out, replace=replace, foreign=foreign, source=source):
        pytest.fail("the work began")
    assert before is None or names(out.parent) == before
    return str(caught.value)


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.fixture(params=["exchange", "two-renames"])
def _rename(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on file systems that cannot exchange two folders."""
    if request.param == "two-renames":
        monkeypatch.setattr(rename_module, "_rename", lambda source, target, flags: False)


@pytest.mark.usefixtures("_rename")
def test_a_folder_appears_whole_and_alone(tmp_path: Path) -> None:
    write(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    write(tmp_path / "out", "newer", replace=True)
    assert (tmp_path / "out" / MARK).read_text() == "newer"
    assert names(tmp_path) == ["out"]


def test_nothing_is_left_without_publish_or_after_an_error(tmp_path: Path) -> None:
    with output_folder(tmp_path / "out", replace=False, foreign=foreign) as output:
        fill(output.work, "half")
    with pytest.raises(KeyError):
        write(tmp_path / "out", "half", meanwhile=fail)
    assert names(tmp_path) == []


def test_an_empty_folder_is_taken_as_the_place(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")
    assert (tmp_path / "out" / MARK).read_text() == "new"


def test_a_full_folder_is_replaced_only_on_demand_and_only_ours(tmp_path: Path) -> None:
    fill(tmp_path / "out", "old")
    assert "pass `overwrite`" in refusal(tmp_path / "out")
    (tmp_path / "out" / "thesis.tex").write_text("work of years")
    assert "holds thesis.tex, so `overwrite` will not delete it" in refusal(tmp_path / "out", replace=True)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "work of years"


def test_the_model_and_what_holds_it_are_never_replaced(tmp_path: Path) -> None:
    fill(tmp_path / "out", "old")
    model = tmp_path / "out" / "model"
    model.mkdir()
    for out in (model, tmp_path / "out", tmp_path):
        assert "is the model's own folder, or holds it" in refusal(out, replace=True, source=model)
    (tmp_path / "link").symlink_to(model)
    assert "is the model's own folder, or holds it" in refusal(model, replace=True, source=tmp_path / "link")


def test_the_working_folder_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    with working_in(tmp_path / "a" / "b"):
        for out in (Path(), Path(".."), tmp_path / "a"):
            assert "is the folder that this program runs in" in refusal(out)


def test_links_files_mounts_and_impossible_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "file").write_text("x")
    assert "is a symbolic link" in refusal(tmp_path / "link")
    assert "is a symbolic link" in refusal(tmp_path / "dangling")
    assert "is a file" in refusal(tmp_path / "file")
    assert "does not exist" in refusal(tmp_path / "none" / "out")
    assert "Not a directory" in refusal(tmp_path / "file" / "out")
    assert "File name too long" in refusal(tmp_path / ("n" * 300))
    assert "is the root folder" in refusal(Path("/"))
    assert "is a mount point" in refusal(Path("/proc"))
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"36 35 98:0 /bound {str(tmp_path / 'real out').replace(' ', chr(92) + '040')} rw - ext4 /dev/x rw\n"
    )
    monkeypatch.setattr(place_module, "_MOUNTS", mounts)
    (tmp_path / "real out").mkdir()
    assert "is a mount point" in refusal(tmp_path / "real out")


def test_links_above_the_place_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link" / "out")
    assert (tmp_path / "real" / "out" / MARK).exists()


@pytest.mark.parametrize("name", ["n" * 250, "ü" * 120, "with space", "new\nline", "[a]*"])
def test_any_name_that_a_folder_may_have_is_written(name: str, tmp_path: Path) -> None:
    write(tmp_path / name)
    write(tmp_path / name, "newer", replace=True)
    assert names(tmp_path) == [name]


def test_a_second_writer_is_refused_and_a_third_follows(tmp_path: Path) -> None:
    with output_folder(tmp_path / "out", replace=False, foreign=foreign) as output:
        fill(output.work, "first")
        with pytest.raises(OutputError, match="another process is writing it"):
            write(tmp_path / "out", "second")
        output.publish()
    write(tmp_path / "out", "third", replace=True)
    assert names(tmp_path) == ["out"]


@pytest.mark.usefixtures("_rename")
def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    fill(tmp_path / "out", "old")
    fill(tmp_path / ".out.quantkit-new-0123abcd", "half")
    fill(tmp_path / ".out.quantkit-old-89abcdef", "older")
    (tmp_path / ".out.quantkit-lock").touch()
    others = [".out.quantkit-new-0123abcd.txt", ".out.quantkit-new-0123", ".other.quantkit-new-0123abcd", ".outs"]
    for name in others:
        fill(tmp_path / name, "other")
    write(tmp_path / "out", replace=True)
    assert names(tmp_path) == sorted(["out", *others])


def test_an_old_folder_that_was_moved_aside_is_put_back(tmp_path: Path) -> None:
    """Killed between the two renames of a file system that cannot exchange."""
    fill(tmp_path / ".out.quantkit-old-89abcdef", "old")
    fill(tmp_path / ".out.quantkit-new-0123abcd", "new")
    with pytest.raises(OutputError, match="not empty"):
        write(tmp_path / "out")
    assert (tmp_path / "out" / MARK).read_text() == "old"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_appears_at_the_place_meanwhile_stays_and_the_result_is_kept(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    appears = {
        "folder": lambda: fill(out, "theirs"),
        "file": lambda: out.write_text("theirs") and None,
        "link": lambda: out.symlink_to("nothing"),
    }[kind]
    with pytest.raises(OutputError, match="something else was put there meanwhile; the finished one is in"):
        write(out, meanwhile=appears)
    (kept,) = (name for name in names(tmp_path) if name != "out")
    assert (tmp_path / kept / MARK).read_text() == "new"
    assert not kept.startswith(".")
    if kind == "link":
        assert out.is_symlink()
    else:
        assert (out / MARK if kind == "folder" else out).read_text() == "theirs"


@pytest.mark.parametrize("moment", ["before", "between"])
@pytest.mark.parametrize("change", ["file", "folder"])
@pytest.mark.usefixtures("_rename")
def test_what_is_put_into_the_replaced_folder_meanwhile_is_never_deleted(
    change: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    fill(out, "old")

    def interfere() -> None:
        if change == "file":
            (out / "notes.txt").write_text("theirs")
        else:
            out.rename(tmp_path / "moved")
            fill(out, "theirs")

    real = rename_module.exchange

    def late(new: Path, place: Path, *, aside: Path) -> None:
        monkeypatch.setattr("quantkit.storage.output.exchange", real)
        interfere()
        real(new, place, aside=aside)

    if moment == "between":
        monkeypatch.setattr("quantkit.storage.output.exchange", late)
    with pytest.raises(OutputError, match="meanwhile; the finished one is in"):
        write(out, replace=True, meanwhile=interfere if moment == "before" else nothing)
    assert (out / "notes.txt" if change == "file" else out / MARK).read_text() == "theirs"
    texts = {(tmp_path / name / MARK).read_text() for name in names(tmp_path)}
    assert {"old", "new"} <= texts


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002], ids=oct)
def test_permissions_are_those_of_the_users_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write(tmp_path / "out")
        write_file(tmp_path / "a.json", b"{}")
        with output_file(tmp_path / "c.safetensors") as work:
            work.write_bytes(b"x")
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("out", "a.json", "c.safetensors")}
    assert modes == {"out": 0o777 & ~umask, "a.json": 0o666 & ~umask, "c.safetensors": 0o666 & ~umask}


@pytest.mark.usefixtures("_rename")
def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    seen: list[bool] = []
    write_new(tmp_path / "a", b"whole", lambda: seen.append((tmp_path / "a").exists()))
    assert seen == [False]
    with pytest.raises(KeyError):
        write_new(tmp_path / "b", b"half", fail)
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == {"a": b"whole"}


@pytest.mark.usefixtures("_rename")
def test_a_file_that_must_be_new_never_replaces_one(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="meanwhile; it was left alone"):
        write_new(tmp_path / "a", b"ours", lambda: (tmp_path / "a").write_bytes(b"theirs") and None)
    assert (tmp_path / "a").read_bytes() == b"theirs"
    (tmp_path / "link").symlink_to("nothing")
    for name in ("a", "link"):
        with pytest.raises(OutputError, match="exists already"):
            write_new(tmp_path / name, b"ours", lambda: pytest.fail("the work began"))
    assert names(tmp_path) == ["a", "link"]


def test_a_second_writer_of_a_file_is_refused_and_a_killed_ones_file_removed(tmp_path: Path) -> None:
    (tmp_path / ".a.quantkit-new-0123abcd").write_text("half")
    with output_file(tmp_path / "a") as work:
        with pytest.raises(OutputError, match="another process is writing it"):
            write_new(tmp_path / "a", b"ours", lambda: pytest.fail("the work began"))
        work.write_bytes(b"x")
    assert names(tmp_path) == ["a"]


def test_a_written_file_replaces_the_one_that_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    write_file(tmp_path / "link.json", b"new", "--json")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"


def test_streams_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    read, written = os.pipe()
    write_file(Path(f"/dev/fd/{written}"), b"numbers", "--json")
    os.close(written)
    assert os.read(read, 100) == b"numbers"
    os.close(read)
    with pytest.raises(OutputError, match=r"--json /dev/full cannot be written \(No space left"):
        write_file(Path("/dev/full"), b"numbers", "--json")
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "is a folder"), ("none/a.json", "does not exist"), ("n" * 300, "File name too long")],
    ids=["folder", "missing", "long"],
)
def test_files_that_cannot_be_written_are_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=f"^--json .*{message}"):
        write_file(tmp_path / name, b"{}", "--json")
    assert names(tmp_path) == []
