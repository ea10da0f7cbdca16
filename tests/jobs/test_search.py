"""The search from a tiny model to a plan, and that plan applied."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.calibration.artifact import load_calibration
from quantkit.checkpoint.config import bits_per_weight
from quantkit.checkpoint.read import read_checkpoint
from quantkit.checkpoint.write import folder_bytes
from quantkit.errors import CalibrationError, OutputError, RecipeError
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.jobs.search import Budget, SearchResult, search, search_settings
from quantkit.models.families import merged_linears
from quantkit.models.loading import load_model
from quantkit.quantizers.bcq import compensation
from quantkit.recipe import load_recipe
from quantkit.search import table as table_module
from quantkit.search.plan import sublayer_type
from quantkit.search.table import Option
from tests.pipeline import window_scores

OPTIONS = [Option(bits, group) for bits in (2, 3, 4) for group in (32, -1)]
SLACK = 40_000  # bytes above the smallest plan: room for some layers to have more bits, not for all

Folders = Callable[[str], Path]
QUICK = ("rounds=2", "compensate=false")


@pytest.fixture(scope="module")
def filled_cache(tiny_model: Folders, short_calibration: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache after one search of OPT: most tests ask what is made of the same table."""
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        settings = search_settings((*QUICK, "measure=0"))
        model, budget = str(tiny_model("opt")), Budget("bpw", 3.3)
        search(model, short_calibration("opt"), folder / "p.yaml", budget=budget, options=OPTIONS, settings=settings)
    return folder / "cache"


@pytest.fixture(autouse=True)
def _own_cache(filled_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(filled_cache, tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def find(tiny_model: Folders, short_calibration: Folders, tmp_path: Path) -> Any:
    """(plan's name, budget, overrides, family, options) -> the search's result; its plan is tmp_path/NAME.yaml."""

    def call(
        name: str, kind: Any, limit: float, *overrides: str, family: str = "opt", options: list[Option] = OPTIONS
    ) -> SearchResult:
        quick = () if any(each.startswith("method=") for each in overrides) else QUICK
        return search(
            str(tiny_model(family)),
            short_calibration(family),
            tmp_path / f"{name}.yaml",
            budget=Budget(kind, limit),
            options=options,
            settings=search_settings((*quick, *overrides)),
        )

    return call


def _apply(plan: Path, model: Path, artifact: Path) -> Path:
    out = plan.with_suffix("")
    quantize_model(str(model), load_recipe(str(plan)), out, calibration=artifact, options=QuantizeOptions())
    return out


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", ()), ("llama", ("rotate=online",)), ("opt", ()), ("gpt2", ()), ("opt", ("scale_bits=8",))],
    ids=["llama", "llama-rotated", "opt", "gpt2", "opt-coded-scales"],
)
def test_bytes_of_the_written_files_keep_the_budget(
    family: str,
    settings: tuple[str, ...],
    find: Any,
    tiny_model: Folders,
    short_calibration: Folders,
    tmp_path: Path,
) -> None:
    smallest = find("smallest", "bpw", 2.0001 + 16 * 3 / 64, "measure=0", *settings, family=family).bytes
    budget = smallest + SLACK
    result = find("plan", "bytes", budget, "measure=0", *settings, family=family)
    out = _apply(tmp_path / "plan.yaml", tiny_model(family), short_calibration(family))
    written = folder_bytes(out)
    assert written <= result.bytes <= budget
    assert written > smallest
    chosen = {
        name: (layer.spec.weight_bits, layer.spec.group_size) for name, layer in read_checkpoint(out).layers.items()
    }
    assert chosen == {name: (o.weight_bits, o.group_size) for name, o in result.plan.options.items()}
    scales = {8 if "scale_bits=8" in settings else 16}
    assert {layer.spec.scale_bits for layer in read_checkpoint(out).layers.values()} == scales


def test_bits_per_weight_keep_the_budget_and_use_it(
    find: Any, tiny_model: Folders, short_calibration: Folders, tmp_path: Path
) -> None:
    result = find("plan", "bpw", 3.7, "measure=0")
    written = bits_per_weight(
        read_checkpoint(_apply(tmp_path / "plan.yaml", tiny_model("opt"), short_calibration("opt")))
    )
    assert written == pytest.approx(result.bits_per_weight, abs=1e-12)
    assert 3.5 < written <= 3.7
    assert result.plan.gap == 0


def test_plan_is_the_best_of_all_of_its_size(find: Any, tmp_path: Path) -> None:
    """Exchanging any two layers' options for others that fit the budget never lowers the predicted KL."""
    find("plan", "bpw", 3.5, "measure=0", "merged=free")
    document = json.loads((tmp_path / "plan.json").read_text())
    layers = document["layers"]
    weights = sum(layer["shape"][0] * layer["shape"][1] for layer in layers.values())
    spare = 3.5 * weights / 8 - sum(layer["stored"] for layer in layers.values())
    assert spare >= 0
    for first, second in itertools.combinations(layers.values(), 2):
        before = first["predicted_kl"] + second["predicted_kl"]
        for a, b in itertools.product(first["table"], second["table"]):
            if a["stored"] + b["stored"] <= first["stored"] + second["stored"] + spare:
                assert a["predicted_kl"] + b["predicted_kl"] >= before - 1e-12


def test_the_same_search_writes_the_same_plan(find: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find("first", "bpw", 3.3, "measure=2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other-cache"))
    find("second", "bpw", 3.3, "measure=2")
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("first", "second"))
    assert first == second
    plans = [(tmp_path / f"{name}.yaml").read_text().replace(f"{name}.json", "") for name in ("first", "second")]
    assert plans[0] == plans[1]


