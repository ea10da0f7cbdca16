"""The calibration artifact: one safetensors file that serves every method, names its origin and can be merged."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from quantkit.errors import CalibrationError
from quantkit.models.loading import fingerprint
from quantkit.stats import HISTOGRAM_BINS, SAMPLE_ROWS, LayerStats

SCHEMA = 1
_FIELDS = ("absmax", "mean_abs", "mean_square", "histogram", "sample")
_MERGE_SEED = 0


@dataclass(frozen=True)
class TextSource:
    """One text that was calibrated on: its name and sha256, and the windows drawn from it with a seed."""

    name: str
    sha256: str
    seed: int
    windows: int


@dataclass(frozen=True)
class CalibrationMeta:
    """Where a calibration comes from.

    model: the name it was made under; fingerprint: what decides whether it belongs to a model.
    quantkit: version of the program that collected it.
    """

    model: str
    fingerprint: str
    texts: tuple[TextSource, ...]
    seq_len: int
    quantkit: str

    @property
    def tokens(self) -> int:
        """Tokens seen by every layer."""
        return self.seq_len * sum(text.windows for text in self.texts)

    def to_json(self) -> dict[str, Any]:
        """The record as plain data: what a quantized checkpoint repeats about its calibration."""
        return {**asdict(self), "tokens": self.tokens}


@dataclass(frozen=True)
class Calibration:
    """Statistics of every Linear in the decoder blocks by module name, and the token windows they were taken on.

    layers: Linears that share an input hold the very same LayerStats; the file stores it once.
    windows: [n, seq_len] int32 token ids, for methods that stream Hessians through the model.
    """

    layers: dict[str, LayerStats]
    windows: Tensor
    meta: CalibrationMeta


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write the artifact in one step: the file is complete or absent.

    Raises CalibrationError where the folder cannot be written.
    """
    owners: dict[int, str] = {}
    aliases = {name: owners.setdefault(id(stats), name) for name, stats in calibration.layers.items()}
    tensors = {"windows": calibration.windows.to(torch.int32).contiguous()}
    for name in owners.values():
        tensors |= {f"{name}:{field}": getattr(calibration.layers[name], field).contiguous() for field in _FIELDS}
    document = {"schema": SCHEMA, "aliases": aliases, "meta": asdict(calibration.meta)}
    path = path.absolute()
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
            draft = Path(scratch) / path.name
            save_file(tensors, draft, metadata={"quantkit.calibration": json.dumps(document)})
            draft.replace(path)
    except OSError as error:
        raise CalibrationError(f"calibration {path}: cannot be written ({error.strerror or error})") from error


