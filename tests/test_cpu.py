"""A processor that does not survive half precision is found out by a child process; a stand-in plays it here."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import quantkit
from quantkit import cpu
from quantkit.cli.app import app
from quantkit.errors import DeviceError
from quantkit.models.loading import load_model

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
FLAGS = "fpu avx512f amx_bf16 amx_tile"
GOLDEN = Path(__file__).parent / "golden" / "files"


@pytest.fixture(autouse=True)
def _virtual_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMX is announced, the variable is not set, and a half-precision product is an illegal instruction."""
    information = tmp_path / "cpuinfo"
    information.write_text(f"processor\t: 0\nmodel name\t: Stand-in\nflags\t\t: {FLAGS} hypervisor\n")
    monkeypatch.setattr(cpu, "CPU_INFO", information)
    monkeypatch.setattr(cpu, "PROBE", DIES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(cpu.LIMIT_VARIABLE, raising=False)


def test_the_probe_itself_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert cpu.half_precision_failure() is None


def test_a_process_that_dies_is_told_by_its_signal() -> None:
    assert cpu.half_precision_failure() == "SIGILL"
    with pytest.raises(DeviceError, match=r"\(SIGILL\): set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"):
        cpu.check_half_precision()


def test_the_child_is_asked_once_for_a_processor_and_a_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError):
        cpu.check_half_precision()
    ((key, answer),) = json.loads((tmp_path / "cache" / "quantkit" / cpu.ANSWERS).read_text()).items()
    assert (key, answer) == (f"Stand-in, torch {version('torch')}", "SIGILL")
    monkeypatch.setattr(cpu, "PROBE", "pass")
    with pytest.raises(DeviceError):
        cpu.check_half_precision()
    cpu.CPU_INFO.write_text(cpu.CPU_INFO.read_text().replace("Stand-in", "Another"))
    cpu.check_half_precision()


@pytest.mark.parametrize("change", ["variable", "no-amx", "no-hypervisor", "no-cpuinfo"])
def test_nobody_is_asked_where_nothing_is_suspected(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = cpu.CPU_INFO.read_text()
    if change == "variable":
        monkeypatch.setenv(cpu.LIMIT_VARIABLE, "AVX512_CORE_BF16")
    elif change == "no-cpuinfo":
        cpu.CPU_INFO.unlink()
    else:
        cpu.CPU_INFO.write_text(text.replace("amx_bf16" if change == "no-amx" else "hypervisor", ""))
    cpu.check_half_precision()


@pytest.mark.parametrize("content", ["[", "[" * 5000, "[]", '{"another": 1}', None])
def test_a_cache_of_no_use_is_no_error_of_its_own(content: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "quantkit"
    if content is not None:
        folder.mkdir(parents=True)
        (folder / cpu.ANSWERS).write_text(content)
    else:
        folder.parent.write_text("a file where the folder would be")
    with pytest.raises(DeviceError, match="SIGILL"):
        cpu.check_half_precision()


def test_loading_in_half_precision_is_refused_and_in_fp32_is_not() -> None:
    with pytest.raises(DeviceError, match="SIGILL"):
        quantkit.load(str(GOLDEN / "bcq"))
    with pytest.raises(DeviceError, match="SIGILL"):
        load_model(str(GOLDEN / "model"), dtype=torch.bfloat16)
    assert quantkit.load(str(GOLDEN / "bcq"), dtype=torch.float32).dtype == torch.float32
    assert load_model(str(GOLDEN / "model"))[0].dtype == torch.float32


def test_doctor_names_the_variable() -> None:
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "half-precision products end the process here (SIGILL): set ONEDNN_MAX_CPU_ISA" in shown.stdout
