"""A search with ``rotate``: every error is that of the rotated model, however often a part of it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calibration.artifact import Calibration, load_calibration
from quantkit.methods import LayerPlan
from quantkit.models.families import block_linears
from quantkit.models.loading import load_model, open_stream
from quantkit.models.stream import ModelStream, in_memory_stream
from quantkit.quantizers.bcq.quantizer import BcqSettings
from quantkit.quantizers.rotation import fold_rotation
from quantkit.search.measure import measure_layers
from quantkit.search.rotated import rotate_parts
from quantkit.search.table import ErrorTable, LayerMethod, Option, TableFile, build_table
from tests.cli.calls import refusal

Folders = Callable[[str], Path]
OPTIONS = [Option(2, -1), Option(3, -1)]
SETTINGS: dict[str, Any] = {"rounds": 2, "compensate": False, "rotate": "online"}
FP32_RTOL = 1e-3  # of errors: the rotation's rounding to fp32, in other orders
LEAST = 1e-9  # KL of a tiny model whose weights hardly matter


def _table(stream: ModelStream, calibration: Calibration, path: Path) -> ErrorTable:
    layers = list(block_linears(stream.model))
    method = LayerMethod("bcq", SETTINGS, frozenset(name for name in layers if name.endswith("down_proj")))
    cache = TableFile(path)
    table = build_table(stream, calibration, layers, OPTIONS, method=method, cache=cache)
    measure_layers(stream, calibration, table, OPTIONS, -1, method=method, cache=cache)
    return build_table(stream, calibration, layers, OPTIONS, method=method, cache=cache)


def test_the_table_is_that_of_the_model_rotated_in_memory(
    tiny_model: Folders, calibrated: Folders, tmp_path: Path
) -> None:
    folder, calibration = str(tiny_model("llama")), load_calibration(calibrated("llama"))
    model, _ = load_model(folder, dtype=torch.float32)
    plans = {name: LayerPlan("bcq", BcqSettings(**SETTINGS)) for name in block_linears(model)}
    changed = fold_rotation(model, plans, calibration).stats
    known = replace(calibration, layers={**calibration.layers, **changed})
    expected = _table(in_memory_stream(model), known, tmp_path / "expected.jsonl")
    stream, _ = open_stream(folder, dtype=torch.float32)
    rotated = rotate_parts(stream, calibration, values=True)
    assert {name for name, own in rotated.layers.items() if own is not calibration.layers[name]} == set(changed)
    found = _table(stream, rotated, tmp_path / "found.jsonl")
    plain = _table(open_stream(folder, dtype=torch.float32)[0], calibration, tmp_path / "plain.jsonl")
    for key, entry in expected.entries.items():
        own = found.entries[key]
        assert own.spec.rotate_inputs is key[0].endswith("down_proj")
        assert (own.output_error, own.estimate) == pytest.approx((entry.output_error, entry.estimate), rel=FP32_RTOL)
        assert own.measured == pytest.approx(entry.measured, rel=FP32_RTOL, abs=LEAST)
    moved = [abs(plain.entries[key].output_error / entry.output_error - 1) for key, entry in expected.entries.items()]
    assert max(moved) > 10 * FP32_RTOL


def test_other_families_are_refused_before_the_search(
    tiny_model: Folders, calibrated: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for rotate in ("true", "online"):
        arguments = ("--calibration", calibrated("opt"), "--max-bpw", "3", "--set", f"rotate={rotate}")
        said = refusal("search", tiny_model("opt"), *arguments, "-o", tmp_path / "plan.yaml")
        assert "OPTForCausalLM; set rotate=false" in said
