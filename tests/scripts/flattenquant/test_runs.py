"""The runs behind the paper's tables take the paper's settings."""

from __future__ import annotations

from quantkit.methods import check_recipe
from quantkit.quantizers.flatten.settings import FlattenSettings
from quantkit.recipe import load_recipe
from scripts.flattenquant.runs import TABLES, Run


def test_flatten_o1_is_run_as_published() -> None:
    assert FlattenSettings(**load_recipe("flatten-o1", Run("flatten-o1").settings).settings) == FlattenSettings()


def test_what_a_table_varies_is_set_last() -> None:
    recipe = load_recipe("flatten-o1", Run("flatten-o1", ("smoothing=none",)).settings)
    assert recipe.settings["smoothing"] == "none"


def test_every_run_has_a_recipe_that_loads() -> None:
    for run in (run for runs in TABLES.values() for run in runs if run.recipe):
        check_recipe(load_recipe(run.recipe, run.settings))
