"""The calibration artifact: one safetensors file that serves every method, names its origin and can be merged."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from quantkit.errors import CalibrationError, OutputError, refusing
from quantkit.models.families import block_linears, linear_shape
from quantkit.models.loading import fingerprint
from quantkit.stats import HISTOGRAM_BINS, SAMPLE_ROWS, LayerStats
from quantkit.storage.checks import anything, check_document, list_of, map_of, record, text, whole
from quantkit.storage.documents import parse_json
from quantkit.storage.output import output_file
from quantkit.storage.tensors import DTYPES, TensorFile, Verification, read_header, verifies, write_tensors

SCHEMA = 2
_DOCUMENT_KEY = "quantkit.calibration"
STATS_FIELDS = ("absmax", "mean_abs", "mean_square", "histogram", "sample", "vocabulary_absmax")
_STORED_FIELDS = {1: STATS_FIELDS[:-1], SCHEMA: STATS_FIELDS}  # by schema
_SIGNED = ("sample",)  # the others are magnitudes and counts
_MERGE_SEED = 0
_TEXT = record({"name": text, "sha256": text, "seed": whole(0), "windows": whole(1)}, closed=True)
_META = {"model": text, "fingerprint": text, "texts": list_of(_TEXT, least=1), "seq_len": whole(1), "quantkit": text}
_OPTIONAL_META = {"prefix": list_of(whole(0)), "saliency": whole(1)}
_DOCUMENT = record(
    {"schema": anything, "aliases": map_of(text, least=1), "meta": record(_META, _OPTIONAL_META, closed=True)},
    {"tokens": map_of(whole(0))},
    closed=True,
)
_SALIENCY = "saliency"
_DAMAGED = "damaged; collect it anew"


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
    quantkit: version of the program that collected it. prefix: tokens that stood in front of every window, which the
        statistics do not count; empty where they were looked for and none helps, None as a rule. saliency: groups of
        output channels per Linear whose squared gradients are kept; 0 for none.
    """

    model: str
    fingerprint: str
    texts: tuple[TextSource, ...]
    seq_len: int
    quantkit: str
    prefix: tuple[int, ...] | None = None
    saliency: int = 0

    @property
    def tokens(self) -> int:
        """Tokens seen by every layer, other than those of experts."""
        return self.seq_len * sum(text.windows for text in self.texts)

    def to_json(self) -> dict[str, Any]:
        """The record as plain data: what a quantized checkpoint repeats about its calibration."""
        return {**self.document(), "tokens": self.tokens}

    def document(self) -> dict[str, Any]:
        """The same as the artifact holds it."""
        return {
            name: value for name, value in asdict(self).items() if name not in _OPTIONAL_META or value not in (None, 0)
        }


