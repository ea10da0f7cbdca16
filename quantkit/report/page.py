"""The HTML page: figures embedded, tables, commands and versions; nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import quantkit
from quantkit.errors import EvaluationError
from quantkit.jobs.compare import comparison_table
from quantkit.report.figures import (
    FigureSpec,
    check_matplotlib,
    checkpoint_figures,
    comparison_figures,
    divergence_figure,
    png,
    search_figures,
)
from quantkit.report.quality import COLUMNS, Measured, by_model, quality_figure
from quantkit.report.sources import Sources, find_sources
from quantkit.search.plan import optimality
from quantkit.storage.output import write_file
from quantkit.storage.place import check_file

Document = Mapping[str, Any]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; border-bottom: 1px solid #ccc; margin-top: 2.5rem }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; font-size: 0.85rem }
th, td { border: 1px solid #ddd; padding: 0.2rem 0.6rem; text-align: left; white-space: nowrap }
th { background: #f4f4f4 } td.number { text-align: right; font-variant-numeric: tabular-nums }
img { max-width: 100% } figcaption { color: #666; font-size: 0.85rem } figure { margin: 1rem 0 }
code { background: #f4f4f4; padding: 0.1rem 0.3rem } details { margin: 1rem 0 }
"""


def write_report(source: Path, out: Path | None, plot: Path | None) -> list[Path]:
    """Write the report of a plan or a folder as HTML, its figures also as one PNG; the paths written.

    Raises EvaluationError, before anything is written, for unfit paths, nothing to show, or missing matplotlib.
    """
    for name, path, suffix in (("out", out, ".html"), ("plot", plot, ".png")):
        if path is not None and path.suffix != suffix:
            raise EvaluationError(f"`{name}` {path}: give the file the suffix {suffix}")
        if path is not None:
            check_file(path, f"`{name}`", replace=True)
    check_matplotlib()
    sources = find_sources(source)
    figures = all_figures(sources) if plot is not None else []
    if plot is not None and not figures:
        raise EvaluationError(f"`plot` {plot}: {source} holds nothing that makes a figure")
    written = []
    if out is not None:
        write_file(out, page(source.name, sources).encode(), "`out`")
        written.append(out)
    if plot is not None:
        write_file(plot, png(figures), "`plot`")
        written.append(plot)
    return written


def all_figures(sources: Sources) -> list[FigureSpec]:
    """Every figure of the report, in its order."""
    figures: list[FigureSpec] = []
    for name, document in sources.searches.items():
        figures += search_figures(name, document)
    figures += [quality_figure(model, rows) for model, rows in by_model(sources.tables).items()]
    for name, document in sources.comparisons.items():
        figures += comparison_figures(name, document)
    if sources.divergences:
        figures.append(divergence_figure(sources.divergences))
    for name, document in sources.checkpoints.items():
        figures += checkpoint_figures(name, document)
    return figures


def page(title: str, sources: Sources) -> str:
    """The whole page."""
    parts = [f"<h1>{escape(title)}</h1><p>Made by quantkit {escape(quantkit.__version__)}.</p>"]
    parts += [_search(name, document) for name, document in sources.searches.items()]
    parts += [_quality(model, rows) for model, rows in by_model(sources.tables).items()]
    parts += [comparison_section(name, document) for name, document in sources.comparisons.items()]
    if sources.divergences:
        parts.append(_divergences(sources.divergences))
    if sources.perplexities:
        parts.append(_perplexities(sources.perplexities))
    parts += [_checkpoint(name, document) for name, document in sources.checkpoints.items()]
    return document_html(title, parts)


def document_html(title: str, parts: Sequence[str]) -> str:
    """A complete HTML document."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def comparison_section(name: str, document: Document, *, figures: bool = True) -> str:
    """A comparison's table, and its figures."""
    columns, rows = comparison_table(dict(document))
    d = document["rows"][0]["divergence"]
    text = f"{d['text']}, {d['tokens']} tokens in windows of {d['seq_len']} (sha256 {d['text_sha256']})"
    where = f"{document['device']} ({document['machine']})"
    facts = {"text": text, "device": where, "quantkit": document["quantkit"], "torch": document["torch"]}
    drawn = [_figure(spec) for spec in comparison_figures(name, document)] if figures else []
    return "".join([f"<h2>Comparison: {escape(name)}</h2>", _facts(facts), _table(columns, rows), *drawn])


