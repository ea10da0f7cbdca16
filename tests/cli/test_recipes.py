"""``quantkit recipes``: its bits per weight are those that quantizing stores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quantkit.assets import recipe_names
from quantkit.checkpoint.read import read_checkpoint
from quantkit.errors import CalibrationError
from quantkit.formats.table import stored_bytes
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.jobs.recipes import HESSIAN, NOTHING, shipped_recipes
from quantkit.methods import METHODS, plan_layers
from quantkit.quantizers.base import LayerInput
from quantkit.recipe import load_recipe
from tests.cli.calls import run
from tests.golden.write import CHECKPOINTS

GOLDEN = Path(__file__).parents[1] / "golden" / "files"
UNNEEDY = [recipe.name for recipe in shipped_recipes() if recipe.needs == NOTHING]


def test_every_shipped_recipe_is_listed_with_its_advice(tmp_path: Path) -> None:
    result = run("recipes", "--json", tmp_path / "r.json")
    assert result.exit_code == 0
    found = {entry["name"]: entry for entry in json.loads((tmp_path / "r.json").read_text())}
    assert sorted(found) == recipe_names()
    for name, entry in found.items():
        assert len(entry["advice"]) > 20, name
        assert "\n" not in entry["advice"]
        assert name in result.stdout
    assert found["nuqmm-q4-g128"]["bits_per_weight"] == [4.5, 4.5]  # 4 (1 + 16 / 128)
    assert found["bcq-w4-g128"]["bits_per_weight"] == [4.625, 4.625]  # and 16 / 128 for the offset


def test_the_best_need_calibration_and_the_fast_one_does_not() -> None:
    needs = {recipe.name: recipe.needs for recipe in shipped_recipes()}
    assert {needs[f"best-{bits}bit"] for bits in (2, 3, 4)} == {HESSIAN}
    assert needs["fast-4bit"] == NOTHING


@pytest.mark.parametrize("name", UNNEEDY)
def test_stored_specs_are_what_quantizing_stores(name: str) -> None:
    plan = plan_layers(load_recipe(name), ["layer"])["layer"]
    packed = METHODS[plan.method].quantize(LayerInput("layer", torch.randn(16, 136)), plan.settings)
    assert METHODS[plan.method].stored_specs(plan.settings, packed.shape) == (packed.spec,)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_real_checkpoint_stays_within_its_bounds(name: str) -> None:
    recipe, *settings = CHECKPOINTS[name]
    for layer, stored in read_checkpoint(GOLDEN / name).layers.items():
        plan = plan_layers(load_recipe(recipe, settings), [layer])[layer]
        bounds = [stored_bytes(s, stored.shape) for s in METHODS[plan.method].stored_specs(plan.settings, stored.shape)]
        run_time_scale = 4 * stored.shape[1]  # of flatten layers whose smoothing nothing takes in
        assert min(bounds) <= stored_bytes(stored.spec, stored.shape) <= max(bounds) + run_time_scale


@pytest.mark.parametrize("name", sorted({*recipe_names()} - {*UNNEEDY}))
def test_what_is_said_to_need_calibration_is_refused_without(name: str, tmp_path: Path) -> None:
    plain = ["rotate=false"] if load_recipe(name).settings.get("rotate") else []  # the model is an OPT
    with pytest.raises(CalibrationError, match="needs a calibration artifact"):
        quantize_model(
            str(GOLDEN / "model"),
            load_recipe(name, plain),
            tmp_path / "out",
            calibration=None,
            options=QuantizeOptions(),
        )
