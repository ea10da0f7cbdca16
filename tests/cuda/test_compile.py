import importlib.util
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import pytest

from quantkit.cuda import compile as units
from quantkit.cuda.architectures import ARCHITECTURES, Architecture
from quantkit.cuda.compile import (
    CompileUnit,
    cached_cubin,
    can_compile,
    compile_units,
    compiler_options,
    parse_resources,
)
from quantkit.cuda.source import KernelSource
from quantkit.errors import KernelError
from quantkit.ops.bcq.gemm_shapes import WIDE_NUMBERS, WIDE_SHAPES
from quantkit.ops.constants import SHARED_CONSTANTS
from quantkit.ops.instances import all_units

needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is None, reason="CuPy is not installed")
WORKERS = os.cpu_count() or 1
SPILLED_BYTES = 80  # at most
BATCH = 24  # instances that are compiled together; each of several hundred would take longer
AMPERE, HOPPER = ARCHITECTURES[8, 0], ARCHITECTURES[9, 0]


def test_expression_spells_booleans_as_cpp() -> None:
    source = KernelSource("a.cu", {})
    assert CompileUnit(source, "f", (4, True)).expression == "f<4, true>"
    assert CompileUnit(source, "f").expression == "f"


def test_the_compiler_is_told_target_features_and_constants() -> None:
    source = KernelSource("a.cu", {"ROWS": 64, "LEAST": -1})
    assert compiler_options(source, HOPPER)[:5] == (
        "-arch=sm_90a",
        "-DQK_OVERLAP=1",
        "-DQK_CLUSTERS=1",
        "-DQK_ROWS=64",
        "-DQK_LEAST=-1",
    )
    assert compiler_options(source, AMPERE)[:3] == ("-arch=sm_80", "-DQK_OVERLAP=0", "-DQK_CLUSTERS=0")


def test_ptxas_report_is_read_per_kernel() -> None:
    log = (
        "ptxas info    : Compiling entry function 'one' for 'sm_90'\nptxas info    : Function properties for one\n"
        "ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 2048 bytes smem, 400 bytes cmem[0]\n"
        "ptxas info    : Function properties for helper\n"
        "ptxas         .     8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the wgmma pipeline in the function 'two'\n"
        "ptxas info    : Compiling entry function 'two' for 'sm_90'\n"
        "ptxas info    : Function properties for two\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 12 registers\n"
    )
    assert parse_resources(log) == {
        "one": units.Resources(40, 2048, 24, 4, 8),
        "two": units.Resources(12, 0, 0, 0, 0, serialized=True),
    }


@needs_nvrtc
def test_compile_error_is_one_line_with_file_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelSource, "text", '#line 7 "bad.cu"\n__global__ void f() { nonsense; }\n')
    with pytest.raises(KernelError, match=r'bad\.cu\(7\): error: identifier "nonsense"') as caught:
        compile_units([CompileUnit(KernelSource("bad.cu", {}), "f")], AMPERE)
    assert "\n" not in str(caught.value)


@needs_nvrtc
def test_a_constant_that_is_not_handed_over_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelSource, "text", "__global__ void f(int* p) { *p = QK_ROWS; }\n")
    with pytest.raises(KernelError, match="QK_ROWS"):
        compile_units([CompileUnit(KernelSource("a.cu", {}), "f")], AMPERE)
    assert compile_units([CompileUnit(KernelSource("a.cu", {"ROWS": 64}), "f")], AMPERE).image


@needs_nvrtc
def test_cubin_is_cached_whole_and_keyed_by_source_constants_and_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = "template <int k> __global__ void tiny(int* p) { *p = k * QK_ROWS; }"
    monkeypatch.setattr(KernelSource, "text", text)

    def cubin(rows: int = 64, row: Architecture = AMPERE) -> tuple[Path, str]:
        return cached_cubin(CompileUnit(KernelSource("tiny.cu", {"ROWS": rows}), "tiny", (3,)), row)

    path, symbol = cubin()
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert "tiny" in symbol
    written = path.stat().st_mtime_ns
    assert cubin() == (path, symbol)
    assert path.stat().st_mtime_ns == written
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".cubin", ".symbol"]
    assert cubin(rows=32)[0] != path
    assert cubin(row=HOPPER)[0] != path
    monkeypatch.setattr(KernelSource, "text", text + "// changed")
    assert cubin()[0] != path


def _compiled(row: Architecture, *, every: bool) -> list[CompileUnit]:
    """Every instance of a generation, or the first of every kernel, the plainest: make kernels compiles all."""
    wanted = list(dict.fromkeys(all_units(row)))
    if every:
        return wanted
    kernels = groupby(sorted(wanted, key=lambda unit: unit.function), key=lambda unit: unit.function)
    return [next(instances) for _, instances in kernels]


