import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quantkit.cuda import compile as units
from quantkit.cuda.compile import CompileUnit, cached_cubin, compile_units, parse_resources, target
from quantkit.errors import KernelError
from quantkit.ops.instances import COMPILED_CAPABILITIES, all_units

needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is None, reason="CuPy is not installed")
WORKERS = os.cpu_count() or 1
FILES = sorted({unit.source for cc in COMPILED_CAPABILITIES for unit in all_units(*cc)})


def test_expression_spells_booleans_as_cpp() -> None:
    assert CompileUnit("a.cu", "f", (4, True)).expression == "f<4, true>"
    assert CompileUnit("a.cu", "f").expression == "f"


def test_hopper_units_target_sm_90a_and_nothing_else() -> None:
    assert target(9, 0, hopper=True) == "sm_90a"
    assert target(8, 6, hopper=False) == "sm_86"
    with pytest.raises(KernelError, match=r"9\.0; this GPU has 8\.6"):
        target(8, 6, hopper=True)


def test_ptxas_report_is_read_per_kernel() -> None:
    log = (
        "ptxas info    : Compiling entry function 'one' for 'sm_90'\nptxas info    : Function properties for one\n"
        "ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers\n"
        "ptxas info    : Function properties for helper\n"
        "ptxas         .     8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Compiling entry function 'two' for 'sm_90'\n"
        "ptxas info    : Function properties for two\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 12 registers\n"
    )
    assert parse_resources(log) == {"one": units.Resources(40, 24, 4, 8), "two": units.Resources(12, 0, 0, 0)}


@needs_nvrtc
def test_compile_error_is_one_line_with_file_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "kernel_source", lambda file: '#line 7 "bad.cu"\n__global__ void f() { nonsense; }\n')
    with pytest.raises(KernelError, match=r'bad\.cu\(7\): error: identifier "nonsense"') as caught:
        compile_units([CompileUnit("bad.cu", "f")], "sm_80")
    assert "\n" not in str(caught.value)


@needs_nvrtc
def test_cubin_is_cached_whole_and_keyed_by_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    unit = CompileUnit("tiny.cu", "tiny", (3,))
    source = "template <int k> __global__ void tiny(int* p) { *p = k; }"
    monkeypatch.setattr(units, "kernel_source", lambda file: source)
    path, symbol = cached_cubin(unit, "sm_80")
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert "tiny" in symbol
    written = path.stat().st_mtime_ns
    assert cached_cubin(unit, "sm_80") == (path, symbol)
    assert path.stat().st_mtime_ns == written
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".cubin", ".symbol"]
    source += "// changed"
    assert cached_cubin(unit, "sm_80")[0] != path


def _spilling(batch: list[CompileUnit], arch: str) -> list[str]:
    cubin = compile_units(batch, arch)
    used = {unit.expression: cubin.resources[cubin.symbols[unit.expression]] for unit in batch}
    return [name for name, it in used.items() if it.stack_frame or it.spill_stores or it.spill_loads]


@needs_nvrtc
@pytest.mark.parametrize("capability", COMPILED_CAPABILITIES, ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
@pytest.mark.parametrize("file", FILES)
def test_every_instance_compiles_without_spills(file: str, capability: tuple[int, int]) -> None:
    wanted = [unit for unit in all_units(*capability) if unit.source == file]
    batches = []
    for hopper in (False, True):
        same = [unit for unit in wanted if unit.hopper is hopper]
        batches += [(same[i::WORKERS], target(*capability, hopper)) for i in range(WORKERS) if same[i::WORKERS]]
    with ThreadPoolExecutor(WORKERS) as pool:  # NVRTC compiles outside the interpreter's lock
        spilling = [name for names in pool.map(lambda batch: _spilling(*batch), batches) for name in names]
    assert not spilling
