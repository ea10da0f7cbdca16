"""Thousands of damaged files: every one is refused in one line, or read as what was written.

``make fuzz`` runs more of them; MUTATIONS multiplies the numbers below, FUZZ_SEED chooses others.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantkit.calibration.artifact import load_calibration
from quantkit.checkpoint.summary import summarize
from quantkit.integrations.transformers import load_checkpoint
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.methods import check_recipe
from quantkit.models.loading import load_model
from quantkit.ops.bcq import autotune
from quantkit.ops.bcq.instances import SOURCES
from quantkit.recipe import load_recipe, parse_recipe
from quantkit.report.page import page
from quantkit.report.sources import find_sources
from quantkit.search.table import Option, TableFile
from quantkit.storage.resume import workspace
from quantkit.storage.tensors import VERIFY_VARIABLE
from tests.reliability import mutations
from tests.reliability.trials import EQUAL, REFUSED, outcome, remove, trials
from tests.report import documents
from tests.storage.test_resume import begin

PROMPT = torch.tensor([[5, 40, 100, 7, 22]])
# name: model, recipe, its overrides
CHECKPOINTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "bcq": ("llama", "bcq-w3-g128", ("group_size=32",)),
    "bcq-coded-scales": ("opt", "bcq-w3-g64-s8", ("group_size=32",)),
    "bipolar": ("opt", "bipolar-w4a8", ()),
    "flatten": ("opt", "flatten-o2", ()),
    "flatten-at-run-time": ("llama", "flatten-o1", ()),
    "attention": ("llama", "rtn-w4-g128", ("attention_bits=8",)),
}


@pytest.fixture(scope="module")
def checkpoint(
    tiny_model: Callable[[str], Path], calibrated: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            family, recipe, overrides = CHECKPOINTS[name]
            made[name] = tmp_path_factory.mktemp("fuzz") / name
            quantize_model(
                str(tiny_model(family)),
                load_recipe(recipe, overrides),
                made[name],
                calibration=calibrated(family),
                options=QuantizeOptions(device="cpu"),
            )
        return made[name]

    return folder


def damaged_copy(folder: Path, copy: Path, chance: random.Random) -> None:
    """A copy of a checkpoint with one file damaged; the others are links to the originals."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy, copy_function=os.link)
    weights, *others = sorted(folder.iterdir(), key=lambda path: (path.suffix != ".safetensors", path.name))
    chosen = weights if chance.random() < 0.5 else chance.choice(others)
    path, content = copy / chosen.name, chosen.read_bytes()
    kind = chance.random()
    if kind < 0.04:
        mutations.break_file(path, chance)
        return
    path.unlink()
    if kind < 0.2:
        changed = mutations.mutate_bytes(content, chance)
    elif chosen != weights:
        changed = mutations.mutate_json(content, chance)
    else:
        changed = chance.choice((mutations.mutate_header, mutations.mutate_payload))(content, chance)
    path.write_bytes(changed)


def loaded(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]:
    """(config, every tensor, logits of a prompt) of a checkpoint."""
    model = load_checkpoint(str(folder), device="cpu", dtype=None)
    with torch.no_grad():
        logits = model(PROMPT).logits
    return model.config.to_dict() | {"_name_or_path": ""}, model.state_dict(), logits


