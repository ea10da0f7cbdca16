"""Compile units: one instance of one kernel template, and how it becomes a cubin. Runs without a GPU."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.assets import cache_folder
from quantkit.cuda.source import kernel_source
from quantkit.errors import KernelError

_OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")
_ENTRY = re.compile(r"Compiling entry function '(\S+)'")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class CompileUnit:
    """One kernel instance.

    source: file name in kernels/.
    function: the __global__ template's (or function's) name.
    arguments: its template arguments; bool and int.
    hopper: uses instructions of the arch-specific target sm_90a (wgmma, setmaxnreg); exists there only.
    """

    source: str
    function: str
    arguments: tuple[int | bool, ...] = ()
    hopper: bool = False

    @property
    def expression(self) -> str:
        """The C++ name expression, for example ``bcqBinaryGemv<4, 128>``."""
        if not self.arguments:
            return self.function
        return f"{self.function}<{', '.join(str(a).lower() for a in self.arguments)}>"


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one instance; all per thread, bytes except ``registers``."""

    registers: int
    stack_frame: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Cubin:
    """Machine code of some units: the image, the mangled symbol per name expression, resources per symbol."""

    image: bytes
    symbols: dict[str, str]
    resources: dict[str, Resources]


def target(major: int, minor: int, hopper: bool) -> str:
    """The -arch value for a compute capability: ``sm_86``; ``sm_90a`` where a unit asks for it.

    Raises KernelError for a Hopper unit on anything else.
    """
    if hopper and (major, minor) != (9, 0):
        raise KernelError(f"this kernel uses instructions of compute capability 9.0; this GPU has {major}.{minor}")
    return f"sm_{major}{minor}{'a' if hopper else ''}"


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


def compile_units(units: Sequence[CompileUnit], arch: str) -> Cubin:
    """Compile instances of one source file to machine code for ``arch`` (sm_80, sm_90a, ...).

    Raises KernelError with the compiler's first error line.
    """
    nvrtc = _nvrtc()
    (source,) = {unit.source for unit in units}
    program = nvrtc.createProgram(kernel_source(source), source, (), ())
    try:
        for unit in units:
            nvrtc.addNameExpression(program, unit.expression)
        try:
            nvrtc.compileProgram(program, (f"-arch={arch}", *_OPTIONS))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            first = next((line for line in log.splitlines() if "error" in line), str(error))
            raise KernelError(f"kernel {source} does not compile for {arch}: {first.strip()}") from error
        symbols = {unit.expression: nvrtc.getLoweredName(program, unit.expression) for unit in units}
        # The binding drops the last byte of the image.
        return Cubin(nvrtc.getCUBIN(program) + b"\0", symbols, parse_resources(nvrtc.getProgramLog(program)))
    finally:
        nvrtc.destroyProgram(program)


def parse_resources(log: str) -> dict[str, Resources]:
    """ptxas -v output -> resources per mangled symbol; what its functions that are not inlined use is added."""
    resources = {}
    _, *sections = _ENTRY.split(log)
    for symbol, section in zip(sections[::2], sections[1::2], strict=True):
        frame, stores, loads = (sum(map(int, column)) for column in zip(*_MEMORY.findall(section), strict=True))
        registers = max(map(int, _REGISTERS.findall(section)))
        resources[symbol] = Resources(registers, frame, stores, loads)
    return resources


def cached_cubin(unit: CompileUnit, arch: str) -> tuple[Path, str]:
    """Path of the unit's cubin in the user's cache and its symbol; compiled on the first call.

    The key covers the whole inlined source, the instance, the target, the options and the NVRTC version. The cubin
    appears in one rename, after its symbol, so concurrent processes and crashes leave no half-written kernel.
    """
    key = repr((kernel_source(unit.source), unit.expression, arch, _OPTIONS, nvrtc_version()))
    stem = f"{unit.function}-{arch}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    folder = cache_folder() / "kernels"
    cubin, symbol = folder / f"{stem}.cubin", folder / f"{stem}.symbol"
    if not cubin.is_file():
        compiled = compile_units([unit], arch)
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
