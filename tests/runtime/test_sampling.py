from __future__ import annotations

import pytest
import torch

from quantkit.errors import GenerationError
from quantkit.runtime.sampling import Sampling, drawer

CPU = torch.device("cpu")
LOGITS = torch.tensor([[1.0, 3.0, 2.0, 0.0]]).repeat(64, 1)


def drawn(**settings: float) -> list[int]:
    draw = drawer(Sampling(**settings), CPU)  # type: ignore[arg-type]
    assert draw is not None
    return draw(LOGITS)[:, 0].tolist()


def test_no_temperature_draws_nothing() -> None:
    assert drawer(Sampling(), CPU) is None


def test_a_seed_draws_the_same_again() -> None:
    assert drawn(temperature=1.0, seed=3) == drawn(temperature=1.0, seed=3) != drawn(temperature=1.0, seed=4)


def test_top_k_leaves_the_most_probable() -> None:
    assert set(drawn(temperature=5.0, top_k=2)) == {1, 2}


def test_top_p_leaves_its_share() -> None:
    assert set(drawn(temperature=1.0, top_p=0.6)) == {1}  # softmax: 0.09, 0.64, 0.24, 0.03


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": 1.0, "top_p": 0.0},
        {"top_k": 3},
        {"seed": 0},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(GenerationError):
        Sampling(**settings)  # type: ignore[arg-type]
