from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.errors import RecipeError, StatsError
from quantkit.quantizers.gptq import GptqOptions, gptq, inverse_factor

STEP = 0.25
FP32_RTOL = 2e-4  # a Cholesky factorization and its inverse in fp32


def _round(_column: int, values: Tensor) -> Tensor:
    return (values / STEP).round() * STEP


def _correlated_hessian(channels: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(channels, channels, generator=generator)
    x = torch.randn(512, 3, generator=generator) @ mix[:3] + 0.3 * torch.randn(512, channels, generator=generator)
    return x.t() @ x / 512


def _loss(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    error = (weight - rounded).double()
    return torch.einsum("nk,kl,nl->", error, hessian.double(), error).item()


def _naive(weight: Tensor, hessian: Tensor, damping: float) -> Tensor:
    """The published recursion with an explicit inverse of the remaining columns at every step."""
    w, h = weight.double().clone(), hessian.double().clone()
    h.diagonal().add_(damping * h.diagonal().mean())
    for k in range(w.shape[1]):
        inverse = torch.linalg.inv(h[k:, k:])
        exact = w[:, k].clone()
        w[:, k] = _round(k, exact)
        w[:, k + 1 :] -= torch.outer((exact - w[:, k]) / inverse[0, 0], inverse[0, 1:])
    return w.float()


@pytest.mark.parametrize("block_columns", [1, 5, 64], ids=["column by column", "blocks of 5", "one block"])
def test_blocked_updates_equal_the_plain_recursion(block_columns: int) -> None:
    weight, hessian = torch.randn(6, 23), _correlated_hessian(23)
    options = GptqOptions(damping=0.05, block_columns=block_columns)
    result = gptq(weight, hessian, _round, options=options)
    # One rounding decision on the edge may fall the other way in fp32; none does for this seed.
    assert torch.equal(result.weight, _naive(weight, hessian, 0.05))


@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act-order"])
def test_compensation_beats_rounding(act_order: bool) -> None:
    weight, hessian = torch.randn(16, 48), _correlated_hessian(48)
    result = gptq(weight, hessian, _round, options=GptqOptions(act_order=act_order))
    assert torch.equal(result.weight, _round(0, result.weight))
    assert _loss(weight, result.weight, hessian) < 0.7 * _loss(weight, _round(0, weight), hessian)


def test_uncorrelated_inputs_leave_nothing_to_compensate() -> None:
    weight = torch.randn(4, 12)
    result = gptq(weight, torch.eye(12), _round, options=GptqOptions())
    assert torch.equal(result.weight, _round(0, weight))


def test_dead_channels_are_rounded_alone_and_shift_no_other() -> None:
    hessian, weight = _correlated_hessian(20), torch.randn(5, 20)
    alive = torch.tensor([k for k in range(20) if k not in (3, 11)])
    hessian[[3, 11]] = 0
    hessian[:, [3, 11]] = 0
    result = gptq(weight, hessian, _round, options=GptqOptions())
    # The mean diagonal, and with it the damping, is over all columns.
    scaled = GptqOptions(damping=0.01 * alive.numel() / 20)
    without = gptq(weight[:, alive], hessian[alive][:, alive], _round, options=scaled)
    assert torch.equal(result.weight[:, [3, 11]], _round(0, weight[:, [3, 11]]))
    assert torch.equal(result.weight[:, alive], without.weight)


def test_no_input_at_all_is_plain_rounding() -> None:
    weight = torch.randn(3, 8)
    assert torch.equal(gptq(weight, torch.zeros(8, 8), _round, options=GptqOptions()).weight, _round(0, weight))


def test_inverse_factor_is_that_of_the_damped_hessian() -> None:
    hessian = _correlated_hessian(30)
    found = inverse_factor(hessian, 0.02)
    upper, damping = found.upper, found.damping
    damped = hessian + 0.02 * hessian.diagonal().mean() * torch.eye(30)
    assert damping == 0.02
    assert torch.equal(upper, upper.triu())
    torch.testing.assert_close(upper.t() @ upper @ damped, torch.eye(30), rtol=FP32_RTOL, atol=FP32_RTOL)


def test_damping_is_raised_until_the_hessian_is_definite() -> None:
    indefinite = torch.tensor([[1.0, 1.05], [1.05, 1.0]])
    damping = inverse_factor(indefinite, 0.01).damping
    assert damping == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("hessian", "match"),
    [
        (torch.tensor([[1.0, float("nan")], [float("nan"), 1.0]]), "NaN"),
        (torch.tensor([[1.0, -1e9], [-1e9, 1.0]]), "positive definite"),
    ],
    ids=["nan", "hopeless"],
)
def test_impossible_hessians_are_refused(hessian: Tensor, match: str) -> None:
    with pytest.raises(StatsError, match=match):
        inverse_factor(hessian, 0.01)


@pytest.mark.parametrize("damping", [0.0, -1.0, 2.0])
def test_damping_is_a_share(damping: float) -> None:
    with pytest.raises(RecipeError, match="damping"):
        GptqOptions(damping=damping)


def test_a_known_factor_gives_the_same_codes_as_its_hessian() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 48), torch.randn(200, 48)
    hessian = x.t() @ x / 200
    whole = gptq(weight, hessian, _round, options=GptqOptions())
    again = gptq(weight, inverse_factor(hessian, GptqOptions().damping), _round, options=GptqOptions())
    assert torch.equal(whole.weight, again.weight)
    assert whole.damping == again.damping
