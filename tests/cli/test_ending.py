"""How the program ends: told to stop, beside a second one, or with nowhere to print."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quantkit.cli.app import app
from quantkit.cli.common import printable
from quantkit.cli.ending import ends_in_order
from quantkit.errors import OutputError
from quantkit.storage.output import output_file
from tests.cli.calls import refusal, run
from tests.pipeline import quantize_tiny

PATIENCE = 60.0  # seconds for a child to come to its work, on a busy machine
INTERRUPTED = 130  # what a shell calls the end by Ctrl-C
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def fork(work: Callable[[], int]) -> int:
    """A child that does some work and ends with the status it returns."""
    child = os.fork()
    if child:
        return child
    try:
        os._exit(work())
    finally:
        os._exit(99)


def program(*arguments: str | Path) -> int:
    """Exit status of the program in this process, a child. It heeds signals, which tests in the background ignore."""
    for number in STOPS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        app([str(argument) for argument in arguments], prog_name="quantkit")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


def status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def long_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Quantizing takes for ever; the file says that it has begun."""
    begun = tmp_path / "begun"

    def work(*_arguments: Any) -> Any:
        begun.touch()
        time.sleep(2 * PATIENCE)

    monkeypatch.setattr("quantkit.jobs.quantize._quantize", work)
    return begun


@pytest.mark.parametrize("number", STOPS, ids=lambda each: each.name)
def test_being_told_to_stop_ends_as_ctrl_c_does_and_leaves_nothing(
    number: signal.Signals, long_work: Path, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    command = ("quantize", tiny_model("opt"), "--recipe", "rtn-w4-g128", "-o", place / "q")
    child = fork(lambda: program(*command))
    wait_for(long_work)
    assert any(path.name.startswith(".q.quantkit-new") for path in place.iterdir())
    os.kill(child, number)
    assert status(child) == INTERRUPTED
    assert list(place.iterdir()) == []


def test_a_second_writer_is_refused_before_its_work_until_the_first_is_gone(
    long_work: Path, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    command = ("quantize", tiny_model("opt"), "--recipe", "rtn-w4-g128", "-o", place / "q")
    child = fork(lambda: program(*command))
    wait_for(long_work)
    assert "another process is writing it" in refusal(*command)
    os.kill(child, signal.SIGKILL)
    assert status(child) == -signal.SIGKILL
    long_work.unlink()
    other = fork(lambda: program(*command))
    wait_for(long_work)
    assert len(list(place.glob(".q.quantkit-new-*"))) == 1  # the killed one's is gone
    os.kill(other, signal.SIGTERM)
    assert status(other) == INTERRUPTED
    assert list(place.iterdir()) == []


def test_a_child_forked_meanwhile_ends_at_once_when_told_to_stop() -> None:
    """Not by an exception, which a hook of fork or a finalizer of the child would swallow."""

    def work() -> int:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        return 0

    with ends_in_order():
        assert status(fork(work)) == -signal.SIGTERM


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    def work() -> int:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with ends_in_order():
            os.kill(os.getpid(), signal.SIGHUP)
        return 7

    assert status(fork(work)) == 7


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ending") / "q"
    quantize_tiny(tiny_model("opt"), out)
    return out


@pytest.mark.parametrize(
    ("stdout", "message"),
    [("full", "No space left on device"), ("closed", "standard output is closed")],
)
def test_results_that_cannot_be_printed_are_one_line(
    stdout: str, message: str, checkpoint: Path, tmp_path: Path
) -> None:
    def work() -> int:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = (tmp_path / "stderr").open("w")
        if stdout == "closed":
            os.close(1)
            sys.stdout = None  # as Python starts with a closed one
        result = program("inspect", checkpoint)
        sys.stderr.flush()
        return result

    assert status(fork(work)) == 2
    said = (tmp_path / "stderr").read_text()
    assert said.startswith("quantkit: error: standard output")
    assert message in said
    assert said.count("\n") == 1


def test_a_reader_that_has_gone_is_no_error(checkpoint: Path) -> None:
    """As in ``quantkit inspect out | head -1``; shells give a program that SIGPIPE ends this status."""
    command = [sys.executable, "-m", "quantkit", "inspect", str(checkpoint)]
    read, write = os.pipe()
    os.close(read)
    try:
        result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(write)
    assert result.returncode == 128 + signal.SIGPIPE
    assert result.stderr == b""


def test_a_closed_stdout_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(OutputError, match="standard output is closed"), ends_in_order():
        pytest.fail("the work began")


def test_no_file_of_ours_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """What a library prints to a stderr that is closed must not land in a checkpoint."""

    def work() -> int:
        os.close(2)
        with ends_in_order(), output_file(tmp_path / "a") as path:
            descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
            os.write(2, b"a library's warning")
        return 0 if descriptor > 2 else 1

    assert status(fork(work)) == 0
    assert (tmp_path / "a").read_bytes() == b""


@pytest.mark.parametrize(
    ("path", "message"),
    [(".", "is a folder; name a file"), ("none/a.json", "does not exist"), ("a" * 300, "File name too long")],
    ids=["folder", "missing", "long"],
)
def test_json_that_cannot_be_written_is_refused_before_the_work(
    path: str, message: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refusal("inspect", checkpoint, "--json", path)
    assert list(tmp_path.iterdir()) == []


def test_names_of_strangers_reach_the_terminal_written_out(tmp_path: Path) -> None:
    folder = tmp_path / "bell\a\x1b[2Jname"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert r"bell\x07\x1b[2Jname" in refusal("inspect", folder)
    assert printable("a\udc80é\n") == "a\\udc80é\\n"


def test_inspect_says_whether_digests_were_compared(checkpoint: Path) -> None:
    assert "compare them with --verify" in run("inspect", checkpoint).stdout
    assert "all compared: as written" in run("inspect", checkpoint, "--verify").stdout


RANK = """
import atexit, sys
from quantkit.cli.ending import ends_at_once_as_a_rank

class Kept:
    def __del__(self):
        sys.stderr.write("wound down ")

kept = Kept()
atexit.register(print, "registered")
print("printed")
with ends_at_once_as_a_rank():
    raise SystemExit({status})
"""


@pytest.mark.parametrize(("ended", "code"), [("3", 3), ("None", 0), ("'a word'", 1)])
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_rank_ends_without_winding_down_but_loses_nothing(ended: str, code: int, ranks: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RANK.format(status=ended)],
        env={**os.environ, "WORLD_SIZE": ranks},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert done.stdout == "printed\nregistered\n"
    assert ("wound down" in done.stderr) == (ranks == "1")
