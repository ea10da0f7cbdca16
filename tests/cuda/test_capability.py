import subprocess
import sys

import pytest

from quantkit.cuda.capability import BINARY_MMA, BINARY_WGMMA, INT4_MMA, Support, capabilities, support


@pytest.mark.parametrize(
    ("unit", "capability", "expected"),
    [
        (BINARY_MMA, (8, 6), Support.NATIVE),
        (BINARY_MMA, (9, 0), Support.NATIVE),
        (BINARY_MMA, (12, 0), Support.EMULATED),
        (BINARY_MMA, (7, 5), Support.MISSING),
        (BINARY_WGMMA, (9, 0), Support.NATIVE),
        (BINARY_WGMMA, (8, 0), Support.MISSING),
        (INT4_MMA, (8, 9), Support.NATIVE),
        (INT4_MMA, (9, 0), Support.EMULATED),
    ],
)
def test_support_by_generation(unit: str, capability: tuple[int, int], expected: Support) -> None:
    assert support(unit, *capability) is expected


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_every_row_has_its_consequence(capability: tuple[int, int]) -> None:
    rows = capabilities(*capability)
    assert len({row.unit for row in rows}) == len(rows)
    assert all(row.used_by and row.support in Support for row in rows)


def test_table_needs_neither_torch_nor_cupy() -> None:
    code = "import sys, quantkit.cuda.capability; sys.exit('torch' in sys.modules or 'cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