# Generations whose GPUs run the same machine code are compiled once.
JOBS = {
    (unit.source.file, row.target): (row, unit.source)
    for row in ARCHITECTURES.values()
    for unit in all_units(row)
    if row is next(other for other in ARCHITECTURES.values() if other.target == row.target)
}


def _first_of_its_kind(row: Architecture) -> bool:
    """Whether no generation before has the same instructions and registers. Those behind have less shared memory, or
    fewer warps a block with more registers each."""
    rows = list(ARCHITECTURES.values())
    return next(other for other in rows if (other.native, other.overlap) == (row.native, row.overlap)) is row


def _machine_code(row: Architecture) -> set[CompileUnit]:
    """Instances of which make kernels makes machine code, in most of its time: those of tested generations, the first
    of their kinds; of two that differ in the 16-bit type alone one, of either type in turn."""
    if not row.tested or not _first_of_its_kind(row):
        return set()
    pairs: dict[tuple[Any, ...], list[CompileUnit]] = {}
    for unit in dict.fromkeys(all_units(row)):
        place = _place_of_type(unit)
        others = unit.arguments[:place] + unit.arguments[place + 1 :]
        pairs.setdefault((unit.source, unit.function, others), []).append(unit)
    return {pair[number % len(pair)] for number, pair in enumerate(pairs.values())}


@cache
def _template_parameters(source: KernelSource, function: str) -> tuple[str, ...]:
    """Names of a kernel's template parameters."""
    text = re.sub(r"//.*", "", source.text)
    found = re.search(rf"template\s*<([^<>]*)>\s*__global__[^;{{]*\b{function}\s*\(", text)
    return tuple(part.split()[-1] for part in found[1].split(",")) if found else ()


def _place_of_type(unit: CompileUnit) -> int:
    """Of the 16-bit type among the template arguments; behind all of them where there is none."""
    names = _template_parameters(unit.source, unit.function)
    return names.index("kDtype") if "kDtype" in names else len(unit.arguments)


def _new_in(row: Architecture) -> list[CompileUnit]:
    """Instances that no generation before compiles from the same text with the same features, and the sample."""
    before = {
        unit
        for other in takewhile(lambda other: other is not row, ARCHITECTURES.values())
        if (other.overlap, other.clusters) == (row.overlap, row.clusters)
        for unit in all_units(other)
    }
    sample = set(_compiled(row, every=False))
    return [unit for unit in _compiled(row, every=True) if unit not in before or unit in sample]


def _may_spill(unit: CompileUnit) -> int:
    """Bytes a thread. Fused products of many warps are the fastest in spite of a few (docs/kernels/log.md, bcq_gemm 20
    and 33)."""
    wide = unit.function == "bcqGemm" and unit.arguments[5:9] in WIDE_SHAPES + WIDE_NUMBERS
    return SPILLED_BYTES if wide else 0


def _faults(batch: list[CompileUnit], row: Architecture, *, machine_code: bool) -> list[str]:
    """Instances whose shared memory is more than a block has, as far as machine code is made.

    Where the kernels are tested also those that spill, or whose products of warpgroups wait for each other.
    """
    if not machine_code:
        _compile_to_ptx(batch, row)
        return []
    cubin = compile_units(batch, row)
    used = {unit: cubin.resources[cubin.symbols[unit.expression]] for unit in batch}
    spilled = {unit: max(it.stack_frame, it.spill_stores + it.spill_loads) for unit, it in used.items()}
    spilling = [unit.expression for unit, most in spilled.items() if most > _may_spill(unit)]
    serial = [unit.expression for unit, it in used.items() if it.serialized]
    large = [unit.expression for unit, it in used.items() if it.shared + unit.shared_mem > row.shared_limit()]
    return spilling + serial + large if row.tested else large


def _compile_to_ptx(batch: list[CompileUnit], row: Architecture) -> None:
    """What NVRTC does before machine code is made, with little optimization: all errors of the source, in a fifth of
    the time."""
    from cupy_backends.cuda.libs import nvrtc

    (source,) = {unit.source for unit in batch}
    program = nvrtc.createProgram(source.text, source.file, (), ())
    for unit in batch:
        nvrtc.addNameExpression(program, unit.expression)
    target, *others = compiler_options(source, row)
    kept = (option for option in others if "ptxas" not in option)
    options = (target.replace("sm_", "compute_"), "-Ofc=max", *kept)  # an option of NVRTC 13, which make installs
    try:
        nvrtc.compileProgram(program, options)
        assert all(nvrtc.getLoweredName(program, unit.expression) for unit in batch)
    finally:
        nvrtc.destroyProgram(program)


