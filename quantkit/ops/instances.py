"""Every kernel instance there is, by GPU generation: what CI compiles. A new family is one row."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quantkit.cuda.architectures import Architecture
from quantkit.cuda.compile import CompileUnit
from quantkit.ops.attention.instances import attention_units
from quantkit.ops.bcq.arranged import arranged_units
from quantkit.ops.bcq.experts import experts_units
from quantkit.ops.bcq.gemm import gemm_units
from quantkit.ops.bcq.instances import bcq_units
from quantkit.ops.bcq.level_gemv import level_units
from quantkit.ops.bipolar.fused import fused_units
from quantkit.ops.bipolar.instances import bipolar_units
from quantkit.ops.decode.instances import decode_units
from quantkit.ops.flatten.instances import flatten_units
from quantkit.ops.rotation.instances import rotation_units
from quantkit.ops.solve.instances import solve_units
from quantkit.ops.trellis.instances import trellis_units


def _bcq_units(row: Architecture) -> Iterator[CompileUnit]:
    yield from bcq_units(row)
    yield from gemm_units(row)
    yield from arranged_units(row)
    yield from level_units(row)
    yield from experts_units(row)


def _bipolar_units(row: Architecture) -> Iterator[CompileUnit]:
    yield from bipolar_units(row)
    yield from fused_units(row)


INSTANCES: dict[str, Callable[[Architecture], Iterator[CompileUnit]]] = {
    "bcq": _bcq_units,
    "bipolar": _bipolar_units,
    "decode": decode_units,
    "flatten": flatten_units,
    "attention": attention_units,
    "rotation": rotation_units,
    "solve": solve_units,
    "trellis": trellis_units,
}


def all_units(row: Architecture) -> list[CompileUnit]:
    """Every instance that can be asked for on a GPU generation."""
    return [unit for enumerate_units in INSTANCES.values() for unit in enumerate_units(row)]
