"""``quantization_config`` in config.json: which layer is stored in which format.

{"quant_method": "quantkit", "format_version": 1, or 2 where there is a prefix, which older versions would leave out,
 "groups": [{"spec": {"format": "bcq", "weight_bits": 4, "group_size": 128, "offset": true}, "layers": {name: [N, K]}}],
 "ignore": [names of the Linears left in floating point],
 "attention": {name of an attention module: [step of Q, of K, of V]}, absent where attention is floating point,
 "prefix": {"tokens": [ids], "modules": {name of an attention module: [heads, P, D]}}, absent where texts have none,
 "meta": {"quantizer": "quantkit 0.1.0", "recipe": {...}, "calibration": {...} or null}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from hashlib import sha256
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.formats.base import Shape
from quantkit.formats.table import spec_from_json, spec_to_json, stored_bytes
from quantkit.storage.checks import anything, check_document, list_of, map_of, nullable, positive, record, text, whole

QUANT_METHOD = "quantkit"
FORMAT_VERSION = 1
PREFIX_VERSION = 2
PREFIX_FIELDS = ("prefix_key", "prefix_value")  # tensors [heads, P, D] of an attention module
ATTENTION_BITS = 8
_CALIBRATION = record(
    {"texts": list_of(record({"name": text})), "tokens": whole(1), "seq_len": whole(1)},
)
_DOCUMENT = record(
    {
        "groups": list_of(
            record(
                {
                    "spec": map_of(anything),
                    "layers": map_of(list_of(whole(1), least=2, most=2)),
                },
                closed=True,
            ),
            least=1,
        ),
        "ignore": list_of(text),
        "meta": record({}, {"recipe": text, "calibration": nullable(_CALIBRATION)}),
    },
    {
        "quant_method": text,
        "format_version": whole(1),
        "attention": map_of(list_of(positive, least=3, most=3)),
        "prefix": record(
            {
                "tokens": list_of(whole(0), least=1),
                "modules": map_of(list_of(whole(1), least=3, most=3), least=1),
            },
            closed=True,
        ),
    },
    closed=True,
)


@dataclass(frozen=True)
class StoredLayer:
    """One quantized Linear: its format spec and its (N, K)."""

    spec: Any
    shape: Shape


@dataclass(frozen=True)
class AttentionScales:
    """The value of one step of the INT8 codes of Q, K and V of one attention module."""

    query: float
    key: float
    value: float

    def covering(self, other: AttentionScales | None) -> AttentionScales:
        """Scales that reach as far as both."""
        if other is None:
            return self
        return AttentionScales(max(self.query, other.query), max(self.key, other.key), max(self.value, other.value))


@dataclass(frozen=True)
class Prefix:
    """What stands in front of every text: the tokens, and by attention module the shape of its keys and values."""

    tokens: tuple[int, ...]
    modules: Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True)
class CheckpointConfig:
    """layers: by module name. ignore: Linears kept in floating point. meta: provenance.

    attention: by name, the modules that compute in INT8. prefix: what texts stand behind, or None.
    """

    layers: Mapping[str, StoredLayer]
    ignore: tuple[str, ...]
    meta: Mapping[str, Any]
    attention: Mapping[str, AttentionScales] = field(default_factory=dict)
    prefix: Prefix | None = None


def config_to_json(config: CheckpointConfig) -> dict[str, Any]:
    """The document above; layers of equal spec share a group, in order of first appearance."""
    groups: dict[Any, dict[str, list[int]]] = {}
    for name, layer in config.layers.items():
        groups.setdefault(layer.spec, {})[name] = list(layer.shape)
    attention = {name: list(astuple(scales)) for name, scales in config.attention.items()}
    return {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION if config.prefix is None else PREFIX_VERSION,
        "groups": [{"spec": spec_to_json(spec), "layers": layers} for spec, layers in groups.items()],
        "ignore": list(config.ignore),
        **({"attention": attention} if attention else {}),
        **({} if config.prefix is None else {"prefix": _prefix_to_json(config.prefix)}),
        "meta": dict(config.meta),
    }


def config_from_json(document: Mapping[str, Any]) -> CheckpointConfig:
    """Inverse of config_to_json.

    Raises CheckpointError for another quant_method, an unknown format_version or a malformed group.
    """
    if document.get("quant_method") != QUANT_METHOD:
        raise CheckpointError(f"quant_method is {document.get('quant_method')!r}, not {QUANT_METHOD!r}")
    version = document.get("format_version")
    if isinstance(version, bool) or version not in (FORMAT_VERSION, PREFIX_VERSION):
        raise CheckpointError(
            f"format_version is {version!r}; this quantkit reads {FORMAT_VERSION} and {PREFIX_VERSION}: upgrade "
            "quantkit"
        )
    check_document(document, _DOCUMENT, "quantization_config", CheckpointError)
    if (version == PREFIX_VERSION) != ("prefix" in document):
        raise CheckpointError(
            f"quantization_config is malformed: format_version {version} does not say whether it has a prefix"
        )
    layers: dict[str, StoredLayer] = {}
    for group in document["groups"]:
        spec = spec_from_json(group["spec"])
        for name, (rows, columns) in group["layers"].items():
            if name in layers:
                raise CheckpointError(f"quantization_config is malformed: the layer {name} stands in two groups")
            layers[name] = StoredLayer(spec, (rows, columns))
    if not layers:
        raise CheckpointError("quantization_config is malformed: it names no layer")
    attention = {name: AttentionScales(*map(float, own)) for name, own in document.get("attention", {}).items()}
    prefix = None if "prefix" not in document else _prefix_from_json(document["prefix"])
    return CheckpointConfig(layers, tuple(document["ignore"]), document["meta"], attention, prefix)


def _prefix_to_json(prefix: Prefix) -> dict[str, Any]:
    return {"tokens": list(prefix.tokens), "modules": {name: list(shape) for name, shape in prefix.modules.items()}}


def _prefix_from_json(document: Mapping[str, Any]) -> Prefix:
    tokens = tuple(document["tokens"])
    modules = {name: (heads, length, width) for name, (heads, length, width) in document["modules"].items()}
    if any(length != len(tokens) for _, length, _ in modules.values()):
        raise CheckpointError("quantization_config is malformed: its prefix is not as long as its tokens")
    return Prefix(tokens, modules)


def config_digest(document: Mapping[str, Any]) -> str:
    """sha256 of a quantization_config, whatever its layout as text."""
    return sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def bits_per_weight(config: CheckpointConfig) -> float:
    """Stored bits per weight over all quantized layers: codes, scales and offsets; biases are not counted."""
    stored = sum(stored_bytes(layer.spec, layer.shape) for layer in config.layers.values())
    weights = sum(layer.shape[0] * layer.shape[1] for layer in config.layers.values())
    return 8 * stored / weights
