"""The error table: what every (q, g) costs every layer in size and in predictions, cached as it grows.

Method trellis has one group per row, and taps for each q: the most that there is a filter for.

An entry is made by the method's own quantizer on the real weight. Entries are appended to a JSON-lines file in the
user's cache, so an interrupted search goes on where it stopped and another budget takes seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quantkit
from quantkit.assets import cache_folder
from quantkit.calibration.artifact import Calibration
from quantkit.errors import OutputError, RecipeError, StatsError, refusing
from quantkit.formats.base import PackedWeight, Shape
from quantkit.formats.table import dequantize, spec_from_json, spec_to_json, stored_bytes
from quantkit.methods import METHODS
from quantkit.models.experts import expert_linears
from quantkit.models.families import block_linears, linear_shape, linear_weight
from quantkit.models.hessians import Weighing, block_hessians
from quantkit.models.stream import ModelStream
from quantkit.models.streaming import advance, capture_inputs
from quantkit.progress import track
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.trellis.filters import FILTERS
from quantkit.search.sensitivity import output_sensitivity, quadratic_error
from quantkit.storage.checks import Fields, anything, check_document, map_of, number, record, text, whole
from quantkit.storage.documents import parse_json
from quantkit.storage.place import check_file
from quantkit.storage.resume import passing_workspace

SCHEMA = 2
ROW_WISE = -1
CHOSEN = ("weight_bits", "group_size", "taps")
"""Settings of methods that an option decides, of those that a method has."""
_WIDTHS, _GROUPS = (2, 3, 4, 5), (32, 64, 128, 256, ROW_WISE)
_OTHER_CACHE = "set XDG_CACHE_HOME to a folder that can be written"
_PLACE: Fields = {"kind": text, "layer": text, "bits": whole(1), "group": whole(ROW_WISE)}
_ENTRY = record({**_PLACE, "spec": map_of(anything), "estimate": number, "output_error": number}, closed=True)
_MEASURED = record({**_PLACE, "kl": number}, closed=True)


@dataclass(frozen=True, order=True)
class Option:
    """weight_bits: q. group_size: g; -1 is one group per row."""

    weight_bits: int
    group_size: int

    def fitted(self, shape: Shape) -> Option:
        """The same choice for an [N, K] weight: groups as wide as the row, or wider, are the row."""
        return replace(self, group_size=ROW_WISE) if self.group_size >= shape[1] else self


@dataclass(frozen=True)
class LayerMethod:
    """A row of METHODS and its settings, weight_bits and group_size left open.

    rotated: the layers whose inputs are rotated as the model runs.
    """

    name: str
    settings: Mapping[str, Any]
    rotated: frozenset[str] = frozenset()

    def quantize(self, layer: LayerInput, option: Option) -> PackedWeight:
        """The layer under an option, by the method's own quantizer."""
        row, own = METHODS[self.name], {**self.settings, **option_settings(self.name, option)}
        if layer.name in self.rotated:
            own["rotate_inputs"] = True
        return row.quantize(layer, row.settings(**own))


@dataclass(frozen=True)
class Entry:
    """One layer under one option.

    spec: how it is stored. stored: bytes of its tensors. estimate: KL it causes, nats per token, by sensitivity.
    output_error: E||dy||^2 / E||y||^2 on the calibration text.
    measured: KL of the whole model with only this layer quantized, where it was measured.
    """

    spec: Any
    stored: int
    estimate: float
    output_error: float
    measured: float | None = None


@dataclass(frozen=True)
class ErrorTable:
    """shapes: (N, K) by layer, in the model's order. entries: by layer and fitted option."""

    shapes: Mapping[str, Shape]
    entries: Mapping[tuple[str, Option], Entry]

    def get(self, layer: str, option: Option) -> Entry:
        """The entry of a layer under an option, which need not be fitted to its width."""
        return self.entries[layer, option.fitted(self.shapes[layer])]