def is_same(first: Any, second: Any) -> bool:
    (config, tensors, logits), (other_config, other_tensors, other_logits) = first, second
    return (
        config == other_config
        and tensors.keys() == other_tensors.keys()
        and all(torch.equal(tensors[name], other_tensors[name]) for name in tensors)
        and torch.equal(logits, other_logits)
    )


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_damaged_checkpoints_are_refused_or_equal(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder, copy, seen = checkpoint(name), tmp_path / "copy", Counter[str]()
    reference = loaded(folder)
    for trial in trials(name, 70):
        damaged_copy(folder, copy, trial.chance)
        seen[outcome(lambda: is_same(loaded(copy), reference), trial)] += 1
    assert seen[REFUSED] > seen[EQUAL]
    shutil.rmtree(copy)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_damaged_checkpoints_that_are_not_verified_crash_nothing(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other values may be read then; never memory that is not the model's, and never without an end."""
    monkeypatch.setenv(VERIFY_VARIABLE, "0")
    folder, copy = checkpoint(name), tmp_path / "copy"

    def read() -> bool:
        summarize(copy)
        loaded(copy)
        return True

    for trial in trials(f"{name} unverified", 25):
        damaged_copy(folder, copy, trial.chance)
        outcome(read, trial)


def test_damaged_models_of_strangers_end_in_one_line(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """They hold no digests: other values cannot be told, but nothing may crash, hang or run code."""
    folder, copy = tiny_model("llama"), tmp_path / "copy"

    def read() -> bool:
        model, _ = load_model(str(copy))
        return model.get_input_embeddings().weight.shape[0] > 0

    for trial in trials("model", 60):
        damaged_copy(folder, copy, trial.chance)
        outcome(read, trial)


def test_damaged_calibrations_are_refused_or_equal(calibrated: Callable[[str], Path], tmp_path: Path) -> None:
    source, path, seen = calibrated("opt"), tmp_path / "c.safetensors", Counter[str]()
    content, reference = source.read_bytes(), load_calibration(source)

    def read() -> bool:
        found = load_calibration(path)
        stats = [(vars(found.layers[name]), vars(own)) for name, own in reference.layers.items()]
        same = all(torch.equal(a[key], b[key]) for a, b in stats for key in a if key != "tokens")
        return same and found.meta == reference.meta and torch.equal(found.windows, reference.windows)

    for trial in trials("calibration", 300):
        remove(path)
        path.write_bytes(content)
        if trial.number % 16 == 0:
            mutations.break_file(path, trial.chance)
        else:
            kinds = (mutations.mutate_bytes, mutations.mutate_header, mutations.mutate_header, mutations.mutate_payload)
            path.write_bytes(trial.chance.choice(kinds)(content, trial.chance))
        seen[outcome(read, trial)] += 1
    assert seen[REFUSED] > seen[EQUAL]


RECIPES = ("bcq-w4-g64-s8-comp", "flatten-o3", "bipolar-w4a4-rotated")
RULES = """
attention_bits: 8
layers:
  - {match: '*.fc1', method: rtn, weight_bits: 5}
  - match: '*.fc2'
    method: rtn
    group_size: 64
"""


@pytest.mark.parametrize("name", RECIPES)
def test_damaged_recipes_are_refused_or_sound(name: str, tmp_path: Path) -> None:
    """A changed recipe may be a good one: it then has known settings only, and survives its own JSON."""
    whole = load_recipe(name).to_json() | {"keep": ["lm_head"]}
    text = "\n".join(f"{key}: {json.dumps(value)}" for key, value in whole.items() if key not in ("layers", "settings"))
    text += (
        "\nsettings:\n" + "".join(f"  {key}: {json.dumps(value)}\n" for key, value in whole["settings"].items()) + RULES
    )
    path, content = tmp_path / "r.yaml", text.encode()
    path.write_bytes(content)
    check_recipe(load_recipe(str(path)))

    def read() -> bool:
        recipe = load_recipe(str(path))
        check_recipe(recipe)
        return parse_recipe(json.loads(json.dumps(recipe.to_json())), recipe.name, "json") == recipe

    for trial in trials(name, 150):
        remove(path)
        path.write_bytes(content)
        if trial.number % 25 == 0:
            mutations.break_file(path, trial.chance)
        else:
            path.write_bytes(
                trial.chance.choice((mutations.mutate_lines, mutations.mutate_bytes))(content, trial.chance)
            )
        outcome(read, trial)


DOCUMENTS = {
    "plan": documents.search_document,
    "comparison": documents.comparison_document,
    "divergence": documents.divergence_document,
    "perplexity": documents.perplexity_document,
    "table": documents.quality_document,
}
DRAWN_EVERY = 12  # drawing takes a hundred times as long as checking


@pytest.mark.parametrize("name", DOCUMENTS)
def test_damaged_results_are_refused_or_shown(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    content = json.dumps(DOCUMENTS[name]()).encode()
    path = tmp_path / "a.json"

    for trial in trials(name, 60):
        remove(path)
        path.write_bytes(trial.chance.choice((mutations.mutate_json, mutations.mutate_bytes))(content, trial.chance))

        def read(drawn: bool = trial.number % DRAWN_EVERY == 0) -> bool:
            sources = find_sources(tmp_path)
            return not drawn or page("title", sources).endswith("</html>\n")

        outcome(read, trial)


def test_damaged_caches_are_refused_or_equal(tmp_path: Path) -> None:
    """A last line without an end was torn by an interruption: it is dropped, and its work done again."""
    path = tmp_path / "t.jsonl"
    table = TableFile(path)
    spec = {"format": "bcq", "weight_bits": 3, "group_size": 32, "offset": True}
    for layer in ("model.decoder.layers.0.fc1", "model.decoder.layers.0.fc2"):
        for bits in (2, 3):
            table.add("entry", layer, Option(bits, 32), spec=spec, estimate=0.25 * bits, output_error=0.125)
            table.add("measured", layer, Option(bits, 32), kl=0.5)
    content, reference, seen = path.read_bytes(), table.rows, Counter[str]()

    def read() -> bool:
        rows = TableFile(path).rows
        return rows == reference or rows.items() <= reference.items()

    for trial in trials("cache", 300):
        remove(path)
        path.write_bytes(content)
        if trial.number % 20 == 0:
            mutations.break_file(path, trial.chance)
        else:
            kinds = (mutations.mutate_bytes, mutations.mutate_lines)
            path.write_bytes(trial.chance.choice(kinds)(content, trial.chance))
        seen[outcome(read, trial)] += 1
    assert seen[REFUSED] > seen[EQUAL]


def test_damaged_kernel_tables_are_refused_or_name_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user may edit the table: another kernel of the same ones is no damage."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "quantkit" / autotune._TABLE
    path.parent.mkdir(parents=True)
    rows = {str(tokens): "bcq_int8_gemv" for tokens in autotune.TOKEN_CLASSES}
    content = json.dumps({"A GPU, kernels 01234567": {"q4-s128-n12-k12": rows, "q3-s64-n12-k12": rows}}).encode()

    def read() -> bool:
        autotune.read_table_again()
        tables = [table for classes in autotune._table().values() for table in classes.values()]
        return all(set(table.values()) <= set(SOURCES) for table in tables)

    for trial in trials("kernel table", 100):
        remove(path)
        path.write_bytes(content)
        if trial.number % 20 == 0:
            mutations.break_file(path, trial.chance)
        else:
            kinds = (mutations.mutate_bytes, mutations.mutate_json)
            path.write_bytes(trial.chance.choice(kinds)(content, trial.chance))
        outcome(read, trial)
    autotune.read_table_again()


def test_damaged_unfinished_work_is_refused_or_equal(tmp_path: Path) -> None:
    piece, place = begin(tmp_path / "q"), tmp_path / "q"
    whole, folder = tmp_path / "whole", piece.parent
    shutil.copytree(folder, whole)
    reference = load_file(piece)

    def read() -> bool:
        with workspace(place, {"work": 1}, restart=False) as work:
            if not work.finished:
                return True  # the piece is gone: its work is done again
            found = load_file(work.piece(0))
            same = found.keys() == reference.keys() and all(torch.equal(found[name], reference[name]) for name in found)
            return same and work.document(0) == {"layers": {}}

    for trial in trials("unfinished work", 150):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        path = folder / trial.chance.choice(("identity.json", piece.name, piece.name, piece.name))
        content = path.read_bytes()
        if trial.number % 15 == 0:
            mutations.break_file(path, trial.chance)
        elif path.suffix == ".json":
            path.write_bytes(
                trial.chance.choice((mutations.mutate_json, mutations.mutate_bytes))(content, trial.chance)
            )
        else:
            kinds = (mutations.mutate_bytes, mutations.mutate_header, mutations.mutate_payload)
            path.write_bytes(trial.chance.choice(kinds)(content, trial.chance))
        outcome(read, trial)
