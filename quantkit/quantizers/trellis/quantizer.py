"""Trellis codes of a weight: GPTQ column by column, each column's signs chosen by the Viterbi algorithm, then descent.

Sources: QTIP (Tseng et al. 2024): trellis codes within LDLQ, which is GPTQ's order of rounding. Deviation: a path goes
down the rows of one column instead of through a tile of 16 x 16 weights, so every column is compensated exactly; and
rounds of cyclic descent follow (QuantEase, Behdin et al. 2023), in which a column is chosen again given all others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import RecipeError, StatsError
from quantkit.formats.base import PackedWeight, Shape
from quantkit.formats.hadamard import block_width
from quantkit.formats.planes import code_signs, pack_codes
from quantkit.formats.trellis import BLOCK_ROWS, FORMAT, TrellisSpec, TrellisTensors, check_rows, filter_rows
from quantkit.ops.solve import trellis as kernels
from quantkit.ops.solve.instances import MOST_COLUMNS
from quantkit.ops.solve.trellis import RowCode
from quantkit.quantizers.base import ACTIVATIONS, LayerInput, check_hessian_kind, check_rotate, error_report
from quantkit.quantizers.bcq.compensation import ordered_hessian
from quantkit.quantizers.gptq import GptqOptions, gptq
from quantkit.quantizers.rotated_inputs import quantize_rotated
from quantkit.quantizers.trellis import viterbi
from quantkit.quantizers.trellis.filters import FILTERS, filter_for

_SMALLEST_SCALE = 2.0**-24  # of fp16


@dataclass(frozen=True)
class TrellisSettings:
    """weight_bits: q, 2-4 planes. taps: rows that a sign acts on, 0 for the most that there is a filter for, which take
    the most time to quantize. compensate, sweeps, damping, rotate, rotate_inputs, hessian: as for bcq."""

    weight_bits: int = 4
    taps: int = 0
    compensate: bool = True
    sweeps: int = 1
    damping: float = 0.5
    rotate: bool | str = False
    rotate_inputs: bool = False
    hessian: str = ACTIVATIONS

    def __post_init__(self) -> None:
        widths, known = (
            sorted({bits for bits, _ in FILTERS}),
            [taps for bits, taps in FILTERS if bits == self.weight_bits],
        )
        if not known:
            raise RecipeError(f"weight_bits is {self.weight_bits}; method trellis has {', '.join(map(str, widths))}")
        if self.taps not in (0, *known):
            choice = " or ".join(map(str, known))
            raise RecipeError(f"taps is {self.taps}; with weight_bits {self.weight_bits} choose {choice}")
        if self.sweeps < 0:
            raise RecipeError(f"sweeps is {self.sweeps}; choose 0 or more")
        check_rotate(self.rotate)
        check_hessian_kind(self.hessian, used=self.compensate)
        GptqOptions(damping=self.damping)

    @property
    def shape(self) -> tuple[int, int]:
        """(weight_bits, taps) of the filter."""
        most = max((taps for bits, taps in FILTERS if bits == self.weight_bits), default=0)
        return self.weight_bits, self.taps or most


def stored_specs(settings: TrellisSettings, shape: Shape) -> tuple[TrellisSpec]:
    """What these settings store a weight as. Raises RecipeError for rows or inputs that the format cannot take."""
    check_rows(shape[0])
    if settings.rotate_inputs:
        block_width(shape[1])
    return (TrellisSpec(*settings.shape, settings.rotate_inputs),)


def needs_hessian(settings: TrellisSettings) -> bool:
    """Whether quantize wants LayerInput.hessian."""
    return settings.compensate


@dataclass(frozen=True, eq=False)
class Path:
    """codes [K, N] uint8, of the columns of a weight; scales [N] fp32, holding fp16; filter [q, taps]."""

    codes: Tensor
    scales: Tensor
    filter: Tensor

    @property
    def rows(self) -> RowCode:
        """What the codes count in."""
        return RowCode.of(self.scales, self.filter)

    def units(self) -> Tensor:
        """What the codes stand for before scaling, [K, N] fp32."""
        planes = torch.stack(code_signs(self.codes.t(), len(self.filter)))
        return filter_rows(planes, self.filter).t()

    def weight(self) -> Tensor:
        """[K, N] fp32."""
        return self.units() * self.scales

    def better_rings(self, loss: Tensor, other: Path, other_loss: Tensor) -> tuple[Path, Tensor]:
        """Ring of rows by ring that of the two whose loss [N] is lower, and those losses."""
        better = _by_ring(other_loss) < _by_ring(loss)
        codes = torch.where(better, other.codes, self.codes)
        chosen = Path(codes, torch.where(better, other.scales, self.scales), self.filter)
        return chosen, torch.where(better, other_loss, loss)


def _by_ring(loss: Tensor) -> Tensor:
    """The sum over each row's ring, at every row [N]."""
    sums = torch.stack([part.sum() for part in loss.split(BLOCK_ROWS)])
    return sums.repeat_interleave(BLOCK_ROWS)[: len(loss)]


