"""The rules that keep the code base one: import direction, file length, a fast --help."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 350
HELP_SECONDS = 0.3
SLOW_IMPORTS = ("torch", "transformers", "datasets", "accelerate", "cupy", "numpy", "matplotlib")

# Floors, lowest first; a module imports from its own floor or below.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "assets", "recipe", "stats", "progress", "hub", "storage"),
    ("formats", "cuda"),
    ("ops", "models", "data"),
    ("nn", "quantizers", "calibration"),
    ("methods", "evaluation"),
    ("checkpoint",),
    ("runtime",),
    ("integrations", "bench"),
    ("search",),
    ("jobs",),
    ("report",),
    ("cli", "__main__"),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def _modules() -> list[Path]:
    package = ROOT / "quantkit"
    return [path for path in sorted(package.rglob("*.py")) if path != package / "__init__.py"]


def _imports(path: Path) -> set[str]:
    """First components under quantkit that a module imports at its top level, type-checking blocks left out."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("quantkit."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "quantkit":
            found |= {alias.name for alias in node.names if alias.name in FLOOR_OF}
    return found


@pytest.mark.parametrize("path", _modules(), ids=lambda path: str(path.relative_to(ROOT / "quantkit")))
def test_imports_point_down(path: Path) -> None:
    own = path.relative_to(ROOT / "quantkit").parts[0].removesuffix(".py")
    upward = {name for name in _imports(path) if FLOOR_OF[name] > FLOOR_OF[own]}
    assert not upward, f"{own} (floor {FLOOR_OF[own]}) imports {upward}"


def test_files_stay_within_the_line_cap() -> None:
    sources = [p for p in ROOT.rglob("*") if p.suffix in (".py", ".cu", ".cuh") and ".venv" not in p.parts]
    too_long = {str(p.relative_to(ROOT)): n for p in sources if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert not too_long


def test_help_imports_nothing_slow() -> None:
    probe = f"import sys, quantkit.cli.app; print([m for m in {SLOW_IMPORTS!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_help_answers_quickly() -> None:
    """Processor time, the best of five runs, less the interpreter's own start: other work must not fail it."""

    def seconds(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    bare = min(seconds("-c", "pass") for _ in range(5))
    whole = min(seconds("-m", "quantkit", "--help") for _ in range(5))
    assert whole - bare < HELP_SECONDS
