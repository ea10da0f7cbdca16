"""Two processes that torchrun starts give the bytes of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from quantkit.ranks import Loads, Ranks
from tests.cli.calls import run
from tests.tiny import sample_text

SECONDS = 240  # two processes that import torch and transformers, on a machine that does other work
TINY = ("--seq-len", "48", "--windows", "5")  # an odd number: one of the ranks has a window more


def _run(*program: str) -> subprocess.CompletedProcess[str]:
    """Two processes by torchrun; one thread each, as sums of several differ."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*start, *program],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


CASES = {
    "qwen3_moe": ("qwen3_moe", [], []),
    "llama_by_end_loss": ("llama", ["--saliency", "3"], ["--set", "hessian=end_loss"]),
    "llama_tuned_blocks": (
        "llama",
        ["--written", "1"],
        ["--set", "tune={blocks: 2, blend: 0.5, block_codes: true, epochs: 0, rate: 0.01}"],
    ),
}
QUICK = ("--set", "group_size=32", "--set", "rounds=2", "--set", "sweeps=1")


def _commands(name: str, model: Path, text: Path, own: Path) -> list[list[str]]:
    """What calibrates and quantizes into a folder."""
    _, calibration, settings = CASES[name]
    artifact, recipe = own / "c.safetensors", ["--recipe", "bcq-w4-g128-comp", *QUICK, *settings]
    commands = [
        ["calibrate", model, "--text", text, *TINY, *calibration, "-o", artifact],
        ["quantize", model, *recipe, "--calibration", artifact, "-o", own / "q"],
    ]
    return [[*map(str, command), "--device", "cpu"] for command in commands]


def test_two_ranks_write_the_bytes_of_one(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """One start of two processes takes all commands: importing takes longer than each of them."""
    (tmp_path / "text.txt").write_text(sample_text(words=400))
    todo: list[list[str]] = []
    for name, (family, *_) in CASES.items():
        for ranks in ("one", "two"):
            own = tmp_path / ranks / name
            own.mkdir(parents=True)
            commands = _commands(name, tiny_model(family), tmp_path / "text.txt", own)
            if ranks == "two":
                todo += commands
                continue
            for command in commands:
                done = run(*command)
                assert done.exit_code == 0, done.stderr
    (tmp_path / "commands.json").write_text(json.dumps(todo))
    both = _run(str(Path(__file__).with_name("commands.py")), str(tmp_path / "commands.json"))
    assert both.returncode == 0, both.stderr
    assert both.stdout.count("bits per weight") == len(CASES)
    for name in CASES:
        one, two = tmp_path / "one" / name, tmp_path / "two" / name
        assert sorted(path.name for path in two.iterdir()) == ["c.safetensors", "q"]
        assert _files(two) == _files(one), name


def test_a_command_that_takes_no_ranks_says_so_once(tiny_model: Callable[[str], Path]) -> None:
    done = _run("-m", "quantkit", "inspect", str(tiny_model("llama")))
    assert done.returncode
    assert done.stderr.count("quantkit: error: inspect runs as one process") == 1


def test_what_the_first_rank_refuses_ends_all_of_them(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "mine.txt").write_text("not to be overwritten")
    command = ["quantize", str(tiny_model("llama")), "--recipe", "bcq-w4-g128", "-o", str(tmp_path / "q")]
    done = _run("-m", "quantkit", *command)
    assert done.returncode
    assert done.stderr.count("quantkit: error:") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


def test_the_heaviest_work_goes_first_to_who_has_least() -> None:
    loads = Loads(Ranks(0, 2))
    assert loads.assign({"a": 1.0, "b": 5.0, "c": 3.0, "d": 3.0}) == {"b": 0, "c": 1, "d": 1, "a": 0}
    assert loads.assign({"e": 1.0}) == {"e": 0}
