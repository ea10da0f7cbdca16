"""Two processes that torchrun starts give the bytes of one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.ranks import Loads, Ranks
from tests.tiny import sample_text

SECONDS = 240  # two processes that import torch and transformers, on a machine that does other work
TINY = ("--seq-len", "48", "--windows", "5")  # an odd number: one of the ranks has a window more


def _run(ranks: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """The program as a process, or as several by torchrun; one thread each, as sums of several differ."""
    start = [sys.executable, "-m"]
    if ranks > 1:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return subprocess.run(
        [*start, "quantkit", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("family", "saliency", "settings"),
    [
        ("qwen3_moe", [], []),
        ("llama", ["--saliency", "3"], ["--set", "hessian=end_loss"]),
        ("llama", [], ["--set", "tune={blocks: 2, blend: 0.5, block_codes: true, epochs: 0, rate: 0.01}"]),
    ],
    ids=["qwen3_moe", "llama_by_end_loss", "llama_tuned_blocks"],
)
def test_two_ranks_write_the_bytes_of_one(
    family: str, saliency: list[str], settings: list[str], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, text = str(tiny_model(family)), tmp_path / "text.txt"
    text.write_text(sample_text(words=400))
    written = []
    for ranks in (1, 2):
        own = tmp_path / str(ranks)
        own.mkdir()
        artifact = own / "c.safetensors"
        calibrated = _run(
            ranks, ["calibrate", model, "--text", str(text), *TINY, *saliency, "-o", str(artifact), "--device", "cpu"]
        )
        assert calibrated.returncode == 0, calibrated.stderr
        recipe = ["--recipe", "bcq-w4-g128-comp", "--set", "group_size=32", *settings, "--calibration", str(artifact)]
        quantized = _run(ranks, ["quantize", model, *recipe, "-o", str(own / "q"), "--device", "cpu"])
        assert quantized.returncode == 0, quantized.stderr
        assert quantized.stdout.count("bits per weight") == 1
        assert sorted(path.name for path in own.iterdir()) == ["c.safetensors", "q"]
        written.append(_files(own))
    assert written[0] == written[1]


def test_a_command_that_takes_no_ranks_says_so_once(tiny_model: Callable[[str], Path]) -> None:
    done = _run(2, ["inspect", str(tiny_model("llama"))])
    assert done.returncode
    assert done.stderr.count("quantkit: error: inspect runs as one process") == 1


def test_what_the_first_rank_refuses_ends_all_of_them(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "mine.txt").write_text("not to be overwritten")
    done = _run(2, ["quantize", str(tiny_model("llama")), "--recipe", "bcq-w4-g128", "-o", str(tmp_path / "q")])
    assert done.returncode
    assert done.stderr.count("quantkit: error:") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


def test_the_heaviest_work_goes_first_to_who_has_least() -> None:
    loads = Loads(Ranks(0, 2))
    assert loads.assign({"a": 1.0, "b": 5.0, "c": 3.0, "d": 3.0}) == {"b": 0, "c": 1, "d": 1, "a": 0}
    assert loads.assign({"e": 1.0}) == {"e": 0}
