"""Budgets and settings that the search refuses."""

from __future__ import annotations

import pytest

from quantkit.errors import RecipeError
from quantkit.jobs.search import Budget, search_settings


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), 0.0, -1.0], ids=["nan", "inf", "zero", "negative"])
def test_a_budget_is_a_number_above_zero(limit: float) -> None:
    with pytest.raises(RecipeError, match="bits per weight leaves nothing"):
        Budget("bpw", limit)


@pytest.mark.parametrize(
    "setting",
    ["attention_bits=8", "weight_bits=4", "per=block", "measure=true", "device=1", "hessian=end_loss"],
)
def test_settings_that_the_search_would_not_carry_out_are_refused(setting: str) -> None:
    with pytest.raises(RecipeError, match=f"`settings` {setting.split('=')[0]}"):
        search_settings([setting])
