"""Compile units: one instance of one kernel template, and how it becomes a cubin. Runs without a GPU."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.assets import cache_folder
from quantkit.cuda.architectures import Architecture
from quantkit.cuda.source import KernelSource
from quantkit.errors import KernelError

_OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")
_TARGET_NUMBER = re.compile(r"\d+")
_ENTRY = re.compile(r"Compiling entry function '(\S+)'")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_SERIALIZED = re.compile(r"wgmma\.mma_async instructions are serialized .* function '(\S+)'")


@dataclass(frozen=True)
class CompileUnit:
    """One kernel instance.

    source: its file, with the constants that Python hands over. function: the __global__ template's (or function's)
    name. arguments: its template arguments; bool and int. shared_mem: bytes of dynamic shared memory that every launch
    takes, where they follow from the instance.
    """

    source: KernelSource
    function: str
    arguments: tuple[int | bool, ...] = ()
    shared_mem: int = field(default=0, compare=False)

    @property
    def expression(self) -> str:
        """The C++ name expression, for example ``bcqBinaryGemv<4, 128>``."""
        if not self.arguments:
            return self.function
        return f"{self.function}<{', '.join(str(a).lower() for a in self.arguments)}>"


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one instance: registers per thread, static shared memory per block, bytes per thread.

    serialized: every product of a warpgroup waits for the one before, for want of registers or of proof that none of a
    running product's is touched.
    """

    registers: int
    shared: int
    stack_frame: int
    spill_stores: int
    spill_loads: int
    serialized: bool = False


@dataclass(frozen=True)
class Cubin:
    """Machine code of some units: the image, the mangled symbol per name expression, resources per symbol."""

    image: bytes
    symbols: dict[str, str]
    resources: dict[str, Resources]


def cupy_install_line(cuda_major: int | None = None) -> str:
    """The pip line that adds CuPy and NVRTC for a CUDA major version (13 by default)."""
    return f"pip install 'quantkit[cuda{12 if cuda_major == 12 else 13}]'"


@cache
def _nvrtc() -> Any:
    """CuPy's NVRTC binding, which loads without a GPU.

    Raises KernelError with the pip line where CuPy or the NVRTC library is missing.
    """
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except ImportError as error:
        raise KernelError(f"CUDA kernels need CuPy, which is not installed: {cupy_install_line()}") from error
    except (OSError, RuntimeError) as error:  # cuda.pathfinder's DynamicLibNotFoundError is a RuntimeError
        raise KernelError(f"CUDA kernels need the NVRTC library, which is not found: {cupy_install_line()}") from error
    return nvrtc


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of NVRTC. Raises KernelError where it is missing."""
    major, minor = _nvrtc().getVersion()
    return major, minor


def can_compile(row: Architecture) -> bool:
    """Whether this NVRTC knows the target of a GPU generation. Raises KernelError where NVRTC is missing."""
    number = _TARGET_NUMBER.search(row.target)
    assert number is not None
    return int(number[0]) in _nvrtc().getSupportedArchs()


def compile_units(units: Sequence[CompileUnit], row: Architecture) -> Cubin:
    """Compile instances of one source to machine code for a GPU generation.

    Raises KernelError with the compiler's first error line.
    """
    nvrtc = _nvrtc()
    (source,) = {unit.source for unit in units}
    program = nvrtc.createProgram(source.text, source.file, (), ())
    try:
        for unit in units:
            nvrtc.addNameExpression(program, unit.expression)
        try:
            nvrtc.compileProgram(program, compiler_options(source, row))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            first = next((line for line in log.splitlines() if "error" in line), str(error))
            raise KernelError(f"kernel {source.file} does not compile for {row.target}: {first.strip()}") from error
        symbols = {unit.expression: nvrtc.getLoweredName(program, unit.expression) for unit in units}
        # The binding drops the last byte of the image.
        return Cubin(nvrtc.getCUBIN(program) + b"\0", symbols, parse_resources(nvrtc.getProgramLog(program)))
    finally:
        nvrtc.destroyProgram(program)


def compiler_options(source: KernelSource, row: Architecture) -> tuple[str, ...]:
    """What the compiler is told besides the source: the target, its features and the source's constants."""
    features = (f"-DQK_OVERLAP={int(row.overlap)}", f"-DQK_CLUSTERS={int(row.clusters)}")
    return (f"-arch={row.target}", *features, *source.options, *_OPTIONS)


def parse_resources(log: str) -> dict[str, Resources]:
    """ptxas -v output -> resources per mangled symbol; what its functions that are not inlined use is added."""
    resources = {}
    serialized = set(_SERIALIZED.findall(log))
    _, *sections = _ENTRY.split(log)
    for symbol, section in zip(sections[::2], sections[1::2], strict=True):
        frame, stores, loads = (sum(map(int, column)) for column in zip(*_MEMORY.findall(section), strict=True))
        registers = max(map(int, _REGISTERS.findall(section)))
        shared = max(map(int, _SHARED.findall(section)), default=0)
        resources[symbol] = Resources(registers, shared, frame, stores, loads, symbol in serialized)
    return resources


def cached_cubin(unit: CompileUnit, row: Architecture) -> tuple[Path, str]:
    """Path of the unit's cubin in the user's cache and its symbol; compiled on the first call.

    The key covers the whole inlined source, the instance, all compiler options (target and constants among them) and
    the NVRTC version. The cubin appears in one rename, after its symbol, so concurrent processes and crashes leave no
    half-written kernel.
    """
    key = repr((unit.source.text, unit.expression, compiler_options(unit.source, row), nvrtc_version()))
    stem = f"{unit.function}-{row.target}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    folder = cache_folder() / "kernels"
    cubin, symbol = folder / f"{stem}.cubin", folder / f"{stem}.symbol"
    if not cubin.is_file():
        compiled = compile_units([unit], row)
        write_whole(symbol, compiled.symbols[unit.expression].encode())
        write_whole(cubin, compiled.image)
    return cubin, symbol.read_text(encoding="utf-8")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of the user's cache in one rename. Raises KernelError where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as partial:
            partial.write(content)
        Path(partial.name).replace(path)
    except OSError as error:
        raise KernelError(f"kernel cache {path.parent}: cannot be written ({error.strerror})") from error
