"""Every kernel instance there is, by compute capability: what CI compiles. A new kernel is one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quantkit.cuda.compile import CompileUnit
from quantkit.ops.attention.instances import attention_units
from quantkit.ops.bcq.instances import bcq_units
from quantkit.ops.bipolar.instances import bipolar_units
from quantkit.ops.decode.instances import decode_units
from quantkit.ops.flatten.instances import flatten_units

COMPILED_CAPABILITIES: tuple[tuple[int, int], ...] = ((8, 0), (8, 6), (8, 9), (9, 0))

INSTANCES: dict[str, Callable[[int, int], Iterator[CompileUnit]]] = {
    "bcq": bcq_units,
    "bipolar": bipolar_units,
    "decode": decode_units,
    "flatten": flatten_units,
    "attention": attention_units,
}


def all_units(major: int, minor: int) -> list[CompileUnit]:
    """Every instance that can be asked for on a GPU of compute capability ``major.minor``."""
    return [unit for enumerate_units in INSTANCES.values() for unit in enumerate_units(major, minor)]