def _search(name: str, document: Document) -> str:
    budget, calibration = document["budget"], document["calibration"]
    texts = ", ".join(text["name"] for text in calibration["texts"])
    measured = document["measured_kl"]
    facts = {
        "model": document["model"],
        "budget": f"{budget['kind']} ≤ {budget['limit']:g}, per {document['per']}",
        "bits per weight": f"{document['bits_per_weight']:.4f}",
        "weight files": f"at most {document['bytes']} bytes",
        "predicted KL": f"{document['predicted_kl']:.5f} nats per token",
        "measured KL": "not measured" if measured is None else f"{measured:.5f} nats per token on calibration text",
        "optimality": optimality(document["gap"], budget["kind"] == "kl"),
        "method": f"{document['method']} {document['settings'] or ''}",
        "calibration": f"{texts}: {calibration['tokens']} tokens in windows of {calibration['seq_len']}",
        "quantkit": document["quantkit"],
        "apply": f"quantkit quantize {document['model']} --recipe {Path(name).with_suffix('.yaml')} -o FOLDER",
    }
    columns = ["layer", "N x K", "bits", "group", "bits/weight", "output error", "predicted KL"]
    rows = [
        [
            layer,
            "{} x {}".format(*row["shape"]),
            str(row["weight_bits"]),
            "row" if row["group_size"] < 0 else str(row["group_size"]),
            f"{row['bits_per_weight']:.3f}",
            f"{row['output_error']:.3g}",
            f"{row['predicted_kl']:.3g}",
        ]
        for layer, row in document["layers"].items()
    ]
    drawn = [_figure(spec) for spec in search_figures(name, document)]
    return "".join(
        [f"<h2>Search: {escape(name)}</h2>", _facts(facts), *drawn, _folded("Layers", _table(columns, rows))]
    )


def _quality(model: str, rows: Sequence[Measured]) -> str:
    table = _table(COLUMNS, [row.cells() for row in rows])
    return f"<h2>Recipes: {escape(model)}</h2>{_figure(quality_figure(model, rows))}{table}"


def _divergences(documents: Mapping[str, Document]) -> str:
    columns = ["file", "model", "mean KL", "median", "90%", "99%", "same top token", "perplexity", "reference", "text"]
    rows = [
        [
            name,
            d["model"],
            *(f"{d[key]:.5f} ± {d[f'{key}_stderr']:.5f}" for key in ("mean_kl", "median_kl", "p90_kl", "p99_kl")),
            f"{d['same_top1']:.2%}",
            f"{d['perplexity']:.3f}",
            f"{d['reference_perplexity']:.3f}",
            f"{d['text']}, {d['tokens']} tokens",
        ]
        for name, d in documents.items()
    ]
    return f"<h2>Divergence from the reference</h2>{_table(columns, rows)}{_figure(divergence_figure(documents))}"


def _perplexities(documents: Mapping[str, Document]) -> str:
    columns = ["file", "model", "perplexity", "recipe", "window", "tokens", "text", "sha256"]
    rows = [
        [
            name,
            d["model"],
            f"{d['perplexity']:.3f} ± {d['stderr']:.3f}",
            d["recipe"],
            str(d["seq_len"]),
            str(d["tokens"]),
            d["text"],
            d["text_sha256"][:16],
        ]
        for name, d in documents.items()
    ]
    return f"<h2>Perplexity</h2>{_table(columns, rows)}"


def _checkpoint(name: str, document: Document) -> str:
    facts = {
        "recipe": document["recipe"],
        "bits per weight": f"{document['bits_per_weight']:.4f}",
        "quantized layers": f"{len(document['layers'])}, {document['quantized_bytes']} bytes",
        "weight files": f"{document['bytes']} bytes",
        "floating point": ", ".join(document["ignore"]) or "no Linear",
    }
    columns = ["layer", "method", "N x K", "W/A bits", "bits/weight", "settings", "measured"]
    rows = [
        [
            layer["name"],
            layer["method"],
            "{} x {}".format(*layer["shape"]),
            f"W{layer['weight_bits']}A{layer['act_bits']}",
            f"{layer['bits_per_weight']:.3f}",
            ", ".join(f"{key}={value}" for key, value in layer["settings"].items()),
            ", ".join(f"{key}={_short(value)}" for key, value in layer["measured"].items()),
        ]
        for layer in document["layers"]
    ]
    drawn = [_figure(spec) for spec in checkpoint_figures(name, document)]
    table = _folded("Layers", _table(columns, rows))
    return "".join([f"<h2>Checkpoint: {escape(name)}</h2>", _facts(facts), *drawn, table])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _figure(spec: FigureSpec) -> str:
    data = base64.b64encode(png([spec])).decode()
    caption = f"<figcaption>{escape(spec.caption)}</figcaption>"
    return f'<figure><img alt="{escape(spec.title)}" src="data:image/png;base64,{data}">{caption}</figure>'


def _facts(facts: Mapping[str, Any]) -> str:
    rows = "".join(f"<tr><th>{escape(key)}</th><td>{escape(str(value))}</td></tr>" for key, value in facts.items())
    return f"<table>{rows}</table>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(text: str) -> str:
    numeric = text[:1].isdigit() and " x " not in text
    return f'<td class="number">{escape(text)}</td>' if numeric else f"<td>{escape(text)}</td>"


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"
