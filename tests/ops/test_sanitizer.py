"""Kernels' own tests once more under compute-sanitizer: no access outside a tensor, no race in shared memory.

Only quantkit's kernels are watched: cuBLAS has hazards of its own. Every tensor is an allocation of its own, so that an
access behind its end is seen; graphs need torch's allocator and are left out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ERRORS_FOUND = 9


@dataclass(frozen=True)
class Subset:
    """Tests on odd shapes.

    files: in tests/ops. chosen: pytest's -k. kernels: how the names of what they launch begin.
    """

    files: tuple[str, ...]
    chosen: str
    kernels: str


SUBSETS = {
    "bcq": Subset(
        ("test_bcq.py", "test_finish.py"),
        "(matches_fp64 and (q1- or q3-) and (257x1000 or 96x777 or 40x500 or 50x24700))"
        " or (at_every_token_count and (257x1000 or 130x777 or 320x1280)) or every_function_is_applied",
        "bcq",
    ),
    "decode": Subset(
        ("test_decode.py",),
        "match_torch or normed_as_if or scaled_and_rounded or are_turned or attention_matches",
        "decode",
    ),
    "flatten": Subset(
        ("test_flatten_kernels.py",), "(quantizer_gives and (20-32 or 999)) or rows_that_are_not_aligned", "flatten"
    ),
    "int8": Subset(
        ("test_flatten_kernels.py", "test_flatten_requantize.py"),
        "expansion or (wgmma_tile_equals and float16) or products_equal or (one_by_one and relu) or nibble",
        "int8",
    ),
    "attention": Subset(("test_int8_attention.py",), "match_the_reference or start_anywhere", "int8Attention"),
    "bipolar": Subset(
        ("test_bipolar_kernels.py",),
        "expansion or (wgmma_tile_equals and float16) or (warp_products and (w1a1- or w2a3-)) or gemv_equals"
        " or (quantizer_gives and (K40 or K1030))",
        "bipolar",
    ),
}


@pytest.mark.cuda
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("name", SUBSETS)
def test_no_kernel_leaves_its_memory_or_races(name: str, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    subset = SUBSETS[name]
    watch = [sanitizer, "--tool", tool, "--error-exitcode", str(ERRORS_FOUND), "--kernel-name", f"kns={subset.kernels}"]
    pytest_call = [sys.executable, "-m", "pytest", "-m", "cuda", "-k", subset.chosen, "-p", "no:cacheprovider"]
    files = [str(Path("tests", "ops", file)) for file in subset.files]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [*watch, *pytest_call, *files], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert re.search(r"[1-9]\d* passed", done.stdout)
