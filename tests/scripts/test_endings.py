"""What a script cannot do is one line on stderr and exit status 2, before anything is measured."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.common import run_quantkit, run_script

ROOT = Path(__file__).parents[2]
SCRIPTS = [path for path in sorted(ROOT.joinpath("scripts").rglob("*.py")) if "__main__" in path.read_text()]
GPU_SCRIPTS = (
    *("bipolar.compare_coding", "bipolar.models", "bipolar.tables", "compile_kernels", "flattenquant.speed"),
    *(
        "nuqmm.compare_linear",
        "nuqmm.figure4",
        "nuqmm.measure_kernels",
        "nuqmm.load_time",
        "nuqmm.tables",
        "nuqmm.profile_bcq",
        "nuqmm.tune_bcq",
    ),
)
MISSING = "/no/such/folder/out"


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        *((script, (), "torch finds none here") for script in GPU_SCRIPTS),
        ("nuqmm.tables", ("--only", "fig7"), "did you mean 'fig9'"),
        ("nuqmm.compare_linear", ("--json", MISSING), "--json"),
        ("nuqmm.tables", ("--markdown", MISSING), "--markdown"),
        ("flattenquant.speed", ("--render", MISSING), "No such file"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_what_cannot_be_measured_is_said_first(
    script: str,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_script(importlib.import_module(f"scripts.{script}").main)
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_every_gpu_script_is_among_those_tested() -> None:
    asking = {path for path in SCRIPTS if "needed_gpu()" in path.read_text(encoding="utf-8")}
    assert asking == {ROOT.joinpath("scripts", *name.split(".")).with_suffix(".py") for name in GPU_SCRIPTS}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_names_the_command_that_runs_it(path: Path) -> None:
    """The doc string of a moved script is easily forgotten."""
    text = path.read_text(encoding="utf-8")
    assert f"{path.relative_to(ROOT)}" in text or path.name == "demo.py"  # that one is for make demo


@pytest.mark.parametrize(
    "script",
    ["nuqmm/tables.py", pytest.param("bipolar/tables.py", marks=pytest.mark.slow), "flattenquant/speed.py"],
)
def test_a_process_ends_so_too(script: str) -> None:
    """From any folder, without the checkout's root on PYTHONPATH: scripts import each other."""
    command = [sys.executable, str(ROOT / "scripts" / script), "--json", MISSING]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "tests")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --json")


def test_a_command_that_fails_ends_the_script_with_its_status(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_quantkit("quantize", "no-model", "--recipe", "no-recipe", "-o", "out")
    assert ended.value.code == 2
    assert "no-recipe" in capfd.readouterr().err