def load_calibration(path: Path) -> Calibration:
    """Read an artifact back.

    Raises CalibrationError for a missing, damaged or foreign file, an unknown schema, missing or mis-shaped tensors.
    """
    try:
        with safe_open(path, framework="pt") as file:
            document = _parse_document(path, file.metadata() or {})
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CalibrationError(f"calibration {path}: cannot be read ({error})") from error
    try:
        texts = tuple(TextSource(**text) for text in document["meta"].pop("texts"))
        meta = CalibrationMeta(texts=texts, **document["meta"])
        aliases: dict[str, str] = document["aliases"]
        stats = {name: _read_stats(name, tensors, meta.tokens) for name in dict.fromkeys(aliases.values())}
        calibration = Calibration({name: stats[owner] for name, owner in aliases.items()}, tensors["windows"], meta)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CalibrationError(
            f"calibration {path}: damaged, {error} is missing or malformed; collect it anew"
        ) from error
    except ValueError as error:
        raise CalibrationError(f"calibration {path}: damaged, {error}; collect it anew") from error
    if calibration.windows.shape != (meta.tokens // meta.seq_len, meta.seq_len):
        raise CalibrationError(f"calibration {path}: damaged, windows are {tuple(calibration.windows.shape)}")
    return calibration


def check_model(calibration: Calibration, model: nn.Module) -> None:
    """Raise CalibrationError unless the artifact was collected on exactly this model."""
    if fingerprint(model) != calibration.meta.fingerprint:
        name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
        raise CalibrationError(
            f"calibration was made for another model ({calibration.meta.model}) than {name}; "
            "run quantkit calibrate on this one"
        )


def merge(first: Calibration, second: Calibration) -> Calibration:
    """The calibration of both texts together, as if collected in one run.

    Maxima, sums and histograms are exact (to fp32 rounding of the means); the sample is drawn from both samples
    in proportion to their tokens. Raises CalibrationError for different models or window lengths, or for an
    artifact merged with windows that it already holds.
    """
    a, b = first.meta, second.meta
    if a.fingerprint != b.fingerprint or first.layers.keys() != second.layers.keys():
        raise CalibrationError(f"merge: made for different models ({a.model} and {b.model})")
    if a.seq_len != b.seq_len:
        raise CalibrationError(f"merge: windows of {a.seq_len} and of {b.seq_len} tokens; use one `seq_len` for both")
    rows = [{tuple(row) for row in windows.tolist()} for windows in (first.windows, second.windows)]
    if rows[0] <= rows[1] or rows[1] <= rows[0]:
        raise CalibrationError("merge: one artifact holds all windows of the other; they would be counted twice")
    merged: dict[int, LayerStats] = {}
    layers = {}
    for name, stats in first.layers.items():
        if id(stats) not in merged:
            merged[id(stats)] = _merge_stats(stats, second.layers[name])
        layers[name] = merged[id(stats)]
    meta = CalibrationMeta(a.model, a.fingerprint, a.texts + b.texts, a.seq_len, a.quantkit)
    return Calibration(layers, torch.cat([first.windows, second.windows]), meta)


def _parse_document(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    if "quantkit.calibration" not in metadata:
        raise CalibrationError(f"calibration {path}: not a calibration artifact; make one with quantkit calibrate")
    try:
        document = json.loads(metadata["quantkit.calibration"])
        schema = document.get("schema")
    except (ValueError, AttributeError) as error:
        raise CalibrationError(f"calibration {path}: damaged metadata ({error})") from error
    if schema != SCHEMA:
        raise CalibrationError(f"calibration {path}: schema {schema!r}; this version reads {SCHEMA}, collect it anew")
    return document


def _read_stats(name: str, tensors: dict[str, Tensor], tokens: int) -> LayerStats:
    found = {field: tensors[f"{name}:{field}"] for field in _FIELDS}
    columns = found["absmax"].shape[0]
    rows = min(SAMPLE_ROWS, tokens)
    shapes = dict.fromkeys(_FIELDS, (columns,)) | {"histogram": (HISTOGRAM_BINS,), "sample": (rows, columns)}
    for field, tensor in found.items():
        if tuple(tensor.shape) != shapes[field]:
            raise ValueError(f"{name}:{field} is {tuple(tensor.shape)} instead of {shapes[field]}")
    return LayerStats(**found, tokens=tokens)


def _merge_stats(a: LayerStats, b: LayerStats) -> LayerStats:
    tokens = a.tokens + b.tokens

    def mean(x: Tensor, y: Tensor) -> Tensor:
        return ((x.double() * a.tokens + y.double() * b.tokens) / tokens).float()

    return LayerStats(
        absmax=torch.maximum(a.absmax, b.absmax),
        mean_abs=mean(a.mean_abs, b.mean_abs),
        mean_square=mean(a.mean_square, b.mean_square),
        histogram=a.histogram + b.histogram,
        sample=_merge_samples(a, b),
        tokens=tokens,
    )


def _merge_samples(a: LayerStats, b: LayerStats) -> Tensor:
    """Rows of both samples in proportion to their tokens; a fixed seed keeps the choice the same in every layer."""
    rows = min(SAMPLE_ROWS, a.tokens + b.tokens)
    share = round(rows * a.tokens / (a.tokens + b.tokens))
    share = min(max(share, rows - b.sample.shape[0]), a.sample.shape[0])
    generator = torch.Generator().manual_seed(_MERGE_SEED)
    chosen = torch.randperm(a.sample.shape[0], generator=generator)[:share]
    others = torch.randperm(b.sample.shape[0], generator=generator)[: rows - share]
    return torch.cat([a.sample[chosen], b.sample[others]])
