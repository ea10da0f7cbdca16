"""Uniform grids as planes: exact where fp16 allows it, refused or told where not, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import CheckpointError
from quantkit.exchange.grid import Grid, check_zero, fitted, joined_groups, uniform_grid
from quantkit.formats.bcq import BcqTensors
from quantkit.formats.table import dequantize

ROUNDING = 2**-11  # of the offset, which no level's magnitude is below: half a unit in the last place of fp16


def _grid(bits: int, seed: int, *, symmetric: bool, groups: int = 3) -> Grid:
    torch.manual_seed(seed)
    step = (torch.rand(4, groups) * 0.02 + 2e-3).half().double()
    zero = torch.full((4, groups), 2 ** (bits - 1)) if symmetric else torch.randint(0, 2**bits, (4, groups))
    return Grid(bits, 16, step, zero=zero.int())


def _codes(bits: int, columns: int = 48) -> torch.Tensor:
    return torch.randint(0, 2**bits, (4, columns), dtype=torch.uint8)


@given(bits=st.integers(1, 8), seed=st.integers(0, 1000))
def test_symmetric_grids_are_exact_in_their_own_planes(bits: int, seed: int) -> None:
    grid = _grid(bits, seed, symmetric=True)
    codes = _codes(bits)
    fit = fitted(grid, "layer", exact=True)
    assert (fit.error, fit.extra_planes) == (0, 0)
    assert torch.equal(dequantize(fit.pack(codes)).double(), grid.levels(codes))


@given(bits=st.integers(1, 7), seed=st.integers(0, 1000))
def test_integer_zeros_are_exact_with_one_plane_more(bits: int, seed: int) -> None:
    grid = _grid(bits, seed, symmetric=False)
    codes = _codes(bits)
    fit = fitted(grid, "layer", exact=True)
    assert fit.error == 0
    assert fit.extra_planes <= 1
    assert torch.equal(dequantize(fit.pack(codes)).double(), grid.levels(codes))


@given(bits=st.integers(2, 6), seed=st.integers(0, 1000))
def test_free_minima_are_exact_with_two_planes_more(bits: int, seed: int) -> None:
    grid = _grid(bits, seed, symmetric=False)
    grid = Grid(bits, 16, grid.step, minimum=-(torch.rand(4, 3) * 0.1).half().double())
    codes = _codes(bits)
    fit = fitted(grid, "layer", exact=True)
    assert fit.error == 0
    # step * code and the minimum are added once, in fp32, by either side
    source = grid.per_column(grid.step, 48).float() * codes + grid.per_column(grid.lowest, 48).float()
    assert torch.equal(dequantize(fit.pack(codes)), source)


@given(bits=st.integers(2, 8), seed=st.integers(0, 1000))
def test_rounded_grids_state_their_error(bits: int, seed: int) -> None:
    grid = _grid(bits, seed, symmetric=False)
    codes = _codes(bits)
    fit = fitted(grid, "layer", exact=False)
    assert fit.extra_planes == 0
    largest = torch.maximum(grid.lowest.abs(), (grid.lowest + grid.step * (2**bits - 1)).abs())
    error = (dequantize(fit.pack(codes)).double() - grid.levels(codes)).abs() / grid.per_column(largest, 48)
    assert error.max() <= fit.error + 1e-6  # fp32 sums of numbers that were rounded
    assert fit.error <= ROUNDING


def test_eight_bits_with_a_zero_that_rounds_are_refused_when_exactness_is_asked_for() -> None:
    step = torch.tensor([[(1 + 2**-10) * 2**-8]], dtype=torch.float64)
    grid = Grid(8, -1, step, zero=torch.tensor([[3]], dtype=torch.int32))
    with pytest.raises(CheckpointError, match="layer: its levels are not exact in fp16 planes"):
        fitted(grid, "layer", exact=True)
    assert fitted(grid, "layer", exact=False).error > 0


def test_a_halved_step_below_the_normal_numbers_of_fp16_is_told() -> None:
    step = torch.tensor([[3 * 2.0**-24]], dtype=torch.float64)
    grid = Grid(4, -1, step, zero=torch.tensor([[8]], dtype=torch.int32))
    assert fitted(grid, "layer", exact=False).error > 0


def test_scales_beyond_fp16_are_refused() -> None:
    grid = Grid(4, -1, torch.tensor([[60000.0]], dtype=torch.float64), zero=torch.tensor([[8]], dtype=torch.int32))
    with pytest.raises(CheckpointError, match="beyond fp16"):
        fitted(grid, "layer", exact=False)


@given(bits=st.integers(1, 8), seed=st.integers(0, 1000))
def test_planes_give_their_grid_back(bits: int, seed: int) -> None:
    grid = _grid(bits, seed, symmetric=True)
    fit = fitted(grid, "layer", exact=True)
    found = uniform_grid(BcqTensors.of(fit.pack(_codes(bits)).tensors), fit.spec)
    assert found is not None
    assert found.zero is not None
    assert torch.equal(found.step, grid.step)
    assert torch.equal(found.zero, grid.zero)


def test_free_scales_are_no_grid() -> None:
    fit = fitted(_grid(3, 0, symmetric=True), "layer", exact=True)
    stored = BcqTensors.of(fit.pack(_codes(3)).tensors)
    stored.scales[2] *= 1.25
    assert uniform_grid(stored, fit.spec) is None


def test_groups_that_are_no_multiple_of_eight_are_refused() -> None:
    with pytest.raises(CheckpointError, match="groups of 12 columns"):
        joined_groups(Grid(4, 12, torch.ones(1, 2)), 24, "layer")
    assert joined_groups(Grid(4, 12, torch.ones(1, 1)), 12, "layer").group_size == -1


def test_zero_points_outside_the_grid_are_refused() -> None:
    with pytest.raises(CheckpointError, match="zero point lies outside 0 to 16"):
        check_zero(torch.tensor([17]), 4, "layer")
