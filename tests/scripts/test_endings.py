"""The scripts that measure a GPU: what they cannot do is one line and exit status 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantkit.cli.script import run_script
from tests.scripts.load import FOLDER, load_script

GPU_SCRIPTS = (
    *("bipolar_models", "bipolar_tables", "compare_gemv", "compile_kernels", "flattenquant_speed"),
    *("load_time", "nuqmm_tables", "profile_bcq", "tune_bcq"),
)
MISSING = "/no/such/folder/out"


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        *((script, (), "torch finds none here") for script in GPU_SCRIPTS),
        ("nuqmm_tables", ("--only", "fig7"), "did you mean 'fig9'"),
        ("compare_gemv", ("--json", MISSING), "--json"),
        ("nuqmm_tables", ("--markdown", MISSING), "--markdown"),
        ("flattenquant_speed", ("--render", MISSING), "No such file"),
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
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_script(load_script(script).main)
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_process_ends_so_too() -> None:
    command = [sys.executable, str(FOLDER / "nuqmm_tables.py"), "--json", MISSING]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --json")
