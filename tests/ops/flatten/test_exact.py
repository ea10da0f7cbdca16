"""INT8 products on a CPU are exact on every processor, also where the library's own are not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from quantkit.ops.flatten import exact

# Odd sizes, more columns than one exact fp32 sum, and nothing but the largest codes: the sums that saturate first.
CHECK = """
import torch
from quantkit.ops.flatten.exact import int8_product
for m, n, k in ((1, 3, 5), (8, 16, 32), (7, 65, 2049)):
    for acts, codes in (
        (torch.randint(-127, 128, (m, k), dtype=torch.int8), torch.randint(-127, 128, (n, k), dtype=torch.int8)),
        (torch.full((m, k), 127, dtype=torch.int8), torch.full((n, k), -127, dtype=torch.int8)),
    ):
        assert torch.equal(int8_product(acts, codes), (acts.long() @ codes.long().t()).int()), (m, n, k)
"""


def test_products_are_exact_here() -> None:
    exec(CHECK, {})


def test_products_are_exact_where_the_library_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_library_is_exact", lambda: False)
    monkeypatch.setattr(torch, "_int_mm", None)
    exec(CHECK, {})


@pytest.mark.parametrize("quick", [False, True], ids=["library-slower", "library-quicker"])
def test_the_quicker_product_is_taken(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both give the same integers, so the time decides alone."""
    monkeypatch.setattr(exact, "_library_is_exact", lambda: True)
    seconds = iter([1.0, 2.0] if quick else [2.0, 1.0])
    monkeypatch.setattr(exact, "_least_seconds", lambda _product: next(seconds))
    taken = []
    library = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda *operands: taken.append(1) or library(*operands))
    exact._library_is_quick.cache_clear()
    try:
        exec(CHECK, {})
    finally:
        exact._library_is_quick.cache_clear()
    assert bool(taken) == quick


def test_products_are_exact_without_vnni() -> None:
    """oneDNN held to AVX2: torch's INT8 product saturates then."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