def test_an_interrupted_table_goes_on_where_it_stopped(
    find: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = find("whole", "bpw", 3.3, "measure=0")
    lines = whole.table_file.read_bytes().splitlines(keepends=True)
    whole.table_file.write_bytes(b"".join(lines[:30]) + lines[30][:20])  # torn in the middle of a line
    done: list[tuple[str, Option]] = []
    quantize = table_module.LayerMethod.quantize

    def counted(self: Any, layer: Any, option: Option) -> Any:
        done.append((layer.name, option))
        return quantize(self, layer, option)

    monkeypatch.setattr(table_module.LayerMethod, "quantize", counted)
    resumed = find("resumed", "bpw", 3.3, "measure=0")
    assert len(done) == len(lines) - 30
    assert resumed.plan == whole.plan
    assert sorted(whole.table_file.read_bytes().splitlines()) == sorted(b"".join(lines).splitlines())
    done.clear()
    find("again", "bpw", 3.9, "measure=0")
    assert done == []


def test_compensated_binary_coding_is_searched_with_its_hessians(find: Any) -> None:
    options = [Option(3, 32)]
    plain = find("plain", "bpw", 5.0, "measure=0", options=options)
    compensated = find("compensated", "bpw", 5.0, "measure=0", "compensate=true", "sweeps=0", options=options)
    assert compensated.table_file != plain.table_file
    assert compensated.plan.predicted_kl < plain.plan.predicted_kl


def test_plans_are_compensated_unless_settings_say_otherwise() -> None:
    assert search_settings(()).base.settings == {"compensate": True}
    assert search_settings(("compensate=false",)).base.settings == {"compensate": False}
    assert search_settings(("method=rtn",)).base.settings == {"compensate": True}
    assert search_settings(("method=hqq",)).base.settings == {}


def test_inputs_of_trellis_codes_are_rotated_unless_settings_say_otherwise() -> None:
    expected = {(): True, ("rotate=online",): None, ("rotate=false",): True, ("rotate_inputs=false",): False}
    for settings, rotated in expected.items():
        assert search_settings(("method=trellis", *settings)).base.settings.get("rotate_inputs") is rotated


def test_the_best_uniform_choice_of_its_size_stands_beside_the_plan(find: Any, tmp_path: Path) -> None:
    result = find("plan", "bpw", 3.7, "measure=0")
    document = json.loads((tmp_path / "plan.json").read_text())
    fitting = [point for point in document["uniform"] if point["bits_per_weight"] <= result.bits_per_weight]
    assert document["best_uniform"]["predicted_kl"] == min(point["predicted_kl"] for point in fitting)
    assert result.plan.predicted_kl < document["best_uniform"]["predicted_kl"]
    least = find("least", "bpw", 2.0001 + 16 * 3 / 64, "measure=0", options=[Option(2, -1), Option(3, -1)])
    assert least.uniform is not None
    assert least.uniform.label == "q2 row"


def test_one_factor_serves_all_widths_of_a_group_size(find: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    factor = compensation.inverse_factor

    def counted(hessian: Any, damping: float) -> Any:
        taken.append(len(hessian))
        return factor(hessian, damping)

    monkeypatch.setattr(compensation, "inverse_factor", counted)
    result = find("plan", "bpw", 3.7, "measure=0", "compensate=true", "sweeps=0")
    assert len(taken) == 2 * len(result.plan.options)  # two group sizes, of three bit widths each


def test_measured_kl_replaces_the_estimate_of_its_layer(find: Any, tmp_path: Path) -> None:
    find("plan", "bpw", 3.3, "measure=3")
    layers = json.loads((tmp_path / "plan.json").read_text())["layers"]
    measured = {
        name: [row for row in layer["table"] if row["measured_kl"] is not None] for name, layer in layers.items()
    }
    assert sorted(map(len, measured.values())) == [0] * (len(layers) - 3) + [3] * 3  # one per bit width
    for rows in measured.values():
        for row in rows:
            assert row["predicted_kl"] == pytest.approx(row["measured_kl"], rel=1e-12)


def test_max_kl_is_kept_by_the_quantized_model(
    find: Any, tiny_model: Folders, short_calibration: Folders, tmp_path: Path
) -> None:
    limit = 2e-4
    result = find("plan", "kl", limit, "measure=0", "merged=free")
    reference, _ = load_model(str(tiny_model("opt")))
    quantized, _ = load_model(str(_apply(tmp_path / "plan.yaml", tiny_model("opt"), short_calibration("opt"))))
    windows = load_calibration(short_calibration("opt")).windows.long()
    kl = sum(float(window_scores(reference, quantized, window).kl.mean()) for window in windows) / len(windows)
    assert kl == pytest.approx(result.measured_kl, rel=1e-6)
    assert kl <= limit
    assert result.bits_per_weight < 4.5  # the largest choice has 4 + 16 * 5 / 32 bits: not simply everything


def test_per_type_gives_attention_and_ffn_one_option_each(find: Any, tmp_path: Path) -> None:
    result = find("plan", "bpw", 3.6, "per=type", "measure=0")
    by_kind = {(sublayer_type(name), option) for name, option in result.plan.options.items()}
    assert sorted(kind for kind, _ in by_kind) == ["attention", "ffn"]
    document = json.loads((tmp_path / "plan.json").read_text())
    fitting = [point for point in document["types"] if point["bits_per_weight"] <= 3.6]
    assert len(document["types"]) == len(OPTIONS) ** 2
    assert result.plan.predicted_kl == pytest.approx(min(point["predicted_kl"] for point in fitting), rel=1e-12)
    free = find("free", "bpw", 3.6, "measure=0", "merged=free")
    assert free.plan.predicted_kl <= result.plan.predicted_kl


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_linears_that_engines_merge_share_their_option(family: str, find: Any, tiny_model: Folders) -> None:
    groups = merged_linears(load_model(str(tiny_model(family)))[0])
    shared, free = (find(each, "bpw", 3.6, "measure=0", f"merged={each}", family=family) for each in ("same", "free"))
    used = [[{plan.options[name] for name in group} for group in groups] for plan in (shared.plan, free.plan)]
    assert all(len(options) == 1 for options in used[0])
    assert any(len(options) > 1 for options in used[1])
    assert free.plan.predicted_kl <= shared.plan.predicted_kl


def test_a_kept_linear_leaves_the_others_of_its_product_together(find: Any) -> None:
    options = find("plan", "bpw", 3.3, "measure=0", "keep=['*.k_proj']").plan.options
    assert not any("k_proj" in name for name in options)
    assert all(option == options[name.replace("q_", "v_")] for name, option in options.items() if "q_proj" in name)


def test_method_settings_reach_the_plan(find: Any, tmp_path: Path) -> None:
    find("plan", "bpw", 3.3, "measure=0", "method=rtn", "clip=false", "keep=['*.fc2']")
    recipe = load_recipe(str(tmp_path / "plan.yaml"))
    assert recipe.method == "rtn"
    assert recipe.settings["clip"] is False
    assert recipe.keep == ("*.fc2",)
    assert not any(rule.match.endswith("fc2") for rule in recipe.layers)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("weight_bits=3",), "is what the search chooses"),
        (("per=block",), "choose layer or type"),
        (("merged=yes",), "choose same or free"),
        (("measure=some",), "expected a number of layers"),
        (("method=flatten",), "which method flatten has not"),
        (("roundz=3",), "did you mean 'rounds'"),
    ],
    ids=["bits", "per", "merged", "measure", "method", "setting"],
)
def test_impossible_settings_are_refused(overrides: tuple[str, ...], message: str, find: Any, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        find("plan", "bpw", 3.3, *overrides)
    assert not list(tmp_path.glob("plan*"))


def test_a_budget_that_nothing_fits_names_the_smallest_choice(find: Any, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"smallest choice takes 2\.\d+ bits per weight"):
        find("plan", "bpw", 2.0, "measure=0")
    with pytest.raises(RecipeError, match=r"smallest choice takes \d+ bytes"):
        find("plan", "bytes", 1000, "measure=0")
    with pytest.raises(RecipeError, match=r"a KL of 1e-09 is not kept.*add more bits"):
        find("plan", "kl", 1e-9, "measure=0")
    assert not list(tmp_path.glob("plan*"))


def test_another_models_calibration_is_refused(tiny_model: Folders, short_calibration: Folders, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="another model"):
        search(
            str(tiny_model("opt")),
            short_calibration("llama"),
            tmp_path / "plan.yaml",
            budget=Budget("bpw", 3.0),
            options=OPTIONS,
            settings=search_settings(()),
        )


def test_a_cache_that_cannot_be_written_is_refused_before_the_work(
    find: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("a file where the folder should be")
    monkeypatch.setattr(table_module, "build_table", lambda *_a, **_k: pytest.fail("the work began"))
    with pytest.raises(OutputError, match=r"cache .* cannot be written .*; set XDG_CACHE_HOME"):
        find("plan", "bpw", 3.3, "measure=0")
    assert not list(tmp_path.glob("*plan*"))


def test_a_table_of_other_code_is_not_used(
    short_calibration: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, method = load_calibration(short_calibration("opt")), table_module.LayerMethod("bcq", {"rounds": 2})
    code = tmp_path / "solver.py"
    code.write_text("damping = 0.01")
    monkeypatch.setattr(table_module, "_solver_files", lambda: [code])
    before = table_module.table_path(artifact, method)
    assert table_module.table_path(artifact, method) == before
    code.write_text("damping = 0.05")
    assert table_module.table_path(artifact, method) != before


def test_variants_finished_a_few_at_a_time_measure_the_same(
    find: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    for name, limit in (("together", 10**9), ("few", 0)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{name}"))
        monkeypatch.setattr("quantkit.search.measure._VARIANT_BYTES", limit)
        find(name, "bpw", 3.3, "measure=2")
        written.append(json.loads((tmp_path / f"{name}.json").read_text())["layers"])
    assert written[0] == written[1]
