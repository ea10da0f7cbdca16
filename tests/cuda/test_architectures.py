"""The rows of GPU generations: every kernel that one uses runs on its own units, and every GPU finds a row."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from quantkit.cuda.architectures import (
    ARCHITECTURES,
    INSTRUCTION_OF,
    Architecture,
    Instruction,
    Kernel,
    Support,
    architecture,
    capabilities,
    known_peaks,
)
from quantkit.errors import KernelError

ROWS = [pytest.param(row, id=row.title) for row in ARCHITECTURES.values()]
BLOCK_BYTES = {(8, 0): 166_912, (8, 6): 101_376, (8, 9): 101_376, (9, 0): 232_448, (10, 0): 232_448, (12, 0): 101_376}
"""Shared memory per block that the CUDA programming guide gives."""


@pytest.mark.parametrize("row", ROWS)
def test_kernels_stand_on_native_instructions(row: Architecture) -> None:
    for kernel in row.kernels:
        instruction = INSTRUCTION_OF[kernel]
        assert instruction is None or row.support(instruction) is Support.NATIVE, kernel


@pytest.mark.parametrize("row", ROWS)
def test_every_format_has_a_kernel_for_one_and_for_many_tokens(row: Architecture) -> None:
    products = (
        "bcq_lut_gemv",
        "bcq_dequantize",
        "bipolar_gemm_.* int8",
        "int8_gemm_(mma|wgmma)$",
        "int8_attention_mma",
    )
    for product in products:
        assert any(re.match(product, kernel) for kernel in row.kernels), product


@pytest.mark.parametrize("row", ROWS)
def test_an_instruction_is_native_or_emulated_not_both(row: Architecture) -> None:
    assert not row.native & row.emulated
    assert row.overlap or not row.clusters  # both came with compute capability 9.0


@pytest.mark.parametrize("row", ROWS)
def test_shared_memory_is_that_of_the_programming_guide(row: Architecture) -> None:
    assert row.shared_limit() == BLOCK_BYTES[row.capability]
    assert 2 * (row.shared_limit(2) + 1024) == row.shared_memory


@pytest.mark.parametrize("row", ROWS)
def test_doctor_names_the_kernels_of_each_instruction(row: Architecture) -> None:
    table = {line.instruction: line for line in capabilities(row)}
    assert list(table) == list(Instruction)
    for kernel in row.kernels:
        instruction = INSTRUCTION_OF[kernel]
        assert instruction is None or kernel in table[instruction].used_by.split(", ")
    assert all(line.consequence for line in table.values() if line.support is not Support.NATIVE)


@pytest.mark.parametrize(
    ("capability", "nearest"),
    [((8, 7), (8, 6)), ((10, 3), (10, 0)), ((11, 0), (10, 0)), ((12, 1), (12, 0)), ((13, 0), (12, 0))],
)
def test_a_gpu_without_a_row_takes_the_newest_older_one_that_needs_nothing_special(
    capability: tuple[int, int], nearest: tuple[int, int]
) -> None:
    found, row = architecture(*capability), ARCHITECTURES[nearest]
    assert (found.kernels, found.shared_memory) == (row.kernels, row.shared_memory)
    assert (found.target, found.verified) == (f"sm_{capability[0]}{capability[1]}", "untested")
    assert architecture(*capability) is found


def test_hopper_alone_has_the_warpgroup_target() -> None:
    special = [row.capability for row in ARCHITECTURES.values() if row.target.endswith("a")]
    assert special == [(9, 0)]
    assert Kernel.INT8_GEMM_WGMMA not in architecture(9, 1).kernels


def test_older_gpus_are_refused_in_one_line() -> None:
    with pytest.raises(KernelError, match=r"compute capability 8\.0 or later; this one has 7\.5"):
        architecture(7, 5)


def test_peaks_are_found_by_the_drivers_name() -> None:
    found = known_peaks("NVIDIA H200")
    assert found is not None
    assert found.read_bandwidth == 4.65e12
    assert known_peaks("a GPU of tomorrow") is None
    names = [name for row in ARCHITECTURES.values() for name in row.peaks]
    assert len(set(names)) == len(names)


def test_the_rows_need_neither_torch_nor_cupy() -> None:
    code = "import sys, quantkit.cuda.architectures; sys.exit('torch' in sys.modules or 'cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
