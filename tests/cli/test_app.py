from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import quantkit
from quantkit.cli.app import app
from quantkit.cuda.architectures import ARCHITECTURES
from tests.tiny import sample_text


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"quantkit {quantkit.__version__}\n"


def test_doctor_names_what_is_missing_and_how_to_add_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", str(tmp_path / "doctor.json")], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    packages = {p["name"]: p for p in json.loads((tmp_path / "doctor.json").read_text())["packages"]}
    assert packages["torch"]["version"]
    missing = [p for p in packages.values() if p["version"] is None]
    assert all(p["pip_line"] in result.stdout for p in missing)


@pytest.fixture
def _known_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor starts a process of two seconds for this answer, which test_cpu.py tests."""
    monkeypatch.setattr("quantkit.jobs.doctor.half_precision_failure", lambda: None)


@pytest.mark.usefixtures("_known_processor")
def test_doctor_shows_every_generation_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    lines = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"}).stdout.splitlines()
    (heading,) = (line for line in lines if "Hopper 9.0" in line)
    assert [row.heading for row in ARCHITECTURES.values() if row.heading not in heading] == []
    assert heading.count("untested") == 2
    (wgmma,) = (line for line in lines if "wgmma b1" in line)
    support = [word for word in wgmma.split() if word in ("native", "emulated", "missing")]
    assert support == ["missing", "missing", "missing", "native", "missing", "missing"]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((9, 0), "tested and measured"), ((12, 1), "untested"), ((7, 5), "8.0 or later; this one has 7.5")],
    ids=["hopper", "newer", "older"],
)
@pytest.mark.usefixtures("_known_processor")
def test_doctor_says_how_far_the_kernels_are_tested_on_a_gpu(
    capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    major, minor = capability
    properties = SimpleNamespace(name="Some GPU", major=major, minor=minor, total_memory=1 << 36)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: properties)
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    (line,) = (line for line in result.stdout.splitlines() if "GPUs" in line)
    assert expected in line


def test_program_runs_the_main_job_as_a_process(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(sample_text(1200))
    model, environment = str(tiny_model("llama")), os.environ | {"HF_HUB_OFFLINE": "1"}

    def program(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "quantkit", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    text = ("--text", "text.txt", "--seq-len", "32")
    steps = [
        program("calibrate", model, *text, "--windows", "2", "-o", "c.safetensors"),
        program("quantize", model, "--recipe", "bcq-w4-g128", "--calibration", "c.safetensors", "-o", "out"),
        program("eval", "perplexity", "out", *text, "--max-windows", "2"),
    ]
    assert [step.returncode for step in steps] == [0, 0, 0], [step.stderr for step in steps]
    assert "perplexity" in steps[-1].stdout
    wrong = program("quantize", model, "--recipe", "bcq-w4-g128", "--set", "weight_bits=0", "-o", "other")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.safetensors", "out", "text.txt"]


def test_importing_quantkit_is_enough_for_from_pretrained(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    from tests.pipeline import quantize_tiny

    quantize_tiny(tiny_model("opt"), tmp_path / "out")
    program = (
        "import quantkit; from transformers import AutoModelForCausalLM as A; import sys; "
        "m = A.from_pretrained(sys.argv[1]); print(type(m.model.decoder.layers[0].fc1).__name__)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "QuantizedLinear"
