from __future__ import annotations

from typing import Any

import pytest

from quantkit.checkpoint.config import CheckpointConfig, StoredLayer, bits_per_weight, config_from_json, config_to_json
from quantkit.errors import CheckpointError
from quantkit.formats.bcq import BcqSpec

SPEC = {"format": "bcq", "weight_bits": 4, "group_size": 128, "offset": True}
CONFIG = CheckpointConfig(
    layers={
        "a": StoredLayer(BcqSpec(4, 128, True), (64, 128)),
        "b": StoredLayer(BcqSpec(2, 64, False), (32, 128)),
        "c": StoredLayer(BcqSpec(4, 128, True), (8, 128)),
    },
    ignore=("lm_head",),
    meta={"quantizer": "quantkit 0.1.0"},
)


def test_config_survives_json_and_equal_specs_share_a_group() -> None:
    document = config_to_json(CONFIG)
    assert [list(group["layers"]) for group in document["groups"]] == [["a", "c"], ["b"]]
    assert config_from_json(document) == CONFIG


def test_bits_per_weight_weighs_layers_by_their_size() -> None:
    # a and c: 4 (1 + 16/128) + 16/128 = 4.625; b: 2 (1 + 16/64) = 2.5
    weights = {"a": 64 * 128, "b": 32 * 128, "c": 8 * 128}
    expected = (4.625 * (weights["a"] + weights["c"]) + 2.5 * weights["b"]) / sum(weights.values())
    assert bits_per_weight(CONFIG) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "not 'quantkit'"),
        ({"format_version": 3}, "upgrade quantkit"),
        ({"groups": [{"layers": {}}]}, "malformed"),
        ({"groups": [{"spec": {"format": "bcq"}, "layers": {"a": [1, 2]}}]}, "bcq"),
        ({"ignore": None}, "malformed"),
        ({"ignore": "lm_head"}, "malformed"),
        ({"format_version": True}, "format_version is True"),
        ({"format_version": "1"}, "format_version is '1'"),
        ({"groups": []}, "malformed"),
        ({"groups": [{"spec": SPEC, "layers": {}}]}, "names no layer"),
        ({"groups": [{"spec": SPEC, "layers": {"a": [64, True]}}]}, "malformed"),
        ({"groups": [{"spec": SPEC, "layers": {"a": [64, -128]}}]}, "malformed"),
        ({"groups": [{"spec": SPEC, "layers": {"a": [64]}}]}, "malformed"),
        ({"groups": [{"spec": SPEC, "layers": {"a": [64, 128]}}] * 2}, "stands in two groups"),
        ({"groups": [{"spec": {**SPEC, "weight_bits": True}, "layers": {"a": [64, 128]}}]}, "weight_bits is True"),
        ({"attention": {"a": [1.0, float("nan"), 1.0]}}, "malformed"),
        ({"attention": {"a": [1.0, 0.0, 1.0]}}, "malformed"),
        ({"attention": {"a": [1.0, 1.0]}}, "malformed"),
        ({"meta": None}, "malformed"),
        ({"unheard_of": 1}, "unknown key 'unheard_of'"),
    ],
    ids=[
        *("method", "version", "no-spec", "empty-spec", "ignore", "ignore-text", "version-bool", "version-text"),
        *("no-groups", "no-layers", "shape-bool", "shape-negative", "shape-short", "layer-twice", "bits-bool"),
        *("attention-nan", "attention-zero", "attention-short", "meta", "unknown-key"),
    ],
)
def test_malformed_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_from_json({**config_to_json(CONFIG), **change})
