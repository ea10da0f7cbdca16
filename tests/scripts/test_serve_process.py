"""Settings that are measured in processes of their own: they take turns, and end with all that they started."""

from __future__ import annotations

import fcntl
import json
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from scripts import serve_bench, serve_process
from scripts.serve_measure import Work
from scripts.serve_process import holding, run_work

MEASURES = """
import fcntl, json, subprocess, sys
path = sys.argv[-1]
work = json.loads(open(path).read())
if work["lock"] is not None:
    fcntl.flock(work["lock"], fcntl.LOCK_EX)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(path, "w").write(json.dumps({"ms_per_step": {"1": 2.0}, "child": child.pid}))
"""


def work(gpus: int = 2) -> Work:
    return Work("folder", {"tensor_parallel_size": gpus}, (1,), (), steps=1, repeats=1, profile=False)


def run_instead(code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have a program of the test run in the place of serve_measure."""
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n{code}")
    program.chmod(0o755)
    monkeypatch.setattr(serve_process.sys, "executable", str(program))


def test_what_a_setting_started_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_instead(MEASURES, monkeypatch, tmp_path)
    answer = run_work(work(), tmp_path / "work.json", {})
    assert answer["ms_per_step"] == {"1": 2.0}
    stat = Path(f"/proc/{answer['child']}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_what_a_setting_started_ends_with_a_script_that_is_stopped(tmp_path: Path) -> None:
    """Its processes are a group of their own, which a signal to the script's group does not reach."""
    hangs, child = tmp_path / "hangs", tmp_path / "child"
    hangs.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {child}\nwait\n")
    hangs.chmod(0o755)
    code = (
        "import sys\nfrom pathlib import Path\nfrom scripts.serve_measure import Work\n"
        "from scripts.serve_process import end_by_signal, run_work\n"
        "end_by_signal()\nsys.executable, path = sys.argv[1:]\n"
        "run_work(Work('f', {'tensor_parallel_size': 2}, (1,), (), 1, 1, False), Path(path), {})\n"
    )
    command = [sys.executable, "-c", code, str(hangs), str(tmp_path / "work.json")]
    script = serve_process.subprocess.Popen(command, cwd=serve_process.ROOT)
    while not child.exists() or not child.read_text().strip():
        assert script.poll() is None
        time.sleep(0.1)
    script.terminate()
    assert script.wait(30) == 128 + signal.SIGTERM
    stat = Path(f"/proc/{child.read_text().strip()}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_setting_that_fails_is_an_error_with_its_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_instead("raise SystemExit(3)", monkeypatch, tmp_path)
    assert run_work(work(), tmp_path / "work.json", {}) == {"error": "exit status 3"}


def test_a_setting_waits_for_the_one_that_has_the_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_instead(MEASURES, monkeypatch, tmp_path)
    lock, found = tmp_path / "gpus.lock", []
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(
            target=lambda: found.append(run_work(work(), tmp_path / "work.json", {}, lock=lock, limit=60))
        )
        thread.start()
        time.sleep(0.5)
        assert not found
    thread.join(30)
    assert found[0]["ms_per_step"] == {"1": 2.0}
    with lock.open("a") as free:
        fcntl.flock(free, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_weights_are_drawn_in_a_turn_as_well(tmp_path: Path) -> None:
    lock = tmp_path / "gpus.lock"
    with lock.open("a") as other:
        with holding(lock), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with holding(None):
        pass


def test_a_setting_that_hangs_ends_itself(tmp_path: Path) -> None:
    code = (
        "import json, sys, time\n"
        "from scripts.serve_measure import Work, _wait_for_turn\n"
        "_wait_for_turn(Work(**json.loads(sys.argv[1])))\ntime.sleep(60)\n"
    )
    given = {**vars(work()), "limit": 0.2}
    done = serve_process.subprocess.run(
        [sys.executable, "-c", code, json.dumps(given)],
        cwd=serve_process.ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert b"Timeout" in done.stderr


def test_first_tokens_may_be_left_out() -> None:
    assert serve_bench._firsts("16x1024,1x128") == ((16, 1024), (1, 128))
    assert serve_bench._firsts("none") == ()


def test_a_number_of_sequences_makes_another_setting() -> None:
    assert serve_bench.setting_key("opt-30b", "fp16", 2) == "opt-30b fp16 tp2"
    assert serve_bench.setting_key("opt-30b", "fp16", 2, 4) == "opt-30b fp16 tp2 seqs4"


@pytest.mark.parametrize("method", ["trellis-w2", "flatten-o1", "bcq-w4-g128-head6"])
def test_a_setting_may_rotate_all_inputs_or_one(method: str) -> None:
    base, head = method.removesuffix("-head6"), "-head6" if method.endswith("-head6") else ""
    linears = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")
    for suffix, expected in (("", [False, False]), ("-rotated", [True, True]), ("-online", [False, True])):
        spec = serve_bench._spec_maker("llama-3-8b", f"{base}{suffix}{head}")
        made = [spec(index, name, 4096) for index, name in enumerate(linears)]
        assert [each.rotate_inputs for each in made] == expected
        plain = serve_bench._spec_maker("llama-3-8b", method)
        assert [serve_bench.replace(each, rotate_inputs=False) for each in made] == [
            plain(index, name, 4096) for index, name in enumerate(linears)
        ]


@pytest.mark.parametrize(("sequences", "expected"), [(None, 16), (4, 4)], ids=["largest batch", "given"])
def test_the_engine_gets_the_sequences_and_a_whole_model(
    sequences: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of OPT-175B's shape, with the paper's format: a folder with config.json is enough."""
    given: list[Work] = []
    monkeypatch.setattr(serve_bench, "run_work", lambda work, path, **_: given.append(work) or {"ms_per_step": {}})
    arguments = ["serve_bench.py", "--batches", "1,16", "--first", "none", "--tensor-parallel", "2", "--no-compile"]
    arguments += [] if sequences is None else ["--max-num-seqs", str(sequences)]
    monkeypatch.setattr(sys, "argv", arguments)
    name, shape = "nuqmm-q4-g128", serve_bench.replace(serve_bench.model_shape("opt-175b"), layers=1)
    serve_bench._run(serve_bench._arguments(), shape, name, serve_bench._spec_maker("opt-175b", name))
    (made,) = given
    assert made.options["max_num_seqs"] == expected
    assert made.options["tensor_parallel_size"] == 2
    assert made.options["load_format"] == "dummy"
    assert made.firsts == ()
