"""What a search writes: plan.yaml, a recipe to apply, and plan.json, what it was chosen from."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import yaml

from quantkit.recipe import LayerRule, Recipe
from quantkit.search.plan import Plan, Problem, frontier, option_label, type_points, uniform_points
from quantkit.search.table import option_settings


def plan_recipe(plan: Plan, base: Recipe) -> Recipe:
    """The plan as a recipe: the most frequent option for all, and a rule for every layer by its exact name."""
    common, _ = Counter(plan.options.values()).most_common(1)[0]
    own = {option: option_settings(base.method, option) for option in plan.options.values()}
    rules = tuple(LayerRule(glob.escape(name), None, own[option]) for name, option in plan.options.items())
    return Recipe("plan", base.method, {**base.settings, **own[common]}, base.keep, rules)


def plan_document(problem: Problem, plan: Plan, facts: Mapping[str, Any]) -> dict[str, Any]:
    """plan.json: the given facts, the choice of every layer with its row of the error table, and points to plot."""
    return {
        "kind": "search",
        **facts,
        "options": [option_label(option) for option in problem.options],
        "layers": {name: _layer(problem, plan, name) for name in plan.options},
        "uniform": [asdict(point) for point in uniform_points(problem)],
        "types": [asdict(point) for point in type_points(problem)],
        "frontier": [asdict(point) for point in frontier(problem)],
    }


def _layer(problem: Problem, plan: Plan, name: str) -> dict[str, Any]:
    option, shape = plan.options[name], problem.table.shapes[name]
    rows = [
        {
            **asdict(each),
            "stored": entry.stored,
            "output_error": entry.output_error,
            "estimated_kl": entry.estimate,
            "measured_kl": entry.measured,
            "predicted_kl": problem.losses[name, each],
        }
        for (layer, each), entry in problem.table.entries.items()
        if layer == name
    ]
    chosen = next(row for row in rows if (row["weight_bits"], row["group_size"]) == tuple(asdict(option).values()))
    bits = 8 * chosen["stored"] / (shape[0] * shape[1])
    return {"shape": list(shape), "bits_per_weight": bits, **chosen, "table": rows}


def plan_text(recipe: Recipe, document: Mapping[str, Any], beside: str) -> str:
    """plan.yaml: the recipe under a heading that says what it is; beside: the name of its document."""
    budget = document["budget"]
    header = (
        f"# Found by quantkit search for {document['model']}: {document['bits_per_weight']:.4f} bits per weight, "
        f"{document['bytes']} bytes,\n# predicted KL {document['predicted_kl']:.6f} nats per token; budget "
        f"{budget['kind']} <= {budget['limit']:g}. See {beside}.\n"
    )
    return header + yaml.safe_dump(recipe.to_json(), sort_keys=False, width=120)