def _cases() -> Iterator[Any]:
    """A sample of every file for the first generation of each kind, up to PTX; for make kernels every instance."""
    for (file, target), (row, source) in JOBS.items():
        if _first_of_its_kind(row):
            yield pytest.param(row, source, False, id=f"sample-{file}-{target}")
        yield pytest.param(row, source, True, id=f"every-{file}-{target}", marks=pytest.mark.kernels)


@needs_nvrtc
@pytest.mark.parametrize(("row", "source", "every"), list(_cases()))
def test_instances_compile_without_spills_and_fit_shared_memory(
    row: Architecture, source: KernelSource, every: bool
) -> None:
    if not can_compile(row):
        pytest.skip(f"this NVRTC does not know {row.target}")
    wanted = [unit for unit in (_new_in(row) if every else _compiled(row, every=False)) if unit.source is source]
    to_the_end = _machine_code(row) if every else set()
    with ThreadPoolExecutor(WORKERS) as pool:  # NVRTC compiles outside the interpreter's lock
        for machine_code in (True, False):
            units = [unit for unit in wanted if (unit in to_the_end) == machine_code]
            count = max(WORKERS, -(-len(units) // BATCH))
            batches = [units[i::count] for i in range(count) if units[i::count]]
            check = partial(_faults, row=row, machine_code=machine_code)
            assert not [name for names in pool.map(check, batches) for name in names]


def test_machine_code_of_ampere_and_hopper_is_made_once_and_of_either_type() -> None:
    for row in ARCHITECTURES.values():
        made, kernels = _machine_code(row), {unit.function for unit in all_units(row)}
        assert {unit.function for unit in made} == (kernels if row in (AMPERE, HOPPER) else set())
    gemm = [unit for unit in _machine_code(HOPPER) if unit.function == "bcqGemm"]
    assert {unit.arguments[_place_of_type(unit)] for unit in gemm} == {0, 1}
    assert 2 * len(gemm) == len({unit for unit in all_units(HOPPER) if unit.function == "bcqGemm"})


def test_the_16_bit_type_is_found_among_template_arguments() -> None:
    for function, place in (("bcqGemm", 4), ("decodeAttention", 1), ("bcqFitGroups", 2), ("bcqArrange", 0)):
        unit = next(unit for unit in all_units(HOPPER) if unit.function == function)
        assert _place_of_type(unit) == place


def test_every_instance_is_compiled_for_its_features_and_every_kernel_for_its_target() -> None:
    compiled: dict[tuple[bool, bool], set[CompileUnit]] = {}
    run = {row.capability for row, _ in JOBS.values()}
    for row in ARCHITECTURES.values():
        new = set(_new_in(row)) if row.capability in run else set()
        compiled.setdefault((row.overlap, row.clusters), set()).update(new)
        assert set(all_units(row)) <= compiled[row.overlap, row.clusters]
        assert {unit.function for unit in new} == ({unit.function for unit in all_units(row)} if new else set())
    assert {row.target for row in ARCHITECTURES.values()} == {row.target for row, _ in JOBS.values()}


def test_dynamic_shared_memory_of_every_instance_fits_its_generation() -> None:
    for row in ARCHITECTURES.values():
        assert [unit.expression for unit in all_units(row) if unit.shared_mem > row.shared_limit()] == [], row.title


def test_sources_ask_nothing_of_their_target_but_what_features_tell() -> None:
    """Up to PTX an instance is then the same for all generations with its features."""
    for source in {unit.source for row in ARCHITECTURES.values() for unit in all_units(row)}:
        assert set(re.findall(r"__CUDA_ARCH__(.*)", source.text)) <= {" >= 900"}, source.file
    for row in ARCHITECTURES.values():
        assert row.overlap == (row.capability >= (9, 0))


def test_every_kernel_of_every_generation_is_in_the_sample() -> None:
    for row in ARCHITECTURES.values():
        assert {unit.function for unit in _compiled(row, every=False)} == {unit.function for unit in all_units(row)}


def test_constants_are_those_that_the_sources_use() -> None:
    """Every macro in a source is handed over, and a family hands nothing over that none of its sources reads."""
    sources = {unit.source for row in ARCHITECTURES.values() for unit in all_units(row)}
    used = {source: set(re.findall(r"\bQK_(\w+)", source.text)) for source in sources}
    for source in sources:
        assert used[source] <= {*source.constants, "OVERLAP", "CLUSTERS"}, source.file
    for family in {source.file.split("/")[0] for source in sources}:
        own = [source for source in sources if source.file.startswith(f"{family}/")]
        handed_over = {name for source in own for name in source.constants} - SHARED_CONSTANTS.keys()
        assert handed_over <= {name for source in own for name in used[source]}, family
