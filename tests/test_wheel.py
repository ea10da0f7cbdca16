"""The wheel, installed in an empty environment outside the checkout, does the main job. Takes minutes: marked slow."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from quantkit.assets import recipe_names
from tests.tiny import save_tiny_model

ROOT = Path(__file__).parents[1]
# The compiler comes with the extra; a kernel's source and its headers must come with the wheel.
COMPILE = """
from quantkit.cuda.architectures import architecture
from quantkit.cuda.compile import compile_units
from quantkit.ops.instances import all_units
row = architecture(8, 0)
unit = next(unit for unit in all_units(row) if unit.source.file.startswith("bcq/"))
compile_units([unit], row)
print("compiled", unit.source.file)
"""


def _run(*command: str | Path, cwd: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_does_the_main_job_outside_the_checkout(tmp_path: Path) -> None:
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    _run(sys.executable, *pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("quantkit-*.whl")
    stored = zipfile.ZipFile(wheel).namelist()
    assert {f"quantkit/recipes/{name}.yaml" for name in recipe_names()} <= set(stored)
    sources = {f"quantkit/{path.relative_to(ROOT)}" for path in (ROOT / "kernels").rglob("*.cu*")}
    assert sources <= set(stored)

    _run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python, quantkit = (tmp_path / "env" / "bin" / name for name in ("python", "quantkit"))
    constraints = ("--constraint", ROOT / "constraints.txt")
    _run(python, *pip, "install", *constraints, f"quantkit[cuda13] @ {wheel.as_uri()}", cwd=tmp_path)
    where = _run(python, "-c", "import quantkit; print(quantkit.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "env")

    assert "kernels" in _run(quantkit, "doctor", cwd=tmp_path)
    model = save_tiny_model("llama", tmp_path / "model")
    command = (quantkit, "quantize", model, "--recipe", "hqq-w4-g128", "--set", "group_size=32", "--out", "out")
    assert "bits per weight" in _run(*command, cwd=tmp_path)
    assert "compiled bcq/" in _run(python, "-c", COMPILE, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
