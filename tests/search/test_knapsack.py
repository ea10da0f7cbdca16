"""The solver against brute force on small tables, and its proof of optimality on larger ones."""

from __future__ import annotations

import itertools
import random

import pytest

from quantkit.search import knapsack
from quantkit.search.knapsack import solve

SUM_ATOL = 1e-12  # sums of a few fp64 numbers in another order

Table = list[list[float]]


def _brute_force(weights: Table, costs: Table, limit: float) -> float | None:
    """Least cost over all choices that fit."""
    fitting = [
        sum(row[k] for row, k in zip(costs, choice, strict=True))
        for choice in itertools.product(*(range(len(row)) for row in weights))
        if sum(row[k] for row, k in zip(weights, choice, strict=True)) <= limit
    ]
    return min(fitting, default=None)


def _random_tables(generator: random.Random, *, integer_costs: bool) -> tuple[Table, Table, float]:
    lengths = [generator.randint(1, 5) for _ in range(generator.randint(1, 5))]
    weights = [[float(generator.randint(0, 30)) for _ in range(n)] for n in lengths]
    costs = [
        [float(generator.randint(0, 9)) if integer_costs else generator.random() for _ in range(n)] for n in lengths
    ]
    return weights, costs, float(generator.randint(0, 90))


@pytest.mark.parametrize("integer_costs", [False, True], ids=["real-costs", "tied-costs"])
def test_best_choice_is_that_of_brute_force(integer_costs: bool) -> None:
    generator = random.Random(0)
    feasible = 0
    for _ in range(300):
        weights, costs, limit = _random_tables(generator, integer_costs=integer_costs)
        expected, choice = _brute_force(weights, costs, limit), solve(weights, costs, limit)
        assert (choice is None) == (expected is None)
        if choice is not None:
            feasible += 1
            assert choice.cost == pytest.approx(expected, abs=SUM_ATOL)
            assert choice.weight == sum(row[k] for row, k in zip(weights, choice.options, strict=True)) <= limit
            assert choice.cost == sum(row[k] for row, k in zip(costs, choice.options, strict=True))
            assert choice.gap == 0
    assert feasible > 100


def _layers(count: int) -> tuple[Table, Table]:
    """Costs as a quantized model's: falling fourfold per bit, of very different size per layer."""
    generator = random.Random(1)
    weights, costs = [], []
    for _ in range(count):
        scale = generator.lognormvariate(0, 1.5)
        pairs = [(bits, group) for bits in (2, 3, 4, 5) for group in (32, 64, 128, 256)]
        weights.append([float(bits * 4096 + 16 * (bits + 1) * 4096 // group) for bits, group in pairs])
        costs.append([scale * 4.0**-bits * (1 + group / 500) * generator.uniform(0.9, 1.1) for bits, group in pairs])
    return weights, costs


def test_a_model_of_200_layers_is_solved_to_proven_optimality() -> None:
    weights, costs = _layers(200)
    limit = 3.25 * 4096 * 200
    first, second = solve(weights, costs, limit), solve(weights, costs, limit)
    assert first is not None
    assert first == second
    assert first.gap == 0
    assert 0.999 * limit < first.weight <= limit


def test_beyond_the_state_cap_the_stated_gap_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, costs = _layers(40)
    # Odd sizes keep partial sums from coinciding, so that many states are alive.
    weights = [[w + 7 * i * k for k, w in enumerate(row)] for i, row in enumerate(weights)]
    limit = 3.1 * 4096 * 40
    best = solve(weights, costs, limit)
    monkeypatch.setattr(knapsack, "MAX_STATES", 1)
    capped = solve(weights, costs, limit)
    assert best is not None
    assert capped is not None
    assert best.gap == 0
    assert capped.weight <= limit
    assert capped.gap > 0
    assert best.cost >= capped.cost - capped.gap


def test_nothing_fits() -> None:
    assert solve([[5.0, 6.0], [5.0]], [[1.0, 0.0], [1.0]], 9.0) is None
    assert solve([[5.0, 6.0], [5.0]], [[1.0, 0.0], [1.0]], 10.0).options == (0, 0)  # type: ignore[union-attr]
