"""Multiple-choice knapsack: one option per class, least total cost within a limit on total weight.

Exact by dynamic programming over non-dominated (weight, cost) states, pruned by the bound of the linear relaxation.
Where states grow beyond a cap the answer comes with a proven gap instead.
Source: Sinha and Zoltners 1979 (the relaxation is solved by taking the steps of each class's lower convex hull in
order of cost saved per weight); Dyer, Kayal and Walsh 1984 (bounding in the dynamic program).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

MAX_STATES = 200_000
_ROUNDING = 1e-12  # of the incumbent: states whose bound is nearer than this to it cannot improve on it visibly

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Choice:
    """A solution: the chosen option of every class, its totals, and how much better another could be at most.

    gap: cost minus a proven lower bound on any solution's cost; 0 where the solution is proven best.
    """

    options: tuple[int, ...]
    weight: float
    cost: float
    gap: float


@dataclass(frozen=True)
class _Class:
    """One class's non-dominated options, weight rising and cost falling; index: their numbers in the input."""

    weights: Floats
    costs: Floats
    index: NDArray[np.int64]


@dataclass(frozen=True)
class _Relaxation:
    """The linear relaxation of some classes: all lightest options, then hull steps from the most efficient on.

    weights, costs: [steps + 1] cumulative; the least cost within a limit is linear between them.
    """

    weights: Floats
    costs: Floats

    def cost(self, limits: Floats) -> Floats:
        """Least relaxed cost within each limit; inf where not even the lightest options fit."""
        value = np.interp(limits, self.weights, self.costs)
        return np.where(limits < self.weights[0], np.inf, value)


def solve(weights: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], limit: float) -> Choice | None:
    """Choose one option per class so that the weights sum to at most ``limit`` and the costs to as little as possible.

    weights, costs: per class, per option, >= 0; weights exact as float64 (integers below 2**53).
    Deterministic. Returns None where not even the lightest options fit together.
    """
    classes = [
        _undominated(np.asarray(w, np.float64), np.asarray(c, np.float64)) for w, c in zip(weights, costs, strict=True)
    ]
    suffixes = _suffixes(classes)
    if suffixes[0].weights[0] > limit:
        return None
    best = _greedy(classes, limit)
    states, bound = _prune_and_extend(classes, suffixes, limit, best)
    if states is not None:
        best = states
    chosen = tuple(int(each.index[option]) for each, option in zip(classes, best, strict=True))
    weight, cost = (sum(float(t[k][o]) for k, o in enumerate(chosen)) for t in (weights, costs))
    return Choice(chosen, weight, cost, max(0.0, cost - bound) if bound < cost * (1 - _ROUNDING) else 0.0)


def _undominated(weights: Floats, costs: Floats) -> _Class:
    order = np.lexsort((costs, weights))
    cheapest = np.minimum.accumulate(costs[order])
    better = np.concatenate([[True], costs[order][1:] < cheapest[:-1]])
    kept = order[better]
    return _Class(weights[kept], costs[kept], kept)


def _hull(each: _Class) -> list[int]:
    """Positions of the lower convex hull of cost over weight, from the lightest to the cheapest option."""
    hull: list[int] = []
    for point in range(len(each.weights)):
        while len(hull) >= 2 and _slope(each, hull[-2], hull[-1]) >= _slope(each, hull[-2], point):
            hull.pop()
        hull.append(point)
    return hull


def _slope(each: _Class, first: int, second: int) -> float:
    return float((each.costs[second] - each.costs[first]) / (each.weights[second] - each.weights[first]))


def _steps(classes: Sequence[_Class]) -> list[tuple[float, int, int, float, float]]:
    """(slope, class, position it leads to, weight added, cost added) of all hull steps, most efficient first."""
    steps = []
    for number, each in enumerate(classes):
        hull = _hull(each)
        for first, second in pairwise(hull):
            added = each.weights[second] - each.weights[first], each.costs[second] - each.costs[first]
            steps.append((_slope(each, first, second), number, second, float(added[0]), float(added[1])))
    return sorted(steps)


def _suffixes(classes: Sequence[_Class]) -> list[_Relaxation]:
    """The relaxation of classes i, i + 1, ... for every i, and of none."""
    steps = _steps(classes)
    relaxations = []
    for first in range(len(classes) + 1):
        own = [step for step in steps if step[1] >= first]
        weights = [sum(float(each.weights[0]) for each in classes[first:]), *(step[3] for step in own)]
        costs = [sum(float(each.costs[0]) for each in classes[first:]), *(step[4] for step in own)]
        relaxations.append(_Relaxation(np.cumsum(weights), np.cumsum(costs)))
    return relaxations


def _greedy(classes: Sequence[_Class], limit: float) -> list[int]:
    """A feasible solution: every hull step that still fits and leads further, most efficient first."""
    chosen, total = [0] * len(classes), sum(float(each.weights[0]) for each in classes)
    for _, number, position, _, _ in _steps(classes):
        each = classes[number]
        extra = float(each.weights[position] - each.weights[chosen[number]])
        if position > chosen[number] and total + extra <= limit:
            chosen[number], total = position, total + extra
    return chosen


def _cost(classes: Sequence[_Class], chosen: Sequence[int]) -> float:
    return sum(float(each.costs[option]) for each, option in zip(classes, chosen, strict=True))


def _prune_and_extend(
    classes: Sequence[_Class], suffixes: Sequence[_Relaxation], limit: float, incumbent: Sequence[int]
) -> tuple[list[int] | None, float]:
    """(a solution better than the incumbent or None, a lower bound on every solution's cost)."""
    upper = _cost(classes, incumbent)
    target = upper * (1 - _ROUNDING)
    weights, costs = np.zeros(1), np.zeros(1)
    trail: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    bound = np.inf
    for number, each in enumerate(classes):
        sums = (weights[:, None] + each.weights[None, :]).ravel()
        totals = (costs[:, None] + each.costs[None, :]).ravel()
        promise = totals + suffixes[number + 1].cost(limit - sums)
        alive = np.flatnonzero(promise < target)
        alive = alive[np.lexsort((totals[alive], sums[alive]))]
        cheapest = np.minimum.accumulate(totals[alive])
        alive = alive[np.concatenate([[True], totals[alive][1:] < cheapest[:-1]])] if len(alive) else alive
        if len(alive) > MAX_STATES:
            ranked = np.argsort(promise[alive], kind="stable")
            bound = min(bound, float(promise[alive[ranked[MAX_STATES]]]))
            alive = alive[np.sort(ranked[:MAX_STATES])]
        parents, options = np.divmod(alive, len(each.weights))
        trail.append((parents, options))
        weights, costs = sums[alive], totals[alive]
    if not len(costs):
        return None, min(bound, upper)
    last = int(np.argmin(costs))
    chosen = []
    state = last
    for parents, options in reversed(trail):
        chosen.append(int(options[state]))
        state = int(parents[state])
    return chosen[::-1], min(bound, float(costs[last]))
