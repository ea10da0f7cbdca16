"""Writes the rows of scripts/flattenquant/tables.py as Markdown, the paper's columns beside ours."""

from __future__ import annotations

from typing import Any

from scripts.common import titled_table
from scripts.flattenquant.runs import BETAS, GAMMAS, LEVELS, LIMITS, TABLES, Run

# What the paper reports of OPT-125M (Tables 3, 4) and OPT-6.7B (Tables 7-10): WikiText-2 perplexity.
PAPER_LEVELS = (27.65, 30.10, 28.88, 28.46, 30.86, 28.75)
PAPER_BETAS = (11.32, 11.38, 11.68, 11.89, 12.08)
PAPER_BETA_RATIOS = (0.3225, 0.2685, 0.2441, 0.2201, 0.2056)
PAPER_GAMMAS = {1.82: (0.3121, 11.35), 1.84: (0.4085, 11.37), 1.86: (0.4725, 11.68), 1.88: (0.5167, 11.95)}
PAPER_GAMMAS |= {1.9: (0.5585, 12.47)}
PAPER_ABLATIONS = {"7": (11.68, 12.16), "9": (11.68, 11.87)}
NAMES = {"7": "Eq 5 smoothing", "9": "boxplot clip of Eq 6"}


def markdown(document: dict[str, Any]) -> str:
    """Every table for which rows were measured, with the machine they were measured on."""
    entries = {model: {row["run"]: row for row in entry["rows"]} for model, entry in document["models"].items()}
    parts = [_environments(document["models"])]
    for model, rows in entries.items():
        parts += [_levels(model, rows)]
    for model, rows in entries.items():
        parts += [_ablation(table, model, rows) for table in ("7", "9")]
        parts += [_betas(model, rows), _gammas(model, rows)]
        parts += [_column_limits(model, rows), _limits(model, rows), _order(model, rows)]
    return "\n\n".join(part for part in parts if part)


def _environments(models: dict[str, Any]) -> str:
    """A line per machine; it names the models where there are several machines."""
    found: dict[str, list[str]] = {}
    for model, entry in models.items():
        facts = entry["environment"]
        packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
        machine = f"{facts['machine']} with Python {facts['python']}, {packages}"
        found.setdefault(machine, []).append(model)
    return "\n".join(
        f"Measured on {machine}{': ' + ', '.join(names) if len(found) > 1 else ''}." for machine, names in found.items()
    )


def _score(row: dict[str, Any]) -> str:
    elsewhere = f" ({row['environment']['machine']})" if "environment" in row else ""
    return f"{row['evaluation']['perplexity']:.2f} ± {row['evaluation']['stderr']:.2f}{elsewhere}"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _levels(model: str, rows: dict[str, Any]) -> str:
    if "original" not in rows:
        return ""
    original = rows["original"]["evaluation"]["perplexity"]
    lines: list[tuple[str, ...]] = []
    for run, paper in zip(TABLES["3"], PAPER_LEVELS, strict=True):
        row = rows.get(run.key)
        if row is None:
            continue
        change = row["evaluation"]["perplexity"] / original - 1
        facts: tuple[str, ...] = ("",) * 5
        if run.recipe:
            facts = (
                _percent(row["int4_share"]),
                _percent(row["flatten_ratio"]),
                f"{100 * row['run_time_clip_rate']:.4f} %",
                f"{row['bits_per_weight']:.2f}",
                f"{row['quantize_seconds']:.0f}",
            )
        lines.append((run.key, _score(row), f"{100 * change:+.1f} %", *facts, f"{paper:.2f}"))
    columns: tuple[str, ...] = (
        "",
        "perplexity",
        "against original",
        "INT4 layers (Table 4)",
        "flatten ratio (Table 4)",
    )
    columns += ("clipped at run time", "bits/weight", "quantize s", "paper, OPT-125M")
    return titled_table(f"Tables 3 and 4: {model}", columns, lines)


def _ablation(table: str, model: str, rows: dict[str, Any]) -> str:
    pairs = [(TABLES[table][i], TABLES[table][i + 1]) for i in range(0, len(TABLES[table]), 2)]
    found = [(yes, rows[yes.key], rows[no.key]) for yes, no in pairs if yes.key in rows and no.key in rows]
    lines = [(run.key, *_with_share(with_it), *_with_share(without)) for run, with_it, without in found]
    if not lines:
        return ""
    paper = PAPER_ABLATIONS[table]
    lines.append(("paper, OPT-6.7B", f"{paper[0]:.2f}", "", f"{paper[1]:.2f}", ""))
    columns = ("", "with", "INT4 layers", "without", "INT4 layers")
    return titled_table(f"Table {table}: {NAMES[table]}, {model}", columns, lines)


def _with_share(row: dict[str, Any]) -> tuple[str, str]:
    return _score(row), _percent(row["int4_share"])


def _order(model: str, rows: dict[str, Any]) -> str:
    found = [rows.get(run.key) for run in TABLES["order"]]
    if not all(found):
        return ""
    lines = [(run.key, _score(row)) for run, row in zip(TABLES["order"], found, strict=True) if row]
    return titled_table(f"GPTQ's column order, {model}", ("", "perplexity"), lines)


def _column_limits(model: str, rows: dict[str, Any]) -> str:
    lines = []
    for limit, run in zip(LIMITS, TABLES["limit"], strict=True):
        row = rows.get(run.key)
        if row:
            facts = (_percent(row["flatten_ratio"]), _percent(row["largest_flatten_ratio"]), str(len(row["limited"])))
            lines.append((f"{limit}", _score(row), *facts))
    columns = ("max_flatten_ratio", "O1", "mean flatten ratio", "largest", "layers at the limit")
    return titled_table(f"The column limit, {model}", columns, lines) if len(lines) > 1 else ""


def _betas(model: str, rows: dict[str, Any]) -> str:
    lines = []
    for index, beta in enumerate(BETAS):
        setting = (f"threshold_multiplier={beta}",)
        o1, o3 = (rows.get(Run(recipe, setting).key) for recipe in ("flatten-o1", "flatten-o3"))
        if o1 is not None:
            mixed = _with_share(o3) if o3 else ("not measured", "")
            paper = (f"{PAPER_BETAS[index]:.2f}", _percent(PAPER_BETA_RATIOS[index]))
            lines.append((f"{beta}", _percent(o1["flatten_ratio"]), _score(o1), *mixed, *paper))
    columns = ("beta", "flatten ratio", "O1", "O3", "its INT4 layers", "paper, OPT-6.7B", "its flatten ratio")
    return titled_table(f"Table 8: beta, {model}", columns, lines) if lines else ""


def _gammas(model: str, rows: dict[str, Any]) -> str:
    lines = []
    for gamma in GAMMAS:
        row = rows.get(Run("flatten-o3", (f"kl_ratio_limit={gamma}",)).key)
        if row is not None:
            share, score = PAPER_GAMMAS.get(gamma, (None, None))
            paper = ("", "") if share is None else (_percent(share), f"{score:.2f}")
            lines.append((f"{gamma}", _percent(row["int4_share"]), _score(row), *paper))
    columns = ("gamma", "INT4 layers", "perplexity", "paper, OPT-6.7B: INT4 layers", "its perplexity")
    return titled_table(f"Table 10: gamma (O3), {model}", columns, lines) if lines else ""


def _limits(model: str, rows: dict[str, Any]) -> str:
    limited = rows.get(LEVELS[2], {}).get("limited", {})
    lines = [(f"`{name}`", text) for name, text in limited.items()]
    return titled_table(f"Layers at the column limit (O1), {model}", ("layer", "decided"), lines) if lines else ""