def quantize(layer: LayerInput, settings: TrellisSettings) -> PackedWeight:
    """Trellis codes of a weight.

    Raises StatsError naming the layer where its Hessian cannot be inverted, RecipeError unless N is a multiple of 16.
    """
    check_rows(layer.weight.shape[0])
    if settings.rotate_inputs:
        return quantize_rotated(layer, settings, quantize)
    filter = filter_for(*settings.shape).to(layer.weight.device)
    if settings.compensate:
        path = _compensated(layer, filter, settings)
    else:
        scales = _fitting_scales(layer.weight)
        codes = _solver(layer.weight).code_columns(layer.weight.t().contiguous(), RowCode.of(scales, filter))
        path = Path(codes, scales, filter)
    signs = pack_codes(path.codes.t(), settings.weight_bits)
    tensors = TrellisTensors(signs, path.scales[:, None].half(), filter).named()
    spec, shape = TrellisSpec(*settings.shape), (layer.weight.shape[0], layer.weight.shape[1])
    return PackedWeight(spec, shape, tensors, error_report(layer, FORMAT.dequantize(spec, tensors, shape)))


def _solver(weight: Tensor) -> Any:
    """The module that chooses columns where a weight is."""
    return kernels if weight.is_cuda else viterbi


def _fitting_scales(weight: Tensor) -> Tensor:
    """[N]: filters are for weights of variance 1."""
    return _fp16(weight.square().mean(dim=1).sqrt())


def _fp16(scales: Tensor) -> Tensor:
    return scales.half().float().clamp_min(_SMALLEST_SCALE)


def _compensated(layer: LayerInput, filter: Tensor, settings: TrellisSettings) -> Path:
    if layer.hessian is None:
        raise StatsError(f"{layer.name}: compensation needs a Hessian; pass a calibration artifact")
    found = ordered_hessian(layer, layer.weight.shape[1], settings.damping)
    columns = found.order.columns
    weight, hessian = layer.weight[:, columns], found.damped[columns][:, columns]
    codes = torch.empty(weight.t().shape, dtype=torch.uint8, device=weight.device)
    start = Path(codes, _fitting_scales(weight), filter)

    def round_block(first: int, values: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        codes[first : first + len(values)], stored, errors = _solver(weight).round_columns(values, factor, start.rows)
        return stored, errors

    options = GptqOptions(block_columns=MOST_COLUMNS)
    gptq(weight, found.factor, None, options=options, round_block=round_block)
    best = _refined(weight.t().contiguous(), hessian, start, settings.sweeps)
    return replace(best, codes=best.codes[columns.argsort()])


def _refined(weight: Tensor, hessian: Tensor, start: Path, sweeps: int) -> Path:
    """Lower the loss of weight [K, N]: scales for fixed codes, then codes for fixed scales, ``sweeps`` times."""
    current, best, least = start, start, _row_loss(weight, hessian, start)
    for sweep in range(sweeps + 1):
        current = _refit_scales(weight, hessian, current)
        if sweep < sweeps:
            current = _descend(weight, hessian, current)
        best, least = best.better_rings(least, current, _row_loss(weight, hessian, current))
    return best


def _row_loss(weight: Tensor, hessian: Tensor, path: Path) -> Tensor:
    """Of tr((W - W') H (W - W')^T), by row [N]."""
    residual = weight - path.weight()
    return ((hessian @ residual) * residual).sum(dim=0)


def _refit_scales(weight: Tensor, hessian: Tensor, path: Path) -> Path:
    """Every row's scale of least loss."""
    units = path.units()
    products = hessian @ units
    scales = (products * weight).sum(dim=0) / (products * units).sum(dim=0).clamp_min(torch.finfo(torch.float32).tiny)
    return replace(path, scales=_fp16(scales))


def _descend(weight: Tensor, hessian: Tensor, start: Path) -> Path:
    """One sweep over the columns: each is coded again, nearest to its optimum given all others."""
    codes, old, rows = start.codes.clone(), start.weight(), start.rows
    pressure = hessian @ (weight - old)
    for first in range(0, len(weight), MOST_COLUMNS):
        own = slice(first, first + MOST_COLUMNS)
        codes[own], moved = _solver(weight).descend_columns(pressure[own], old[own], hessian[own, own], rows)
        pressure -= hessian[:, own] @ moved
    return replace(start, codes=codes)
