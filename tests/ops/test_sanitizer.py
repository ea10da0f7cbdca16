"""Kernels' own tests once more under compute-sanitizer: no access outside a tensor, no race in shared memory.

They are the samples of every op (the OPS table) and the tests with the mark ``sanitize``. Only quantkit's kernels are
watched: cuBLAS has hazards of its own. Every tensor is an allocation of its own, so that an access behind its end is
seen; graphs need torch's allocator and are left out.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from quantkit.cuda.architectures import ARCHITECTURES
from quantkit.ops.instances import INSTANCES
from quantkit.ops.registry import OPS
from tests.ops import test_epilogue, test_registry
from tests.ops.table import NAMES

ROOT = Path(__file__).parents[2]
ERRORS_FOUND = 9
SELECTED = ("-m", "cuda and sanitize", "-p", "no:cacheprovider")
# Family, and what the names of the kernels contain that are watched in one run.
WATCHED = (
    ("bcq", "bcq"),
    ("bipolar", "bipolar"),
    ("decode", "decode"),
    ("flatten", "flattenQuantize"),
    ("flatten", "int8"),
    ("attention", "int8Attention"),
    ("rotation", "rotateInputs"),
    ("solve", "bcq"),
    ("solve", "trellis"),
    ("trellis", "trellis"),
)
# racecheck does not see that a lane arrives at a barrier for its warp, behind __syncwarp, and takes what is written
# there next for a race (kernels/log.md): loads of planes and the next bulk copy; sums of x and the next ones.
# It ends with an error of its own on the product of planes that one in the trellis format begins with.
NOT_RACECHECKED = (
    "tests/ops/bipolar/test_fused.py",
    "tests/ops/bcq/test_gemm_numbers.py",
    "tests/ops/trellis/test_products.py",
)
# Sums of x, too: a prefix of tests. Gates of the fused product leave shared memory alone, which others check.
NOT_RACECHECKED_TESTS = (
    "tests/ops/bcq/test_gemm.py::test_halves_of_split_k_on_odd_shapes[grid",
    "tests/ops/bcq/test_gated.py::test_every_layout_of_the_fused_product_gates_to_the_bit",
)


def _tests(family: str, tool: str) -> list[str]:
    """The family's tests, and the samples of its ops, some of which racecheck ends on with an error of its own."""
    samples = f"{Path(test_registry.__file__).relative_to(ROOT)}::{_SAMPLES.__name__}"
    ops = [name for name in NAMES if OPS[name].arguments.__module__.split(".")[2] == family]
    more = [str(Path(test_epilogue.__file__).relative_to(ROOT))] if family == "bcq" else []
    return [f"tests/ops/{family}", *more, *(f"{samples}[{name}]" for name in ops if tool != "racecheck")]


_SAMPLES = test_registry.test_kernels_give_what_the_reference_gives


def test_every_kernel_is_watched() -> None:
    for family, enumerate_units in INSTANCES.items():
        parts = [part for watched, part in WATCHED if watched == family]
        for row in ARCHITECTURES.values():
            for function in {unit.function for unit in enumerate_units(row)}:
                assert any(part in function for part in parts), function


def test_what_racecheck_leaves_out_exists() -> None:
    for test in (*NOT_RACECHECKED, *NOT_RACECHECKED_TESTS):
        path, _, name = test.partition("::")
        assert name.partition("[")[0] in (ROOT / path).read_text(encoding="utf-8"), test


def _is_marked(test: Any) -> bool:
    """Whether all or some instances of a test run under the sanitizer, which only watches a GPU."""
    marks = {mark.name: mark for mark in getattr(test, "pytestmark", ())}
    values = [value for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize" for value in mark.args[1]]
    chosen = "sanitize" in marks or any(
        mark.name == "sanitize" for value in values for mark in getattr(value, "marks", ())
    )
    return chosen and ("cuda" in marks or "device" in inspect.signature(test).parameters)


@pytest.mark.parametrize("family", INSTANCES)
def test_every_family_has_tests_to_run(family: str) -> None:
    modules = [
        import_module(f"tests.ops.{family}.{path.stem}") for path in Path(__file__).parent.glob(f"{family}/test_*.py")
    ]
    tests = [value for module in modules for name, value in vars(module).items() if name.startswith("test_")]
    assert any(map(_is_marked, tests))
    assert _is_marked(_SAMPLES)


@pytest.mark.cuda
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize(("family", "part"), WATCHED)
def test_no_kernel_leaves_its_memory_or_races(family: str, part: str, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    watch = [sanitizer, "--tool", tool, "--error-exitcode", str(ERRORS_FOUND), "--kernel-name", f"kns={part}"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTEST_ADDOPTS": ""}
    run = [*watch, sys.executable, "-m", "pytest", *SELECTED, *_tests(family, tool)]
    if tool == "racecheck":
        run += [f"--ignore={path}" for path in NOT_RACECHECKED]
        run += [f"--deselect={test}" for test in NOT_RACECHECKED_TESTS]
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert re.search(r"[1-9]\d* passed", done.stdout)
