"""Codes that are chosen again while they are tuned: the nearest ones, their weight and its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.formats.planes import code_signs
from quantkit.quantizers.bcq.levels import Coding
from quantkit.tuning import codes as tuned_codes
from quantkit.tuning.codes import gradients_of_groups, nearest_codes, weight_of

N, K, WIDTH, BITS = 24, 80, 32, 3  # the last group of a row has 16 columns
GROUPS = 3
ROUNDING = 1e-5  # of sums of 32 values in fp32, taken in another order


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in several parts, the last of them short."""
    monkeypatch.setattr(tuned_codes, "_AT_ONCE", 7 * K)


def _groups(*, nested: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(latent [N, K], scales [q, N, G], offset [N, G]); so large a share of groups has nested levels."""
    draw = torch.Generator().manual_seed(seed)
    scales = torch.tensor([1.0, 0.5, 0.25])[:, None, None] * (1 + 0.1 * torch.rand(BITS, N, GROUPS, generator=draw))
    scales[0] *= torch.where(torch.rand(N, GROUPS, generator=draw) < nested, 1.0, 0.4)
    return torch.randn(N, K, generator=draw), scales, 0.2 * torch.randn(N, GROUPS, generator=draw)


def _signs(codes: Tensor) -> Tensor:
    """[q, N, G, g] of codes [N, K], zero behind the last column."""
    padding = (0, GROUPS * WIDTH - K)
    signs = [torch.nn.functional.pad(signs, padding) for signs in code_signs(codes, BITS)]
    return torch.stack(signs).unflatten(-1, (GROUPS, WIDTH))


@pytest.mark.parametrize("nested", [1.0, 0.7, 0.0])
def test_no_other_code_is_nearer(nested: float) -> None:
    latent, scales, offset = _groups(nested=nested)
    _, weight = nearest_codes(latent, scales, offset, WIDTH)
    levels = Coding(scales.flatten(1), offset.flatten()).levels().view(N, GROUPS, -1)
    of_columns = levels.repeat_interleave(WIDTH, dim=1)[:, :K]
    least = (of_columns - latent[..., None]).abs().amin(dim=-1)
    torch.testing.assert_close((weight - latent).abs(), least, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("nested", [1.0, 0.7])
def test_the_weight_is_that_of_the_codes_bit_for_bit(nested: float) -> None:
    latent, scales, offset = _groups(nested=nested)
    codes, weight = nearest_codes(latent, scales, offset, WIDTH)
    assert torch.equal(weight, weight_of(codes, scales, offset, WIDTH))
    expected = (_signs(codes) * scales[..., None]).sum(dim=0) + offset[..., None]
    torch.testing.assert_close(weight, expected.flatten(1)[:, :K], rtol=0, atol=ROUNDING)


def test_a_latent_weight_between_two_levels_has_the_lower_or_the_upper_one_and_its_code() -> None:
    scales, offset = torch.tensor([0.5, 0.25]).view(2, 1, 1), torch.full((1, 1), 0.125)
    latent = torch.tensor([[0.125, 0.625, -0.375]])  # middles
    codes, weight = nearest_codes(latent, scales, offset, 3)
    assert torch.equal((weight - latent).abs(), torch.full_like(latent, 0.25))
    assert torch.equal(weight, weight_of(codes, scales, offset, 3))


def test_gradients_are_sums_over_groups_against_signs() -> None:
    latent, scales, offset = _groups(nested=0.7)
    codes, _ = nearest_codes(latent, scales, offset, WIDTH)
    gradient = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    of_scales, of_offset = gradients_of_groups(gradient, codes, BITS, WIDTH)
    grouped = torch.nn.functional.pad(gradient, (0, GROUPS * WIDTH - K)).unflatten(-1, (GROUPS, WIDTH))
    torch.testing.assert_close(of_offset, grouped.sum(dim=-1), rtol=0, atol=ROUNDING)
    torch.testing.assert_close(of_scales, (_signs(codes) * grouped).sum(dim=-1), rtol=0, atol=ROUNDING)