class TableFile:
    """The cache of one table: JSON lines, one per quantized (layer, option) or measurement, flushed at once.

    Every line ends with a checksum of itself. Raises RecipeError, naming file and line, for a line that is not what was
    written; a last one that an interruption tore is dropped. Raises OutputError where the cache cannot be written.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[tuple[str, str, Option], dict[str, Any]] = {}
        with refusing(f"cache {path} cannot be written", OutputError, _OTHER_CACHE):
            path.parent.mkdir(parents=True, exist_ok=True)
            check_file(path, "cache", replace=True)
            lines = _whole_lines(path) if path.exists() else []
        for index, line in enumerate(lines, start=1):
            self._index(_read_row(line, f"cache {path}: line {index}"))

    def add(self, kind: str, layer: str, option: Option, **numbers: Any) -> None:
        """Keep the numbers of a layer under an option; kind: "entry" or "measured".

        Raises StatsError for NaN and Inf.
        """
        row = {"kind": kind, "layer": layer, "bits": option.weight_bits, "group": option.group_size, **numbers}
        with refusing(f"{layer}: what {option} costs is NaN or Inf", StatsError):
            line = json.dumps(row, allow_nan=False)
        with (
            refusing(f"cache {self.path} cannot be written", OutputError, _OTHER_CACHE),
            self.path.open("a", encoding="utf-8") as file,
        ):
            file.write(f"{line}\t{_checksum(line)}\n")
        self._index(row)

    def _index(self, row: dict[str, Any]) -> None:
        self.rows[row["kind"], row["layer"], Option(row["bits"], row["group"])] = row


def _whole_lines(path: Path) -> list[bytes]:
    """The lines of a cache; a last one without an end, torn by an interruption, is cut off the file."""
    if not path.is_file():
        raise ValueError("it is no regular file")
    with path.open("r+b") as file:
        *lines, torn = file.read().split(b"\n")
        if torn:
            file.truncate(sum(map(len, lines)) + len(lines))
    return lines


def _read_row(line: bytes, what: str) -> dict[str, Any]:
    hint = "remove the file, and the search fills it again"
    with refusing(f"{what} cannot be read", RecipeError, hint):
        document, _, checksum = line.decode().rpartition("\t")
        if checksum != _checksum(document):
            raise ValueError("its checksum differs")
    row = parse_json(document, what, RecipeError)
    check_document(
        row, _MEASURED if isinstance(row, dict) and row.get("kind") == "measured" else _ENTRY, what, RecipeError, hint
    )
    return dict(row)


def _checksum(document: str) -> str:
    return hashlib.sha256(document.encode()).hexdigest()[:16]


def table_path(calibration: Calibration, method: LayerMethod) -> Path:
    """Where the table of a model, its calibration and a method is cached; the name holds the code that fills it."""
    digest = hashlib.sha256(calibration.windows.to(torch.int32).contiguous().numpy().tobytes())
    for file in _solver_files():
        digest.update(file.read_bytes())
    key = [SCHEMA, quantkit.__version__, calibration.meta.fingerprint, method.name, sorted(method.settings.items())]
    digest.update(json.dumps(key).encode())
    return cache_folder() / "search" / f"{digest.hexdigest()[:32]}.jsonl"


def _solver_files() -> list[Path]:
    """The quantizers, formats and this package's estimates: their defaults and results are the table's."""
    root = Path(__file__).parents[1]
    own = (path for folder in ("formats", "quantizers", "search") for path in (root / folder).rglob("*.py"))
    return sorted([*own, root / "models" / "gradients.py"])


def check_method(method: str) -> None:
    """Raise RecipeError unless each layer of the method, if there is such, can be quantized alone, by weight_bits."""
    known = _settings_of(method)
    if method in METHODS and ("act_bits" in known or "weight_bits" not in known):
        raise RecipeError(
            f"search chooses weight_bits and group_size per layer, which method {method} has not; use bcq"
        )


def options_of(method: str, widths: Sequence[int] | None, groups: Sequence[int] | None) -> list[Option]:
    """Every width with every group size; None: those that a method, which may be an unknown one, is searched for.

    Raises RecipeError for groups of a method that has none.
    """
    known = _settings_of(method)
    own_groups: Sequence[int] = groups or _GROUPS
    if "taps" in known:
        if groups is not None and tuple(groups) != (ROW_WISE,):
            raise RecipeError(f"method {method} has no groups: leave them out, or give {ROW_WISE}, the row, alone")
        widths, own_groups = widths or sorted({bits for bits, _ in FILTERS}), (ROW_WISE,)
    return [Option(width, size) for width in widths or _WIDTHS for size in own_groups]


def option_settings(method: str, option: Option) -> dict[str, int]:
    """The option as settings of a method. Raises RecipeError for a width that the method has no filter for."""
    if "taps" not in _settings_of(method):
        return asdict(option)
    weight_bits, taps = METHODS[method].settings(weight_bits=option.weight_bits).shape
    return {"weight_bits": weight_bits, "taps": taps}


def _settings_of(method: str) -> Container[str]:
    return METHODS[method].settings.__dataclass_fields__ if method in METHODS else ()


def build_table(
    stream: ModelStream,
    calibration: Calibration,
    layers: Sequence[str],
    options: Sequence[Option],
    *,
    method: LayerMethod,
    cache: TableFile,
) -> ErrorTable:
    """Every option of every layer, from the cache or by quantizing; the model is left as it was.

    One block is in memory at a time. Raises RecipeError for an option that the method refuses.
    """
    linears = block_linears(stream.model)
    shapes = {name: linear_shape(linears[name]) for name in layers}
    wanted = {name: sorted({option.fitted(shapes[name]) for option in options}) for name in layers}
    missing = {
        name: [option for option in own if ("entry", name, option) not in cache.rows] for name, own in wanted.items()
    }
    missing = {name: own for name, own in missing.items() if own}
    if missing:
        gains = output_sensitivity(stream, {name: linears[name] for name in missing}, calibration.windows)
        work = (
            (layer, option)
            for _, _, layers_of_block in blocks_with_hessians(stream, calibration, missing)
            for layer in layers_of_block
            for option in sorted(missing[layer.name], key=_by_group)
        )
        for layer, option in track(work, "error table", total=sum(map(len, missing.values()))):
            packed = method.quantize(layer, option)
            cache.add("entry", layer.name, option, **_numbers(layer, packed, gains[layer.name]))
    entries = {
        (name, option): _entry(cache, name, option, shapes[name]) for name, own in wanted.items() for option in own
    }
    return ErrorTable(shapes, entries)


def _by_group(option: Option) -> tuple[int, int]:
    """All widths of one group size in a row: compensation keeps the factor of their Hessian in between."""
    return option.group_size, option.weight_bits


def blocks_with_hessians(
    stream: ModelStream, calibration: Calibration, work: Mapping[str, Sequence[Option]]
) -> Iterator[tuple[int, nn.Module, list[LayerInput]]]:
    """(index, block, its layers that the work names) of block after block, in memory, up to the last with work.

    The Hessians are those of the unquantized model.
    """
    linears, experts = block_linears(stream.model), expert_linears(stream.model)
    owners = {stream.owner(name) for name in work}
    last = max(index for index, (prefix, _) in enumerate(stream.blocks) if prefix in owners)
    with passing_workspace({}) as room:
        inputs = capture_inputs(stream, calibration.windows, room=partial(room.state, 0))
        for index in range(last + 1):
            with stream.block(index) as block:
                own = {name: linears[name] for name in work if stream.owner(name) == stream.blocks[index][0]}
                hessians = block_hessians(block, inputs, index, own, Weighing(experts=experts)) if own else {}
                yield index, block, [_layer_input(name, own[name], calibration, hessians[name]) for name in own]
                del hessians
                if index < last:
                    inputs = advance(block, inputs, index)


def _layer_input(name: str, module: nn.Module, calibration: Calibration, hessian: Tensor) -> LayerInput:
    weight = linear_weight(module).detach().float().contiguous().clone()
    return LayerInput(name, weight, calibration.stats_of(name), hessian)


def _numbers(layer: LayerInput, packed: PackedWeight, gain: Tensor) -> dict[str, Any]:
    assert layer.hessian is not None
    error = quadratic_error(dequantize(packed) - layer.weight, layer.hessian).cpu()
    signal = float(quadratic_error(layer.weight, layer.hessian).sum())
    return {
        "spec": spec_to_json(packed.spec),
        "estimate": float((gain * error).sum()) / 2,
        "output_error": float(error.sum()) / signal if signal else 0.0,
    }


def _entry(cache: TableFile, name: str, option: Option, shape: Shape) -> Entry:
    row = cache.rows["entry", name, option]
    spec = spec_from_json(row["spec"])
    measured = cache.rows.get(("measured", name, option), {}).get("kl")
    return Entry(spec, stored_bytes(spec, shape), row["estimate"], row["output_error"], measured)
