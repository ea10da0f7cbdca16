"""What each GPU generation runs natively, emulates or lacks. Pure data; read from SASS and measured rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

ComputeCapability = tuple[int, int]


class Support(StrEnum):
    """How an instruction runs: on its own unit, rewritten by the compiler into others, or not at all."""

    NATIVE = "native"
    EMULATED = "emulated"
    MISSING = "missing"


@dataclass(frozen=True)
class Capability:
    """One row for one GPU.

    unit: the instruction. support: how it runs. used_by: kernels that want it. note: what follows.
    """

    unit: str
    support: Support
    used_by: str
    note: str


@dataclass(frozen=True)
class _Row:
    unit: str
    native: Callable[[ComputeCapability], bool]
    emulated: Callable[[ComputeCapability], bool]
    used_by: str
    notes: dict[Support, str]


def _ampere_or_ada(cc: ComputeCapability) -> bool:
    return cc[0] == 8


def _hopper(cc: ComputeCapability) -> bool:
    return cc == (9, 0)


def _hopper_or_later(cc: ComputeCapability) -> bool:
    return cc[0] >= 9


def _after_hopper(cc: ComputeCapability) -> bool:
    return cc[0] >= 10


def _never(_cc: ComputeCapability) -> bool:
    return False


BINARY_MMA, BINARY_WGMMA, INT4_MMA, INT8_MMA, INT8_WGMMA, FLOAT_MMA = (
    "mma b1 AND.POPC",
    "wgmma b1 AND.POPC",
    "mma s4",
    "mma s8",
    "wgmma s8",
    "mma f16/bf16",
)
_BELOW_AMPERE = "needs compute capability 8.0"

_ROWS: tuple[_Row, ...] = (
    _Row(
        BINARY_MMA,
        native=lambda cc: _ampere_or_ada(cc) or _hopper(cc),
        emulated=_after_hopper,
        used_by="bcq_binary_gemv, bipolar_gemm",
        notes={
            Support.NATIVE: "weight bits go from memory to the tensor core untouched",
            Support.EMULATED: "rewritten into eight INT8 products; the lookup-table GEMV and INT8 are preferred",
            Support.MISSING: _BELOW_AMPERE,
        },
    ),
    _Row(
        "mma b1 XOR.POPC",
        native=_ampere_or_ada,
        emulated=_hopper_or_later,
        used_by="nothing",
        notes={
            Support.NATIVE: "not used: AND.POPC is native on more GPUs",
            Support.EMULATED: "one seventh of the AND rate; never used",
            Support.MISSING: _BELOW_AMPERE,
        },
    ),
    _Row(
        BINARY_WGMMA,
        native=_hopper,
        emulated=_never,
        used_by="bipolar_gemm",
        notes={
            Support.NATIVE: "eight times the INT8 rate; weight_bits x act_bits <= 8 beats INT8",
            Support.MISSING: "bipolar_gemm uses mma b1 or INT8 instead",
        },
    ),
    _Row(
        INT4_MMA,
        native=_ampere_or_ada,
        emulated=_hopper_or_later,
        used_by="int8_gemm (INT4 layers)",
        notes={
            Support.NATIVE: "INT4 layers compute in INT4",
            Support.EMULATED: "INT4 layers are stored in 4 bits and computed in INT8",
            Support.MISSING: _BELOW_AMPERE,
        },
    ),
    _Row(
        INT8_MMA,
        native=lambda cc: cc >= (7, 5),
        emulated=_never,
        used_by="int8_gemm, bipolar_gemm, int8_attention, bcq_int8_gemv",
        notes={Support.NATIVE: "", Support.MISSING: "needs compute capability 7.5"},
    ),
    _Row(
        INT8_WGMMA,
        native=_hopper,
        emulated=_never,
        used_by="int8_gemm, int8_attention",
        notes={
            Support.NATIVE: "attention: heads of up to 64 or 97 to 128 values without a mask; others on mma s8",
            Support.MISSING: "int8_gemm and int8_attention use mma s8 instead",
        },
    ),
    _Row(
        FLOAT_MMA,
        native=lambda cc: cc >= (8, 0),
        emulated=_never,
        used_by="dequantize, then cuBLAS",
        notes={Support.NATIVE: "the path for many rows", Support.MISSING: "bf16 needs compute capability 8.0"},
    ),
)


def capabilities(major: int, minor: int) -> tuple[Capability, ...]:
    """The table for a GPU of compute capability ``major.minor``."""
    return tuple(_resolve(row, (major, minor)) for row in _ROWS)


@dataclass(frozen=True)
class Generation:
    """GPUs that share a column of the table."""

    name: str
    compute_capability: ComputeCapability


GENERATIONS = (
    Generation("Ampere, Ada 8.x", (8, 0)),
    Generation("Hopper 9.0", (9, 0)),
    Generation("Blackwell 10.x, 12.x", (10, 0)),
)


def support(unit: str, major: int, minor: int) -> Support:
    """How one instruction of the table runs; kernels dispatch on this."""
    return next(row.support for row in capabilities(major, minor) if row.unit == unit)


def _resolve(row: _Row, cc: ComputeCapability) -> Capability:
    level = Support.NATIVE if row.native(cc) else Support.EMULATED if row.emulated(cc) else Support.MISSING
    return Capability(row.unit, level, row.used_by, row.notes[level])
