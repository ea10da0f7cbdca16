"""The solvers' kernels against plain PyTorch (reference.py), on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit.ops.solve import op
from quantkit.ops.solve.instances import MOST_COLUMNS
from quantkit.ops.solve.op import ColumnCodes, FitOptions
from quantkit.quantizers.bcq.groups import weighted_error
from quantkit.quantizers.bcq.levels import Coding
from quantkit.quantizers.bcq.quantizer import BcqSettings, solve_groups
from tests.ops.solve import reference

BITS = [pytest.param(bits, marks=pytest.mark.sanitize) if bits in (1, 4) else bits for bits in range(1, 9)]
FACTOR_STEPS = 200  # codes that the largest scale of these tests has, of 255
# Sums of 64 products round in another order on a GPU, so a value next to a middle may take the other level; what
# follows it in its row then differs too.
AGREEING = 0.98
GROUP_RTOL = 2e-3  # a group may end one round earlier, which gains less than a thousandth
FITTED_ALIKE, SUM_RTOL = 0.85, 0.05  # others, of few values and many levels, end in another minimum
FP32_RTOL, FP32_ATOL = 1e-4, 1e-4  # sums over a group
OPTIONS = FitOptions(rounds=15, clips=31, clip_steps=40, proximal=1e-6, stop_gain=1e-3)
PROXIMAL = 1e-4


def _group(bits: int, rows: int, columns: int, device: str = "cuda") -> ColumnCodes:
    """The middle one of three groups, so that nothing but codes of a row stands side by side; some scales negative."""
    scales = torch.rand(bits, rows, 3) * torch.tensor([2.0**i for i in range(bits)])[:, None, None] * 0.1 + 0.01
    scales[0, ::5] *= -1
    codes = torch.randint(0, 2**bits, (rows, 3 * columns), dtype=torch.uint8)
    offset = torch.randn(rows, 3).half().float() * 0.1
    codes, scales, offset = codes.to(device), scales.half().float().to(device), offset.to(device)
    return ColumnCodes(codes[:, columns : 2 * columns], scales[:, :, 1], offset[:, 1])


def _copied(group: ColumnCodes) -> ColumnCodes:
    """A copy with the same strides."""

    def copied(view: Tensor) -> Tensor:
        return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device).copy_(view)

    return replace(group, codes=copied(group.codes), scales=copied(group.scales), offset=copied(group.offset))


def _hessian(columns: int) -> Tensor:
    """Of a wider input, so that its rows stand apart."""
    x = torch.randn(4 * columns, 2 * columns) @ (torch.eye(2 * columns) + 0.3 / columns**0.5)
    return (x.t() @ x / len(x)).cuda()


def _twice(function: Callable[[ColumnCodes], object], group: ColumnCodes) -> tuple[ColumnCodes, list[Tensor]]:
    """The group after the kernel and what it returned, the same to the bit both times."""
    groups, found = [_copied(group) for _ in range(2)], []
    for one in groups:
        result = function(one)
        found.append([result] if isinstance(result, Tensor) else list(result))  # type: ignore[call-overload]
    for first, second in zip(found[0] + _tensors(groups[0]), found[1] + _tensors(groups[1]), strict=True):
        assert torch.equal(first, second)
    return groups[0], found[0]


def _tensors(group: ColumnCodes) -> list[Tensor]:
    return [group.codes, group.scales, group.offset]


def _agreeing(found: Tensor, expected: Tensor) -> float:
    return torch.isclose(found.float(), expected.float(), rtol=1e-3, atol=1e-3).float().mean().item()


@pytest.mark.cuda
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "columns"), [(100, MOST_COLUMNS), (7, 24)], ids=["whole", "odd"])
def test_columns_are_rounded_as_by_the_reference(bits: int, rows: int, columns: int) -> None:
    group, values = _group(bits, rows, columns), torch.randn(columns, rows, device="cuda")
    factor = torch.linalg.cholesky(_hessian(columns), upper=True).contiguous()[:columns, :columns]
    expected, same = _copied(group), _copied(group)
    stored, errors = reference.round_columns(values, factor, expected)
    same, found = _twice(lambda one: op.round_columns(values, factor, one), group)
    assert _agreeing(found[0], stored) > AGREEING
    assert _agreeing(found[1], errors) > AGREEING
    levels = Coding(same.scales, same.offset).levels().gather(1, same.codes.long())
    torch.testing.assert_close(levels, found[0].t(), rtol=FP32_RTOL, atol=FP32_ATOL)


@pytest.mark.cuda
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "columns"), [(100, MOST_COLUMNS), (7, 24)], ids=["whole", "odd"])
def test_columns_descend_as_in_the_reference(bits: int, rows: int, columns: int) -> None:
    group, hessian = _group(bits, rows, columns), _hessian(columns)[:columns, :columns]
    pressure = torch.randn(rows, 2 * columns, device="cuda")[:, columns:]
    before = Coding(group.scales, group.offset).levels().gather(1, group.codes.long())
    expected = _copied(group)
    moved = reference.descend_columns(pressure, hessian, expected)
    same, (found,) = _twice(lambda one: op.descend_columns(pressure, hessian, one), group)
    assert _agreeing(found, moved) > AGREEING
    after = Coding(same.scales, same.offset).levels().gather(1, same.codes.long())
    torch.testing.assert_close(after - before, found.t(), rtol=FP32_RTOL, atol=FP32_ATOL)


@pytest.mark.cuda
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("offset", [True, False], ids=["offset", "no-offset"])
@pytest.mark.parametrize("coded", [False, True], ids=["fp16", "8-bit"])
@pytest.mark.parametrize("columns", [128, 40])
def test_scales_are_refitted_as_by_the_reference(bits: int, offset: bool, coded: bool, columns: int) -> None:
    group, hessian = _group(bits, 45, columns), _hessian(columns)[:columns, :columns]
    if coded:
        group.scales.abs_()
    basis = op.signs(group.codes, bits, offset=offset)
    assert torch.equal(basis, reference.signs(group.codes, bits, offset=offset))
    products = (basis.flatten(0, 1) @ hessian).view_as(basis)
    pressure = torch.randn(45, 2 * columns, device="cuda")[:, columns:]
    factors = group.scales.amax(dim=0)[:, None] / FACTOR_STEPS if coded else None
    expected = _copied(group)
    change = reference.refit_scales(products, pressure, expected, factors, proximal=PROXIMAL)
    same, (found,) = _twice(lambda one: op.refit_scales(products, pressure, one, factors, proximal=PROXIMAL), group)
    assert _agreeing(found, change) > AGREEING
    assert _agreeing(same.scales, expected.scales) > AGREEING
    assert _agreeing(same.codes, expected.codes) > AGREEING
    before, after = (Coding(one.scales, one.offset).levels().gather(1, one.codes.long()) for one in (group, same))
    torch.testing.assert_close(after - before, found, rtol=FP32_RTOL, atol=FP32_ATOL)


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("width", [32, 40, 300])
def test_what_is_left_of_a_weight_is_that_of_the_reference(width: int) -> None:
    groups = -(-300 // width)
    weight, codes = torch.randn(9, 300).cuda(), torch.randint(0, 8, (9, 300), dtype=torch.uint8).cuda()
    scales, offset = torch.rand(3, 9, groups).cuda(), torch.randn(9, groups).cuda()
    found = op.residual(weight, codes, scales, offset, width)
    expected = reference.residual(weight, codes, scales, offset, width)
    torch.testing.assert_close(found, expected, rtol=FP32_RTOL, atol=FP32_ATOL)


@pytest.mark.cuda
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("offset", [True, False], ids=["offset", "no-offset"])
@pytest.mark.parametrize("width", [128, 40])
def test_groups_are_fitted_as_well_as_on_a_cpu(bits: int, offset: bool, width: int) -> None:
    values, importance = torch.randn(131, width), torch.rand(131, width) + 0.01
    values[0] = 0.0
    values[1] = 0.25
    expected = solve_groups(values, importance, BcqSettings(weight_bits=bits, offset=offset))
    found, again = (
        op.fit_groups(values.cuda(), importance.cuda(), bits, offset=offset, options=OPTIONS) for _ in range(2)
    )
    assert all(map(torch.equal, found, again))
    own = Coding(*(tensor.cpu() for tensor in found))
    errors = [weighted_error(code.nearest(values).levels(), values, importance) for code in (own, expected)]
    assert torch.isclose(errors[0][2:], errors[1][2:], rtol=GROUP_RTOL, atol=0).float().mean() > FITTED_ALIKE
    torch.testing.assert_close(errors[0].sum(), errors[1].sum(), rtol=SUM_RTOL, atol=0)
    assert (errors[0][:2] <= errors[1][:2] + FP32_ATOL).all()
    assert (own.scales[:-1] >= own.scales[1:]).all() or bits == 1