@dataclass(frozen=True)
class Calibration:
    """Statistics of every Linear in the decoder blocks by module name, and the token windows they were taken on.

    layers: Linears that share an input hold the very same LayerStats; the file stores it once. Those of experts are of
        the tokens that were routed to them, which the file states.
    windows: [n, seq_len] int32 token ids, for methods that stream Hessians through the model.
    saliency: per Linear [n * seq_len, meta.saliency] bf16, mean squared gradient of the end loss over each group of
        output channels (calibration/saliency.py); empty where none was asked for.
    """

    layers: dict[str, LayerStats]
    windows: Tensor
    meta: CalibrationMeta
    saliency: Mapping[str, Tensor] = field(default_factory=dict)

    def stats_of(self, name: str) -> LayerStats:
        """What to quantize a Linear by.

        The mean squares of an expert are tempered. One that no token was routed to takes ranges and sample of the
        other experts of its block: its own channels may then count alike, but its inputs must fit somewhere.
        """
        stats = self.layers[name]
        if stats.tokens == self.meta.tokens:
            return stats
        if not stats.tokens:
            block, _, linear = name.rpartition(".")
            ours = re.compile(rf"{re.escape(block.rpartition('.')[0])}\.\d+\.{re.escape(linear)}")
            for other in (own for key, own in self.layers.items() if ours.fullmatch(key) and own.tokens):
                stats = _merge_stats(stats, other)
            stats = replace(stats, tokens=0)
        return stats.tempered()


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write the artifact in one step, over one that stands there.

    Raises OutputError where it cannot be written.
    """
    with output_file(path, "calibration", replace=True) as work:
        write_calibration(calibration, work, f"calibration {path}")


def write_calibration(calibration: Calibration, path: Path, what: str) -> None:
    """Write the artifact to a path of ``output_file``. Raises OutputError that begins with ``what``."""
    owners: dict[int, str] = {}
    aliases = {name: owners.setdefault(id(stats), name) for name, stats in calibration.layers.items()}
    tensors = {"windows": calibration.windows.to(torch.int32)}
    for name in owners.values():
        tensors |= {f"{name}:{field}": getattr(calibration.layers[name], field) for field in STATS_FIELDS}
    tensors |= {f"{name}:{_SALIENCY}": tensor for name, tensor in calibration.saliency.items()}
    routed = {name: calibration.layers[name].tokens for name in owners.values()}
    routed = {name: tokens for name, tokens in routed.items() if tokens != calibration.meta.tokens}
    document = {"schema": SCHEMA, "aliases": aliases, "meta": calibration.meta.document()}
    document |= {"tokens": routed} if routed else {}
    with refusing(f"{what} cannot be written", OutputError):
        write_tensors(path, tensors, {_DOCUMENT_KEY: json.dumps(document)})


def load_calibration(path: Path) -> Calibration:
    """Read an artifact back.

    Raises CalibrationError for a missing, damaged or foreign file, an unknown schema, tensors that are missing, not
    known, of the wrong shape or dtype, or hold what no calibration gives.
    """
    what = f"calibration {path}"
    file = read_header(path, what, CalibrationError)
    document = _document(what, file)
    meta = document["meta"]
    texts = tuple(TextSource(**text) for text in meta["texts"])
    about = CalibrationMeta(
        meta["model"],
        meta["fingerprint"],
        texts,
        meta["seq_len"],
        meta["quantkit"],
        tuple(meta["prefix"]) if "prefix" in meta else None,
        meta.get("saliency", 0),
    )
    aliases: dict[str, str] = document["aliases"]
    tokens = dict.fromkeys(aliases.values(), about.tokens) | document.get("tokens", {})
    fields = _STORED_FIELDS[document["schema"]]
    weighed = list(aliases) if about.saliency else []
    _check_tensors(what, file, tokens, about, fields, weighed)
    verification = Verification([file], CalibrationError) if verifies() else None
    with refusing(f"{what} cannot be read", CalibrationError):
        tensors = load_file(path)
    if verification is not None:
        verification.finish()
    stats = {name: _read_stats(what, name, tensors, tokens[name], fields) for name in dict.fromkeys(aliases.values())}
    _check_values(what, "windows", tensors["windows"], signed=False)
    saliency = {name: tensors[f"{name}:{_SALIENCY}"] for name in weighed}
    for name, values in saliency.items():
        _check_values(what, f"{name}:{_SALIENCY}", values, signed=False)
    return Calibration({name: stats[owner] for name, owner in aliases.items()}, tensors["windows"], about, saliency)


def check_model(calibration: Calibration, model: Any, known: str | None = None) -> None:
    """Raise CalibrationError unless the artifact was collected on exactly this model.

    known: the model's fingerprint, where it has been taken already.
    """
    if (known or fingerprint(model)) != calibration.meta.fingerprint:
        name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
        raise CalibrationError(
            f"calibration was made for another model ({calibration.meta.model}) than {name}; "
            "run quantkit calibrate on this one"
        )
    vocabulary, largest = model.get_input_embeddings().weight.shape[0], int(calibration.windows.max())
    if largest >= vocabulary:
        raise CalibrationError(f"calibration: {_DAMAGED}; it holds the token {largest} of a vocabulary of {vocabulary}")
    for name, module in block_linears(model).items():
        stats = calibration.layers.get(name)
        if stats is not None and len(stats.absmax) != linear_shape(module)[1]:
            raise CalibrationError(f"calibration: {_DAMAGED}; {name} has {linear_shape(module)[1]} input channels")


def merge(first: Calibration, second: Calibration) -> Calibration:
    """The calibration of both texts together, as if collected in one run.

    Maxima, sums and histograms are exact (to fp32 rounding of the means); the sample is drawn from both samples
    in proportion to their tokens. Raises CalibrationError for different models or window lengths, or for an
    artifact merged with windows that it already holds.
    """
    a, b = first.meta, second.meta
    if a.fingerprint != b.fingerprint or first.layers.keys() != second.layers.keys():
        raise CalibrationError(f"merge: made for different models ({a.model} and {b.model})")
    if a.prefix != b.prefix:
        raise CalibrationError("merge: collected behind different prefixes")
    if a.saliency != b.saliency:
        raise CalibrationError(f"merge: `saliency` of {a.saliency} and of {b.saliency} groups; use one for both")
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
    meta = replace(a, texts=a.texts + b.texts)
    saliency = {name: torch.cat([own, second.saliency[name]]) for name, own in first.saliency.items()}
    return Calibration(layers, torch.cat([first.windows, second.windows]), meta, saliency)


def _document(what: str, file: TensorFile) -> dict[str, Any]:
    if _DOCUMENT_KEY not in file.metadata:
        raise CalibrationError(f"{what}: not a calibration artifact; make one with quantkit calibrate")
    document: Any = parse_json(file.metadata[_DOCUMENT_KEY], f"{what}: its metadata", CalibrationError)
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema not in tuple(_STORED_FIELDS) or isinstance(schema, bool):
        raise CalibrationError(f"{what}: schema {schema!r}; this version reads up to {SCHEMA}, collect it anew")
    check_document(document, _DOCUMENT, f"{what}: its metadata", CalibrationError)
    return dict(document)


def _check_tensors(
    what: str,
    file: TensorFile,
    tokens: Mapping[str, int],
    meta: CalibrationMeta,
    fields: Sequence[str],
    weighed: Sequence[str],
) -> None:
    """Names, shapes and dtypes of all tensors, from the header.

    tokens: that each statistics' name says it is of. weighed: Linears with saliency.
    """
    stored, windows = file.tensors, meta.tokens // meta.seq_len
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"windows": (torch.int32, (windows, meta.seq_len))}
    for name, count in tokens.items():
        if count > meta.tokens:
            raise CalibrationError(f"{what}: {_DAMAGED}; {name} is of {count} tokens of {meta.tokens}")
        rows = min(SAMPLE_ROWS, count)
        shape = stored[f"{name}:absmax"].shape if f"{name}:absmax" in stored else ()
        columns = shape if len(shape) == 1 and shape[0] else (1,)
        expected |= {f"{name}:{field}": (torch.float32, columns) for field in fields}
        expected |= {f"{name}:histogram": (torch.int64, (HISTOGRAM_BINS,))}
        expected |= {f"{name}:sample": (torch.float32, (rows, *columns))}
    expected |= {f"{name}:{_SALIENCY}": (torch.bfloat16, (meta.tokens, meta.saliency)) for name in weighed}
    for name, (dtype, shape) in expected.items():
        if name not in stored:
            raise CalibrationError(f"{what}: {_DAMAGED}; {name} is missing")
        found = stored[name]
        if (found.dtype, found.shape) != (DTYPES[dtype], shape):
            raise CalibrationError(
                f"{what}: {_DAMAGED}; {name} is {found.dtype}{list(found.shape)} instead of "
                f"{DTYPES[dtype]}{list(shape)}"
            )
    unknown = sorted(stored.keys() - expected.keys())
    if unknown:
        raise CalibrationError(f"{what}: {_DAMAGED}; {unknown[0]} is no tensor of a calibration")


def _read_stats(what: str, name: str, tensors: Mapping[str, Tensor], tokens: int, fields: Sequence[str]) -> LayerStats:
    found = {field: tensors[f"{name}:{field}"] for field in fields}
    for kind, tensor in found.items():
        _check_values(what, f"{name}:{kind}", tensor, signed=kind in _SIGNED)
    return LayerStats(**found, tokens=tokens)


def _check_values(what: str, name: str, values: Tensor, *, signed: bool) -> None:
    if not values.numel():  # the sample of an expert that no token was routed to
        return
    low, high = (float(bound) for bound in values.aminmax())
    if not abs(low) < float("inf") or not abs(high) < float("inf") or (low < 0 and not signed):
        raise CalibrationError(f"{what}: {_DAMAGED}; {name} holds values from {low} to {high}")


def _merge_stats(a: LayerStats, b: LayerStats) -> LayerStats:
    tokens = a.tokens + b.tokens

    def mean(x: Tensor, y: Tensor) -> Tensor:
        return ((x.double() * a.tokens + y.double() * b.tokens) / max(tokens, 1)).float()

    return LayerStats(
        absmax=torch.maximum(a.absmax, b.absmax),
        mean_abs=mean(a.mean_abs, b.mean_abs),
        mean_square=mean(a.mean_square, b.mean_square),
        histogram=a.histogram + b.histogram,
        sample=_merge_samples(a, b),
        tokens=tokens,
        vocabulary_absmax=_larger(a.vocabulary_absmax, b.vocabulary_absmax),
    )


def _larger(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a.maximum(b)


def _merge_samples(a: LayerStats, b: LayerStats) -> Tensor:
    """Rows of both samples in proportion to their tokens; a fixed seed keeps the choice the same in every layer."""
    rows = min(SAMPLE_ROWS, a.tokens + b.tokens)
    share = round(rows * a.tokens / max(a.tokens + b.tokens, 1))
    share = min(max(share, rows - b.sample.shape[0]), a.sample.shape[0])
    generator = torch.Generator().manual_seed(_MERGE_SEED)
    chosen = torch.randperm(a.sample.shape[0], generator=generator)[:share]
    others = torch.randperm(b.sample.shape[0], generator=generator)[: rows - share]
    return torch.cat([a.sample[chosen], b.sample[others]])
