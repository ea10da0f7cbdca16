"""Recipes: everything that decides how a model is quantized, as one YAML file.

schema: 1
method: bcq                                   # a row of METHODS
settings: {weight_bits: 4, group_size: 128}   # that method's settings; unset ones take their defaults
keep: ["lm_head"]                             # modules left in floating point; globs on module names
attention_bits: 8                             # optional: attention in INT8 too (runtime/int8_attention.py)
tune: {epochs: 8}                             # optional: tuning by gradient afterwards (tuning/settings.py)
head_bits: 6                                  # optional: the language-model head too, in 1 to 8 bits (methods.py)
prefix: auto                                  # optional: store the calibration's prefix (runtime/prefix.py)
layers:                                       # exceptions; the first matching glob wins
  - {match: "*.mlp.down_proj", weight_bits: 5}

A recipe may begin from a shipped one, ``base: bcq-w4-g128``, and state only what differs: ``settings`` by key,
everything else whole.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from quantkit.assets import recipe_names, recipe_path
from quantkit.errors import RecipeError
from quantkit.storage.documents import parse_yaml, read_yaml

SCHEMA = 1
_OPTIONS = ("attention_bits", "head_bits", "tune", "prefix")
_KEYS = ("schema", "method", "settings", "keep", *_OPTIONS, "layers")
_ATTENTION_BITS = (None, 8)
_HEAD_BITS = (None, *range(1, 9))
_PREFIXES = (None, "auto")
_BASE = "base"  # of a file alone: what load_recipe gives on has it worked in
_TUNE = "tune."  # begins a setting of that section


@dataclass(frozen=True)
class LayerRule:
    """Settings (and perhaps another method) for the layers whose name matches a glob."""

    match: str
    method: str | None
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Recipe:
    """A recipe as written, overrides applied; names are checked against METHODS when it is resolved.

    tune: settings of the tuning that follows, or None for none.
    head_bits: of the language-model head, whatever ``keep`` names; None leaves it in floating point.
    """

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    keep: tuple[str, ...] = ("lm_head",)
    layers: tuple[LayerRule, ...] = ()
    attention_bits: int | None = None
    tune: Mapping[str, Any] | None = None
    head_bits: int | None = None
    prefix: str | None = None

    def keeps(self, layer: str) -> bool:
        """Whether the layer stays in floating point."""
        return any(fnmatchcase(layer, glob) for glob in self.keep)

    def settings_for(self, layer: str) -> tuple[str, dict[str, Any]]:
        """(method, settings) of one layer: the first matching rule over the recipe's defaults."""
        for rule in self.layers:
            if fnmatchcase(layer, rule.match):
                return self.apply(rule)
        return self.method, dict(self.settings)

    def apply(self, rule: LayerRule) -> tuple[str, dict[str, Any]]:
        """(method, settings) of a layer under a rule; the recipe's settings hold unless the method differs."""
        inherited = self.settings if rule.method in (None, self.method) else {}
        return rule.method or self.method, {**inherited, **rule.settings}

    def to_json(self) -> dict[str, Any]:
        """The recipe as a YAML or JSON document that parse_recipe reads back."""
        rules = [{"match": r.match, **({"method": r.method} if r.method else {}), **r.settings} for r in self.layers]
        options = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        return {
            "schema": SCHEMA,
            "method": self.method,
            "settings": dict(self.settings),
            "keep": list(self.keep),
            **options,
            "layers": rules,
        }


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a mistyped name: the closest known ones, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"


def load_recipe(name_or_file: str, settings: Iterable[str] = ()) -> Recipe:
    """Read a recipe by name (shipped in recipes/) or by path, with ``key=value`` settings instead of its own.

    Raises RecipeError naming the file for anything missing, malformed or unknown.
    """
    path = recipe_path(name_or_file)
    document = _read(path)
    if _BASE in document:
        document = _on_base(document, path)
    return parse_recipe(with_settings(document, settings), name=path.stem, where=str(path))


def _read(path: Path) -> dict[str, Any]:
    document = read_yaml(path, f"recipe {path}", RecipeError)
    if not isinstance(document, dict):
        raise RecipeError(f"recipe {path}: expected a mapping with the keys {', '.join((*_KEYS, _BASE))}")
    return document


