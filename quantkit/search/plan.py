"""Choosing from the error table within a budget: one option per layer, or one per sub-layer type."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from quantkit.search.knapsack import Choice, solve
from quantkit.search.table import ErrorTable, Option

Mode = Literal["layer", "type"]
TYPES = ("attention", "ffn")
_FRONTIER_POINTS = 25

Costs = Mapping[tuple[str, Option], float]


@dataclass(frozen=True)
class Plan:
    """The option of every layer, in the model's order.

    stored: bytes of all quantized tensors. predicted_kl: nats per token, summed over layers.
    gap: how much smaller the objective (KL, or bytes within a budget of KL) could be at most; 0 where proven best.
    """

    options: Mapping[str, Option]
    stored: int
    predicted_kl: float
    gap: float


@dataclass(frozen=True)
class Point:
    """One way to quantize the whole model, for plots."""

    label: str
    bits_per_weight: float
    predicted_kl: float


@dataclass(frozen=True)
class Problem:
    """What is chosen from.

    losses: KL expected of each layer under each of its options. merged: layers that share one option.
    """

    table: ErrorTable
    options: Sequence[Option]
    losses: Mapping[tuple[str, Option], float]
    merged: Sequence[Sequence[str]] = ()

    def groups(self) -> list[tuple[str, ...]]:
        """Every layer, in the model's order: those that share an option together, at the place of the first."""
        whole = {
            name: tuple(own for own in group if own in self.table.shapes) for group in self.merged for name in group
        }
        return list(dict.fromkeys(whole.get(name, (name,)) for name in self.table.shapes))

    @property
    def weights(self) -> int:
        """Weights of all layers together."""
        return sum(rows * columns for rows, columns in self.table.shapes.values())

    def stored(self) -> dict[tuple[str, Option], float]:
        """Bytes of the stored tensors of each layer under each option."""
        return {key: float(entry.stored) for key, entry in self.table.entries.items()}

    def plan(self, chosen: Mapping[str, Option], gap: float) -> Plan:
        """The plan of these options, fitted to their layers."""
        fitted = {name: chosen[name].fitted(shape) for name, shape in self.table.shapes.items()}
        stored = sum(self.table.entries[key].stored for key in fitted.items())
        return Plan(fitted, stored, sum(self.losses[key] for key in fitted.items()), gap)

    def bits_per_weight(self, stored: float) -> float:
        """Bits per weight of all layers in so many bytes."""
        return 8 * stored / self.weights


def sublayer_type(layer: str) -> str:
    """ "attention" or "ffn" (nuQmm Fig 10) of a Linear, by the name of the module that holds it."""
    return "attention" if any("att" in part for part in layer.split(".")) else "ffn"


def choose(problem: Problem, sizes: Costs, costs: Costs, limit: float, mode: Mode) -> Plan | None:
    """The options of least total cost whose sizes sum to at most the limit; None where nothing fits.

    sizes, costs: of every entry of the table. mode "layer": each its own, or one for each of the problem's groups
    (exact, or with a proven gap); "type": the paper's exhaustive grid, all Linears of one sub-layer type alike
    (nuQmm A.1).
    """
    if mode == "type":
        return _choose_by_type(problem, sizes, costs, limit)
    # Layers of a group have one K, so an option fits all of them alike.
    own = {group: [o for n, o in problem.table.entries if n == group[0]] for group in problem.groups()}
    tables = [
        [[sum(table[name, o] for name in group) for o in options] for group, options in own.items()]
        for table in (sizes, costs)
    ]
    choice: Choice | None = solve(tables[0], tables[1], limit)
    if choice is None:
        return None
    chosen = zip(own.items(), choice.options, strict=True)
    return problem.plan({name: options[k] for (group, options), k in chosen for name in group}, choice.gap)


def type_grid(problem: Problem) -> list[dict[str, Option]]:
    """Every combination of one option per sub-layer type, as the option of every layer."""
    kinds = {name: sublayer_type(name) for name in problem.table.shapes}
    present = [kind for kind in TYPES if kind in kinds.values()]
    combinations = itertools.product(problem.options, repeat=len(present))
    return [
        {name: dict(zip(present, pair, strict=True))[kind] for name, kind in kinds.items()} for pair in combinations
    ]


def uniform_points(problem: Problem) -> list[Point]:
    """Every (q, g) used for all layers alike."""
    points = []
    for option in problem.options:
        plan = problem.plan(dict.fromkeys(problem.table.shapes, option), 0.0)
        points.append(Point(option_label(option), problem.bits_per_weight(plan.stored), plan.predicted_kl))
    return points


def best_uniform(problem: Problem, bits_per_weight: float) -> Point | None:
    """The uniform (q, g) of least predicted KL within so many bits per weight; None where none is as small."""
    fitting = [point for point in uniform_points(problem) if point.bits_per_weight <= bits_per_weight]
    return min(fitting, key=lambda point: point.predicted_kl, default=None)


def type_points(problem: Problem) -> list[Point]:
    """The whole per-type grid."""
    points = []
    for options in type_grid(problem):
        plan = problem.plan(options, 0.0)
        by_kind = {sublayer_type(name): option for name, option in options.items()}
        label = ", ".join(f"{kind} {option_label(option)}" for kind, option in by_kind.items())
        points.append(Point(label, problem.bits_per_weight(plan.stored), plan.predicted_kl))
    return points


def frontier(problem: Problem) -> list[Point]:
    """The best per-layer plans from the smallest to the largest size, evenly spaced."""
    stored = problem.stored()
    by_layer = [[stored[n, o] for n, o in stored if n == name] for name in problem.table.shapes]
    low, high = sum(map(min, by_layer)), sum(map(max, by_layer))
    points = []
    for step in range(_FRONTIER_POINTS):
        plan = choose(problem, stored, problem.losses, low + (high - low) * step / (_FRONTIER_POINTS - 1), "layer")
        if plan is not None:
            bits = problem.bits_per_weight(plan.stored)
            points.append(Point(f"per layer, {bits:.2f} bits", bits, plan.predicted_kl))
    return points


def option_label(option: Option) -> str:
    """``q3 g128``, or ``q3 row``."""
    return f"q{option.weight_bits} " + ("row" if option.group_size < 0 else f"g{option.group_size}")


def optimality(gap: float, smallest: bool) -> str:
    """What is proven of a plan, for people; smallest: bytes were minimised at a given predicted KL, not KL itself."""
    what = "size at this predicted KL" if smallest else "predicted KL at this size"
    return f"{what} proven best for the table" if not gap else f"{what} within {gap:.3g} of best for the table"


def _choose_by_type(problem: Problem, sizes: Costs, costs: Costs, limit: float) -> Plan | None:
    best: tuple[float, dict[str, Option]] | None = None
    for options in type_grid(problem):
        keys = [(name, option.fitted(problem.table.shapes[name])) for name, option in options.items()]
        cost = sum(costs[key] for key in keys)
        if sum(sizes[key] for key in keys) <= limit and (best is None or cost < best[0]):
            best = cost, options
    return problem.plan(best[1], 0.0) if best else None
