from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quantkit.assets import recipe_names
from quantkit.errors import RecipeError
from quantkit.methods import check_recipe, plan_layers
from quantkit.quantizers.bcq.quantizer import BcqSettings
from quantkit.quantizers.rounding import RtnSettings
from quantkit.recipe import load_recipe, parse_recipe

LAYERS = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "lm_head"]


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_is_valid(name: str) -> None:
    check_recipe(load_recipe(name))


def test_recipe_survives_its_own_json() -> None:
    recipe = load_recipe("bcq-w4-g128", ["group_size=64", "keep=[lm_head, '*.down_proj']"])
    assert parse_recipe(recipe.to_json(), recipe.name, "json") == recipe


def test_set_overrides_one_setting_and_leaves_the_rest() -> None:
    plans = plan_layers(load_recipe("bcq-w4-g128", ["group_size=64"]), LAYERS)
    assert plans[LAYERS[0]].settings == BcqSettings(weight_bits=4, group_size=64, offset=True)
    assert "lm_head" not in plans


def test_first_matching_rule_wins_and_may_change_the_method() -> None:
    document = {
        "schema": 1,
        "method": "bcq",
        "settings": {"weight_bits": 3},
        "layers": [
            {"match": "*.0.mlp.*", "weight_bits": 5},
            {"match": "*.mlp.*", "method": "rtn", "weight_bits": 8},
        ],
    }
    plans = plan_layers(parse_recipe(document, "mixed", "here"), LAYERS)
    assert plans[LAYERS[0]].settings == BcqSettings(weight_bits=3)
    assert plans[LAYERS[1]].settings == BcqSettings(weight_bits=5)
    assert plans[LAYERS[2]].settings == RtnSettings(weight_bits=8)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["group_sise=64"], "did you mean 'group_size'"),
        (["group_size=12"], "multiple of 8"),
        (["weight_bits=9"], "choose 1 to 8"),
        (["weight_bits=four"], "expects int"),
        (["weight_bits=true"], "expects int"),
        (["method=bqc"], "did you mean 'bcq'"),
        (["weight_bits"], "expected key=value"),
        (["weight_bits=[1"], "`settings` weight_bits"),
        (["weight_bits=4.0"], "expects int"),
        (["weight_bits=0x" + "f" * 6000], "an integer of 24000 bits"),
        (["damping=.nan"], "expects float"),
        (["damping=.inf"], "expects float"),
        (["keep=[&a x, *a]"], "aliases"),
    ],
    ids=[
        *("key", "group", "bits", "word", "bool", "method", "no-value", "yaml", "float", "huge", "nan", "inf", "alias"),
    ],
)
def test_bad_overrides_are_refused_with_a_hint(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_recipe(load_recipe("bcq-w4-g128", overrides))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema: 1\nmethod: bcq\nsetings: {}\n", "did you mean 'settings'"),
        ("schema: 2\nmethod: bcq\n", "this version reads schema: 1"),
        ("schema: 1\n", "'method' is missing"),
        ("schema: [\n", "recipe"),
        ("just words", "expected a mapping"),
        ("schema: 1\nmethod: bcq\nlayers: [{weight_bits: 3}]\n", "needs a 'match' glob"),
        ("schema: 1\nmethod: bcq\nkeep: lm_head\n", "are lists"),
        ("schema: 1\nmethod: bcq\nkeep: [1]\n", "'keep' holds 1"),
        ("schema: true\nmethod: bcq\n", "schema is True"),
        ("schema: 1\nmethod: bcq\nsettings: [a]\n", "'settings' is a mapping"),
        ("schema: 1\nmethod: bcq\nattention_bits: 8.0\n", "attention_bits is 8.0"),
        ("schema: 1\nmethod: bcq\nlayers: [{match: a, method: [b]}]\n", "the method of 'a' is"),
        ("schema: 1\nbase: bcq-w4-g12\n", "did you mean 'bcq-w4-g128'"),
        ("schema: 1\nbase: [bcq-w4-g128]\n", "not a shipped recipe"),
        ("schema: 1\nbase: best-4bit\n", "has a base itself"),
        ("schema: 1\nbase: bcq-w4-g128\nmethod: rtn\n", "leave 'method' out"),
        ("base: bcq-w4-g128\n", "schema is None"),
        ("schema: 1\nbase: bcq-w4-g128\nsettings: [a]\n", "'settings' is a mapping"),
        ("schema: 1\nmethod: bcq\nmethod: rtn\n", "line 3: the key 'method' stands twice"),
        ("schema: 1\nmethod: bcq\nkeep: &k [a]\nlayers: *k\n", "aliases"),
    ],
    ids=[
        *("key", "schema", "method", "yaml", "scalar", "rule", "keep", "keep-number", "schema-bool", "settings"),
        *("attention-float", "method-list", "base-unknown", "base-list", "base-of-base", "base-method"),
        *("base-schema", "base-settings", "key-twice", "alias"),
    ],
)
def test_malformed_files_are_refused_naming_the_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(str(path))
    assert "mine" in str(caught.value)


def test_a_recipe_on_a_base_states_only_what_differs(tmp_path: Path) -> None:
    base = load_recipe("bcq-w3-g64-s8-comp")
    path = tmp_path / "mine.yaml"
    path.write_text(f"schema: 1\nbase: {base.name}\nsettings: {{group_size: 256}}\nkeep: []\n", encoding="utf-8")
    expected = replace(base, name="mine", settings={**base.settings, "group_size": 256}, keep=())
    assert load_recipe(str(path)) == expected
    path.write_text(f"schema: 1\nbase: {base.name}\nsettings:\n", encoding="utf-8")
    assert load_recipe(str(path)) == replace(base, name="mine")
    assert load_recipe(str(path), ["group_size=32"]).settings == {**base.settings, "group_size": 32}


@pytest.mark.parametrize(
    ("alias", "recipe", "settings"),
    [
        ("best-4bit", "bcq-w4-g64-s8-comp", ["group_size=256"]),
        ("best-3bit", "bcq-w3-g64-s8-comp", ["group_size=256"]),
        ("best-2bit", "bcq-w2-g32-s8-comp", ["group_size=64"]),
        ("fast-4bit", "bcq-w4-g64-s8", []),
    ],
)
def test_an_alias_is_what_the_tables_of_quality_measured(alias: str, recipe: str, settings: list[str]) -> None:
    """docs/quality.md shows some of their rows under the longer name."""
    assert load_recipe(alias) == replace(load_recipe(recipe, settings), name=alias)


def test_unknown_recipe_lists_the_shipped_ones() -> None:
    with pytest.raises(RecipeError, match="bcq-w4-g128"):
        load_recipe("bcq-w4")


def test_rule_that_matches_no_layer_is_refused() -> None:
    document = {"schema": 1, "method": "bcq", "layers": [{"match": "*.fc3", "weight_bits": 3}]}
    with pytest.raises(RecipeError, match="matches no layer"):
        plan_layers(parse_recipe(document, "mixed", "here"), LAYERS)


def test_recipe_that_keeps_everything_is_refused() -> None:
    with pytest.raises(RecipeError, match="no layer to quantize"):
        plan_layers(load_recipe("bcq-w4-g128", ["keep=['*']"]), LAYERS)
