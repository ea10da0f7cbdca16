"""The solvers' kernels as functions of tensors: fits of groups, columns of one group, steps of scales.

No torch ops: only quantizers call them, on a GPU. What they compute is what quantizers/bcq does by loops on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.cuda.architectures import WARP_THREADS
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.launch import Launch
from quantkit.ops.solve.instances import (
    COLUMNS_ROWS,
    MOST_COLUMNS,
    SOLVE_THREADS,
    descend_unit,
    fit_unit,
    refit_unit,
    residual_unit,
    round_unit,
    signs_unit,
)

_WARPS = SOLVE_THREADS // WARP_THREADS


@dataclass(frozen=True)
class FitOptions:
    """rounds: of alternation, at most. clips: ranges tried for the uniform start, 1, 1 - 1 / clip_steps, ... of all.
    proximal: pull towards the last scales, as a share of the importance. stop_gain: least gain of a round."""

    rounds: int
    clips: int
    clip_steps: int
    proximal: float
    stop_gain: float


@dataclass(frozen=True, eq=False)
class ColumnCodes:
    """Codes [N, C] uint8 of columns of one group, and its scales [bits, N] and offset [N] fp32.

    Views of any strides, but codes of a row stand side by side."""

    codes: Tensor
    scales: Tensor
    offset: Tensor

    @property
    def bits(self) -> int:
        """Planes per weight."""
        return self.scales.shape[0]

    def args(self) -> dict[str, Tensor | int]:
        """As the kernels call them."""
        return {
            "codes": self.codes,
            "scales": self.scales,
            "offset": self.offset,
            "N": self.codes.shape[0],
            "codeStride": self.codes.stride(0),
            "planeStride": self.scales.stride(0),
            "rowStride": self.scales.stride(1),
        }


def fit_groups(
    values: Tensor, importance: Tensor, bits: int, *, offset: bool, options: FitOptions
) -> tuple[Tensor, Tensor]:
    """(scales [bits, G], offset [G]) of least weighted squared error; values, importance: [G, g] fp32."""
    values, importance, (groups, width) = values.contiguous(), importance.contiguous(), values.shape
    scales, constant = values.new_empty(bits, groups), values.new_empty(groups)
    Launch(
        fit_unit(bits, offset),
        values.device,
        grid=(-(-groups // _WARPS),),
        block=SOLVE_THREADS,
        args={
            "values": values,
            "importance": importance,
            "scales": scales,
            "offset": constant,
            "groups": groups,
            "g": width,
            "rounds": options.rounds,
            "clips": options.clips,
            "clipSteps": options.clip_steps,
            "proximal": options.proximal,
            "goingOn": 1 - options.stop_gain,
        },
    ).run()
    return scales, constant


def round_columns(values: Tensor, factor: Tensor, group: ColumnCodes) -> tuple[Tensor, Tensor]:
    """GPTQ over columns [C, N] of one group: (levels, errors), [C, N] each; codes are written.

    factor: [C, C], of the inverse Hessian, upper.
    """
    stored, errors = torch.empty_like(values), torch.empty_like(values)
    tensors = {"values": values, "factor": factor, "stored": stored, "errors": errors}
    _columns(round_unit(group.bits), group, {**tensors, "factorStride": factor.stride(0)})
    return stored, errors


def descend_columns(pressure: Tensor, hessian: Tensor, group: ColumnCodes) -> Tensor:
    """Cyclic descent over columns of one group: what each value moved by, [C, N]; codes are rewritten.

    pressure: [N, C], of (W - W') H. hessian: [C, C].
    """
    moved = torch.empty(pressure.shape[1], pressure.shape[0], device=pressure.device)
    strides = {"pressureStride": pressure.stride(0), "hessianStride": hessian.stride(0)}
    _columns(descend_unit(group.bits), group, {"pressure": pressure, "hessian": hessian, "moved": moved, **strides})
    return moved


def _columns(unit: CompileUnit, group: ColumnCodes, args: Mapping[str, Tensor | int]) -> None:
    rows, columns = group.codes.shape
    matrix = args["factor"] if "factor" in args else args["hessian"]
    assert columns <= MOST_COLUMNS
    assert isinstance(matrix, Tensor)
    assert matrix.stride(1) == 1
    Launch(
        unit,
        group.codes.device,
        grid=(-(-rows // COLUMNS_ROWS),),
        block=COLUMNS_ROWS,
        args={**group.args(), **args, "C": columns, "offsetStride": group.offset.stride(0)},
    ).run()


def signs(codes: Tensor, bits: int, *, offset: bool) -> Tensor:
    """[N, U, g] fp32: +-1 by each bit of codes [N, g], and ones for an offset."""
    rows, width = codes.shape
    basis = torch.empty(rows, bits + offset, width, device=codes.device)
    Launch(
        signs_unit(bits, offset),
        codes.device,
        grid=(rows, -(-width // SOLVE_THREADS)),
        block=SOLVE_THREADS,
        args={"codes": codes, "basis": basis, "g": width, "codeStride": codes.stride(0)},
    ).run()
    return basis


def residual(weight: Tensor, codes: Tensor, scales: Tensor, offset: Tensor, width: int) -> Tensor:
    """weight [N, K] less the levels of codes [N, K]; scales [bits, N, G], offset [N, G] of groups of ``width``."""
    weight, (rows, columns) = weight.contiguous(), weight.shape
    left = torch.empty_like(weight)
    Launch(
        residual_unit(len(scales)),
        weight.device,
        grid=(rows, -(-columns // SOLVE_THREADS)),
        block=SOLVE_THREADS,
        args={
            "weight": weight,
            "codes": codes,
            "scales": scales,
            "offset": offset,
            "residual": left,
            "N": rows,
            "K": columns,
            "width": width,
            "groups": offset.shape[1],
        },
    ).run()
    return left


def refit_scales(
    products: Tensor, pressure: Tensor, group: ColumnCodes, factors: Tensor | None, *, proximal: float
) -> Tensor:
    """One step of a group's scales (and offset), which are rewritten: what the level of each code moved by, [N, g].

    products: [N, U, g], ``signs`` times the group's Hessian. pressure: [N, g], of (W - W') H. factors: [N, 1], what
    8-bit scales count in, whose signs go to the codes; None for fp16 scales.
    """
    rows, unknowns, width = products.shape
    change = torch.empty(rows, width, device=products.device)
    assert group.offset.stride(0) == group.scales.stride(1)
    Launch(
        refit_unit(group.bits, unknowns > group.bits),
        products.device,
        grid=(-(-rows // _WARPS),),
        block=SOLVE_THREADS,
        args={
            **group.args(),
            "products": products,
            "pressure": pressure,
            "factors": factors,
            "change": change,
            "g": width,
            "pressureStride": pressure.stride(0),
            "proximal": proximal,
        },
    ).run()
    return change
