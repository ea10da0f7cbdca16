"""CUDA sources as one text: local includes inlined, so that a compiled unit depends on nothing outside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quantkit.assets import asset_folder
from quantkit.errors import KernelError

_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')


@dataclass(frozen=True, eq=False)
class KernelSource:
    """A .cu file of kernels/ with the numbers that it shares with Python.

    constants: by their names in Python; the source reads BLOCK_ROWS as the macro QK_BLOCK_ROWS.
    """

    file: str
    constants: Mapping[str, int]

    @property
    def text(self) -> str:
        """The file with its includes. Raises KernelError for a missing file."""
        return kernel_source(self.file)

    @property
    def options(self) -> tuple[str, ...]:
        """The compiler options that hand the constants over."""
        return tuple(f"-DQK_{name}={int(value)}" for name, value in self.constants.items())


@cache
def kernel_source(file: str) -> str:
    """The text of kernels/``file`` with every local include inlined once, ``#line`` keeping diagnostics true.

    Raises KernelError for a missing file.
    """
    root = asset_folder("kernels")
    return inline_includes(root / file, root)


def inline_includes(path: Path, root: Path) -> str:
    """Inline ``#include "x"`` recursively, each file once (as under ``#pragma once``), relative to the including file.

    Raises KernelError for a missing file.
    """
    return "\n".join(_inlined_lines(path.resolve(), root.resolve(), set())) + "\n"


def _inlined_lines(path: Path, root: Path, seen: set[Path]) -> list[str]:
    seen.add(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KernelError(f"CUDA source {path}: cannot be read ({error.strerror}); reinstall quantkit") from error
    name = path.relative_to(root)
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(text.splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append("" if line.strip() == "#pragma once" else line)
            continue
        target = (path.parent / include[1]).resolve()
        if target not in seen:
            lines += _inlined_lines(target, root, seen)
        lines.append(f'#line {number + 1} "{name}"')
    return lines
