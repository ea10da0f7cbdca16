"""Uniform grids as other tools store them, and the bit planes that stand for the same levels.

A grid of b bits has the levels step * (code - zero), or step * code + minimum, per group. As planes (formats/bcq.py)
it has the scales step * 2**(i - 1) and the offset step * ((2**b - 1) / 2 - zero), or the minimum in place of
-step * zero. That is exact in real numbers. Planes and offset are stored in fp16, so each may round there; ``fitted``
says whether it does, and by how much.

Where the offset rounds, more planes can carry it instead:
- an integer zero: code - zero + 2**b is a code of b + 1 bits on a grid whose offset is -step / 2;
- any minimum: two planes of equal signs, +step * 2**(b - 1) and -step / 2, leave the minimum itself as offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats.base import PackedWeight
from quantkit.formats.bcq import BcqSpec, BcqTensors, group_width
from quantkit.formats.planes import MAX_BITS, pack_codes


@dataclass(frozen=True)
class Grid:
    """The levels of a weight [N, K] in G groups per row.

    group_size: columns per group, -1 for the row. step: [N, G] fp64, exact. zero: [N, G] int32, 0 .. 2**bits, and
    minimum None; or minimum: [N, G] fp64, and zero None.
    """

    bits: int
    group_size: int
    step: Tensor
    zero: Tensor | None = None
    minimum: Tensor | None = None

    @property
    def lowest(self) -> Tensor:
        """[N, G] fp64, the level of code 0."""
        if self.minimum is not None:
            return self.minimum
        assert self.zero is not None
        return -self.step * self.zero

    def per_column(self, values: Tensor, columns: int) -> Tensor:
        """[N, G] -> [N, columns]: the value of each column's group."""
        return values.repeat_interleave(group_width(self.group_size, columns), dim=1)[:, :columns]

    def levels(self, codes: Tensor) -> Tensor:
        """[N, K] fp64 that the codes [N, K] stand for, exact."""
        columns = codes.shape[1]
        return self.per_column(self.step, columns) * codes.double() + self.per_column(self.lowest, columns)


@dataclass(frozen=True)
class Fitted:
    """A grid in the ``bcq`` format's tensors.

    scales: [planes, N, G] fp16. offset: [N, G] fp16. wider: one plane more, for code - zero + 2**bits. constant: two
    planes of equal signs more. error: the largest difference of a level from the grid's, over the largest
    magnitude in its group.
    """

    grid: Grid
    scales: Tensor
    offset: Tensor
    wider: bool
    constant: bool
    error: float

    @property
    def spec(self) -> BcqSpec:
        """How the weight is stored."""
        return BcqSpec(self.scales.shape[0], self.grid.group_size, offset=True)

    @property
    def extra_planes(self) -> int:
        """Planes beyond the bits of the source."""
        return self.scales.shape[0] - self.grid.bits

    def pack(self, codes: Tensor) -> PackedWeight:
        """The stored form of codes [N, K] uint8, each below 2**bits."""
        stored, bits = codes.to(torch.int32), self.grid.bits
        if self.wider:
            assert self.grid.zero is not None
            stored = stored - self.grid.per_column(self.grid.zero, codes.shape[1]) + 2**bits
        elif self.constant:
            stored = stored + 2**bits
        tensors = BcqTensors(pack_codes(stored, self.scales.shape[0]), self.scales, self.offset).named()
        return PackedWeight(self.spec, (codes.shape[0], codes.shape[1]), tensors, self.report())

    def report(self) -> dict[str, object]:
        """What ``inspect`` shows."""
        return {"exact": self.error == 0, "rounding": self.error, "extra_planes": self.extra_planes}


def fitted(grid: Grid, name: str, *, exact: bool) -> Fitted:
    """The planes of a grid.

    exact: take more planes where that makes them exact, and refuse what rounds all the same; otherwise the source's own
    number of planes, rounded. name: the layer, for messages.
    Raises CheckpointError for scales beyond fp16, and for what ``exact`` refuses.
    """
    plain = _plain(grid)
    if not torch.isfinite(plain.scales).all() or not torch.isfinite(plain.offset).all():
        raise CheckpointError(f"{name}: its scales are beyond fp16, in which quantkit stores them")
    if not exact or plain.error == 0:
        return plain
    if grid.zero is not None and grid.bits + 1 <= MAX_BITS:
        widened = _widened(grid)
        if widened.error == 0:
            return widened
    if grid.bits + 2 <= MAX_BITS:
        constant = _with_constants(grid)
        if constant.error == 0:
            return constant
    raise CheckpointError(
        f"{name}: its levels are not exact in fp16 planes; without `exact` they are rounded, "
        f"by up to {plain.error:.2g} of the largest weight of a group"
    )