def _on_base(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """The document over that of its base, which is shipped and has none itself."""
    name = document[_BASE]
    if name not in recipe_names():
        raise RecipeError(
            f"recipe {path}: base is {name!r}, not a shipped recipe; {nearest(str(name), recipe_names())}"
        )
    base = _read(recipe_path(name))
    if _BASE in base:
        raise RecipeError(f"recipe {path}: base {name} has a base itself; name {base[_BASE]} and state the difference")
    if "method" in document:
        raise RecipeError(f"recipe {path}: base {name} states the method; leave 'method' out")
    own = {key: value for key, value in document.items() if key != _BASE}
    merged = {**base, "schema": None, **own}  # each file states its own schema
    under, over = base.get("settings") or {}, own.get("settings") or {}
    if isinstance(under, dict) and isinstance(over, dict):  # parse_recipe refuses anything else
        merged["settings"] = {**under, **over}
    return merged


def with_settings(document: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """The document with ``key=value``: keys of a recipe stay its own, all others are settings.

    ``tune.key=value`` is a setting of the section tune.
    """
    own = document.get("settings") or {}
    if not isinstance(own, dict):
        return document  # which parse_recipe refuses
    merged = {**document, "settings": dict(own)}
    for given in settings:
        key, separator, text = given.partition("=")
        if not separator or not key:
            raise RecipeError(f"`settings` {given}: expected key=value, for example group_size=64")
        value = parse_yaml(text, f"`settings` {given}", RecipeError)
        if key.startswith(_TUNE):
            tune = merged.get("tune")
            merged["tune"] = {**(tune if isinstance(tune, dict) else {}), key.removeprefix(_TUNE): value}
            continue
        target = merged if key in ("method", "keep", *_OPTIONS) else merged["settings"]
        target[key] = value
    return merged


def parse_recipe(document: Mapping[str, Any], name: str, where: str) -> Recipe:
    """Build a Recipe from a parsed document.

    Raises RecipeError, prefixed by ``where``, for unknown keys or wrong types.
    """
    for key in document:
        if key not in _KEYS:
            raise RecipeError(f"recipe {where}: unknown key {key!r}; {nearest(str(key), _KEYS)}")
    if document.get("schema") != SCHEMA or isinstance(document["schema"], bool):
        raise RecipeError(f"recipe {where}: schema is {document.get('schema')!r}; this version reads schema: {SCHEMA}")
    if not isinstance(document.get("method"), str):
        raise RecipeError(f"recipe {where}: 'method' is missing; name a quantization method")
    settings = document.get("settings") or {}
    keep = document.get("keep", ["lm_head"]) or []
    rules = document.get("layers") or []
    if not isinstance(settings, dict) or not isinstance(keep, list) or not isinstance(rules, list):
        raise RecipeError(f"recipe {where}: 'settings' is a mapping, 'keep' and 'layers' are lists")
    for glob in keep:
        if not isinstance(glob, str):
            raise RecipeError(f"recipe {where}: 'keep' holds {glob!r}; every entry is a glob on module names")
    attention_bits = document.get("attention_bits")
    if attention_bits not in _ATTENTION_BITS or isinstance(attention_bits, float):
        raise RecipeError(f"recipe {where}: attention_bits is {attention_bits!r}; choose 8, or leave it out for none")
    tune = document.get("tune")
    if not isinstance(tune, dict | None):
        raise RecipeError(f"recipe {where}: tune is {tune!r}; it is a mapping, or left out for none")
    head_bits = document.get("head_bits")
    if head_bits not in _HEAD_BITS or isinstance(head_bits, bool | float):
        raise RecipeError(f"recipe {where}: head_bits is {head_bits!r}; choose 1 to 8, or leave it out for none")
    prefix = document.get("prefix")
    if prefix not in _PREFIXES:
        raise RecipeError(f"recipe {where}: prefix is {prefix!r}; choose auto, or leave it out for none")
    if prefix is not None and attention_bits is not None:
        raise RecipeError(
            f"recipe {where}: prefix and attention_bits exclude each other: INT8 attention takes no prefix"
        )
    return Recipe(
        name=name,
        method=document["method"],
        settings=settings,
        keep=tuple(keep),
        layers=tuple(_parse_rule(rule, where) for rule in rules),
        attention_bits=attention_bits,
        tune=tune,
        head_bits=head_bits,
        prefix=prefix,
    )


def _parse_rule(rule: Any, where: str) -> LayerRule:
    if not isinstance(rule, dict) or not isinstance(rule.get("match"), str):
        raise RecipeError(f"recipe {where}: every entry of 'layers' needs a 'match' glob, got {rule!r}")
    if not isinstance(rule.get("method"), str | None):
        raise RecipeError(f"recipe {where}: the method of {rule['match']!r} is {rule['method']!r}, not a name")
    settings = {key: value for key, value in rule.items() if key not in ("match", "method")}
    return LayerRule(match=rule["match"], method=rule.get("method"), settings=settings)
