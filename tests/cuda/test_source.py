from pathlib import Path

import pytest

from quantkit.cuda.source import inline_includes, kernel_source
from quantkit.errors import KernelError


def test_local_includes_are_inlined_once_with_line_numbers(tmp_path: Path) -> None:
    (tmp_path / "leaf.cuh").write_text("#pragma once\nint leaf;\n")
    (tmp_path / "middle.cuh").write_text('#pragma once\n#include "leaf.cuh"\nint middle;\n')
    (tmp_path / "top.cu").write_text('#include "leaf.cuh"\n#include "middle.cuh"\nint top;\n')
    lines = inline_includes(tmp_path / "top.cu", tmp_path).splitlines()
    assert [line for line in lines if line.startswith("int")] == ["int leaf;", "int middle;", "int top;"]
    assert not any("include" in line or "pragma" in line for line in lines)
    assert lines[lines.index("int top;") - 1] == '#line 3 "top.cu"'


def test_missing_include_is_one_error_line(tmp_path: Path) -> None:
    (tmp_path / "top.cu").write_text('#include "absent.cuh"\n')
    with pytest.raises(KernelError, match=r"absent\.cuh: cannot be read"):
        inline_includes(tmp_path / "top.cu", tmp_path)


def test_shipped_sources_need_no_header_of_the_toolkit() -> None:
    assert "#include" not in kernel_source("bcq/dequantize.cu")