def uniform_grid(stored: BcqTensors, spec: BcqSpec) -> Grid | None:
    """The grid that planes stand for exactly, or None where their scales are free (BCQ) or are 8-bit codes.

    Its zero is set where every offset is a whole number of steps from 0, its minimum otherwise.
    """
    if stored.scale_factors is not None:
        return None
    scales = stored.scales.double()
    powers = 2.0 ** torch.arange(spec.weight_bits, dtype=torch.float64)
    if not torch.equal(scales, scales[0] * powers[:, None, None]):
        return None
    step, top = 2 * scales[0], 2**spec.weight_bits - 1
    offset = torch.zeros_like(step) if stored.offset is None else stored.offset.double()
    minimum = offset - step * (top / 2)
    zero = torch.where(step == 0, 0.0, -minimum / step)
    whole = (zero == zero.round()) & (zero >= 0) & (zero <= top) & (minimum == -step * zero)
    if bool(whole.all()):
        return Grid(spec.weight_bits, spec.group_size, step, zero=zero.int())
    return Grid(spec.weight_bits, spec.group_size, step, minimum=minimum)


def rounding_of(grid: Grid, lowest: Tensor) -> float:
    """What a level loses where the lowest one of its group is ``lowest`` [N, G] fp64 instead.

    As a share of the largest magnitude of the group.
    """
    highest = grid.lowest + grid.step * (2**grid.bits - 1)
    largest = torch.maximum(grid.lowest.abs(), highest.abs())
    difference = (lowest - grid.lowest).abs()
    return torch.where(difference == 0, 0.0, difference / largest).max().item()


def check_zero(zero: Tensor, bits: int, name: str) -> Tensor:
    """The zero points as int32. Raises CheckpointError outside 0 .. 2**bits."""
    zero = zero.int()
    if bool(((zero < 0) | (zero > 2**bits)).any()):
        raise CheckpointError(f"{name}: a zero point lies outside 0 to {2**bits}")
    return zero


def joined_groups(grid: Grid, columns: int, name: str) -> Grid:
    """The grid with groups that quantkit can store: a multiple of 8 columns, or the row.

    Raises CheckpointError for others.
    """
    width = group_width(grid.group_size, columns)
    if width == columns:
        return Grid(grid.bits, -1, grid.step, grid.zero, grid.minimum)
    if width % 8:
        raise CheckpointError(f"{name}: has groups of {width} columns; quantkit stores groups of a multiple of 8")
    return grid


def _plain(grid: Grid) -> Fitted:
    top = 2**grid.bits - 1
    return _stored(grid, _planes(grid, grid.bits), grid.lowest + grid.step * (top / 2))


def _widened(grid: Grid) -> Fitted:
    return _stored(grid, _planes(grid, grid.bits + 1), -grid.step / 2, wider=True)


def _planes(grid: Grid, count: int) -> list[Tensor]:
    return [grid.step * 2.0 ** (i - 1) for i in range(count)]


def _with_constants(grid: Grid) -> Fitted:
    constants = [grid.step * 2.0 ** (grid.bits - 1), grid.step / 2]
    return _stored(grid, [*_planes(grid, grid.bits), *constants], grid.lowest, constant=True)


def _stored(grid: Grid, planes: list[Tensor], offset: Tensor, *, wider: bool = False, constant: bool = False) -> Fitted:
    scales = torch.stack(planes)
    stored, shift = scales.half(), offset.half()
    difference = (scales - stored.double()).abs().sum(dim=0) + (offset - shift.double()).abs()
    highest = grid.lowest + grid.step * (2**grid.bits - 1)
    largest = torch.maximum(grid.lowest.abs(), highest.abs())
    error = torch.where(difference == 0, 0.0, difference / largest)
    return Fitted(grid, stored, shift, wider, constant, error.max().item() if error.numel() else 0.0)
