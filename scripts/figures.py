"""Draws the pictures of docs/img from the measurements in docs/results.

python scripts/figures.py

Nothing is measured here: a picture shows rows of the JSON files, and its caption names the machine they came from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from scripts.common import run_script

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

RESULTS, OUT = (Path(__file__).parents[1] / "docs" / name for name in ("results", "img"))
SPEED_FILE, SPEED_SHAPE, SPEED_ROWS = "bcq-linear-12288-h200.json", "12288x12288", 256
SPEED_LINES = {  # what was measured: its name and colour here
    "fp16": ("fp16", "#555555"),
    "humming-4": ("Humming, 4 bits", "#e6550d"),
    "bcq-w4-g128": ("bcq, 4 bits, order for latency", "#08519c"),
    "bcq-w4-g128 batch": ("bcq, 4 bits, order for batches", "#3182bd"),
    "rtn-w4-g128 batch": ("rtn, gptq, 4 bits, order for batches", "#31a354"),
    "nuqmm-q2-g128": ("2 bits, order for latency", "#9e9ac8"),
}
BITS_FILE, BITS_SHAPE, BITS_ROWS = "bcq-rows-epilogue-h100.json", "4096x14336", (16, 64, 128)
BITS_LINES = {  # names of what was measured by bits per weight: a name and colour here
    "bcq, any steps": ({2: "nuqmm-q2-g128 batch", 3: "bcq-w3-g128 batch", 4: "bcq-w4-g128 batch"}, "#3182bd"),
    "rtn, gptq, equal steps": ({4: "rtn-w4-g128 batch"}, "#31a354"),
    "Humming": ({2: "humming-2", 3: "humming-3", 4: "humming-4"}, "#e6550d"),
    "fp16": ({16: "fp16"}, "#555555"),
}
SERVING_FILE, SERVING_MODEL = "serving-steps-h200.json", "llama-3-8b"
SERVING_LINES = {  # a setting of scripts/serve_bench.py on one GPU: its name and colour here
    "fp16": ("fp16", "#555555"),
    "machete": ("W4A16 by Machete", "#41ab5d"),
    "marlin": ("W4A16 by Marlin", "#e6550d"),
    "rtn-w4-g128": ("quantkit, 4 bits in equal steps", "#756bb1"),
    "bcq-w4-g128": ("quantkit, 4 bits", "#08519c"),
    "bcq-w2-g128": ("quantkit, 2 bits", "#6baed6"),
}
MODELS = {"wiki-opt-34m": (22.8, 60.0), "smollm2-135m": (17.8, 60.0)}  # range of the axis of perplexity
GREY = "#555555"
DPI = 96


@dataclass(frozen=True)
class Series:
    """One method in the picture of quality: the recipes or peers whose names start so, and its looks."""

    label: str
    prefixes: tuple[str, ...]
    colour: str
    marker: str
    suffix: str = ""


SERIES = (
    Series("bcq, compensated", ("bcq-",), "#08519c", "o", "-comp"),
    Series("bcq", ("bcq-", "nuqmm-"), "#4292c6", "s"),
    Series("rtn", ("rtn-",), "#969696", "v"),
    Series("gptq", ("gptq-",), "#41ab5d", "D"),
    Series("hqq", ("hqq-",), "#e6550d", "^"),
    Series("GPTQModel 7.7", ("gptq:",), "#41ab5d", "x"),
    Series("HQQ 0.2.8", ("hqq:",), "#e6550d", "+"),
    Series("trellis", ("trellis-",), "#000000", "o"),
    Series("trellis, tuned", ("tuned-trellis-",), "#000000", "*"),
    Series("searched plans", ("search:",), "#6a51a3", "P"),
    Series("searched plans, tuned", ("searched-",), "#dd1c77", "*"),
)


def read(name: str) -> dict[str, Any]:
    """A document of docs/results."""
    document: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return document


def speed_lines(entries: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """By key of SPEED_LINES, (rows of activations, microseconds), sorted."""
    own = [entry for entry in entries if entry["shape"] == SPEED_SHAPE and entry["rows"] <= SPEED_ROWS]
    return {
        what: sorted((entry["rows"], entry["us"]) for entry in own if entry["what"] == what) for what in SPEED_LINES
    }


def bits_lines(entries: Sequence[Mapping[str, Any]], rows: int) -> dict[str, list[tuple[int, float]]]:
    """By key of BITS_LINES, (bits per weight, microseconds) at so many rows of activations."""
    own = {entry["what"]: entry["us"] for entry in entries if (entry["shape"], entry["rows"]) == (BITS_SHAPE, rows)}
    return {label: [(bits, own[what]) for bits, what in names.items()] for label, (names, _) in BITS_LINES.items()}


def quality_points(model: str) -> dict[str, list[tuple[float, float]]]:
    """By label of SERIES, (bits per weight, perplexity) of a model, sorted; "original" has its perplexity alone."""
    own, peers = read(f"quality-{model}.json")["rows"], read("quality-peers.json")["rows"]
    named = [(row["recipe"].partition("+")[0], row) for row in own]
    named += [(row["peer"], row) for row in peers if row["model"] == model]
    named += [(_trellis_name(row["recipe"]), row) for row in read(f"trellis-{model}.json")["rows"]]
    if (RESULTS / f"searched-{model}.json").exists():
        named += [(row["recipe"], row) for row in _plans(model)]
    points: dict[str, list[tuple[float, float]]] = {"original": [(16.0, named[0][1]["evaluation"]["perplexity"])]}
    for series in SERIES:
        found = [
            (row["bits_per_weight"], row["evaluation"]["perplexity"])
            for name, row in named
            if name.startswith(series.prefixes) and name.endswith("-comp") == (series.suffix == "-comp")
        ]
        points[series.label] = sorted(found)
    return points


def _trellis_name(recipe: str) -> str:
    """Of a recipe with settings; tuned or not."""
    return ("tuned-" if "+tune." in recipe else "") + recipe.partition("+")[0]


def _plans(model: str) -> list[dict[str, Any]]:
    """The rows of searched plans, and of the same tuned, their codes in the blocks alone; the first text's numbers."""
    plain = [row for row in read(f"searched-{model}.json")["rows"] if row["recipe"].startswith("search:")]
    tuned = [row for row in read(f"tuned-searched-{model}.json")["rows"] if row["recipe"].startswith("searched-")]
    return plain + [
        {**row, "evaluation": row["evaluations"][0]}
        for row in tuned
        if row["tuning"] and not row["tuning"]["settings"]["codes"]
    ]


def serving_lines(results: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """By key of SERVING_LINES that was measured, (batch, tokens per second of all sequences), sorted."""
    lines = {}
    for what in SERVING_LINES:
        steps = results.get(f"{SERVING_MODEL} {what} tp1", {}).get("ms_per_step", {})
        if steps:
            lines[what] = sorted((int(batch), 1e3 * int(batch) / ms) for batch, ms in steps.items())
    return lines


def draw_serving(path: Path) -> None:
    """Tokens per second against the number of sequences."""
    document = read(SERVING_FILE)
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    batches: set[int] = set()
    for what, points in serving_lines(document["results"]).items():
        label, colour = SERVING_LINES[what]
        batches |= {batch for batch, _ in points}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, linewidth=2, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sorted(batches), [str(batch) for batch in sorted(batches)])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.set(xlabel="sequences at once", ylabel="tokens per second, all sequences")
    axes.legend(frameon=False, fontsize=9)
    facts = document["environment"]
    title = f"{SERVING_MODEL} through vLLM {facts['packages']['vllm']}\n{facts['gpus'][0]}"
    axes.set_title(title, fontsize=10, loc="left")
    save(figure, [axes], path)


def draw_speed(path: Path) -> None:
    """Microseconds against rows of activations."""
    document = read(SPEED_FILE)
    figure, axes = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    for what, points in speed_lines(document["entries"]).items():
        label, colour = SPEED_LINES[what]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, linewidth=2, label=label)
    axes.set_xscale("log", base=2)
    rows = [2**i for i in range(SPEED_ROWS.bit_length())]
    axes.set_xticks(rows, [str(count) for count in rows])
    axes.set_ylim(0)
    axes.set(xlabel="rows of activations (tokens at once)", ylabel="microseconds")
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=2)
    facts = document["environment"]
    axes.set_title(
        f"One {SPEED_SHAPE.replace('x', ' x ')} Linear, groups of 128, cold L2\n{facts['device']}, torch "
        f"{facts['torch'].partition('+')[0]}",
        fontsize=10,
        loc="left",
    )
    save(figure, [axes], path)


def draw_bits(path: Path) -> None:
    """Microseconds against bits per weight, a panel per number of rows."""
    document = read(BITS_FILE)
    figure, panels = plt.subplots(1, len(BITS_ROWS), figsize=(9.6, 3.6), layout="constrained", sharey=True)
    bits = sorted({count for names, _ in BITS_LINES.values() for count in names})
    for axes, rows in zip(panels, BITS_ROWS, strict=True):
        for label, points in bits_lines(document["entries"], rows).items():
            colour = BITS_LINES[label][1]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=5, color=colour, linewidth=2, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(bits, [str(count) for count in bits])
        axes.minorticks_off()
        axes.set(xlabel="bits per weight, without scales")
        axes.set_title(f"{rows} row{'s' if rows > 1 else ''}", fontsize=10, loc="left")
    panels[0].set_ylim(0)
    panels[0].set_ylabel("microseconds")
    panels[0].legend(frameon=False, fontsize=8)
    facts = document["environment"]
    figure.suptitle(
        f"One {BITS_SHAPE.replace('x', ' x ')} Linear, groups of 128, cold L2; {facts['device']}",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    save(figure, panels, path)


def draw_quality(path: Path) -> None:
    """Perplexity against bits per weight, a panel per model."""
    figure, panels = plt.subplots(1, len(MODELS), figsize=(9.6, 4.4), layout="constrained")
    for axes, (model, limits) in zip(panels, MODELS.items(), strict=True):
        points = quality_points(model)
        original = points.pop("original")[0][1]
        axes.axhline(original, color=GREY, linewidth=1, linestyle="--")
        where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
        axes.annotate(f"original: {original:.2f}", (1, original), (0, -12), fontsize=8, color=GREY, **where)
        for series in SERIES:
            shown = [point for point in points[series.label] if point[1] < limits[1]]
            looks = {"color": series.colour, "marker": series.marker, "markersize": 7, "linewidth": 0.6}
            axes.plot(*zip(*shown, strict=True), label=series.label, markeredgewidth=1.8, **looks)
        axes.set_yscale("log")
        ticks = [tick for tick in (20, 25, 30, 35, 40, 50) if limits[0] < tick < limits[1]]
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(*limits)
        axes.set(xlabel="bits per weight, scales and offsets counted")
        axes.set_title(f"{model}; what is above {limits[1]:.0f} is left out", fontsize=10, loc="left")
    panels[0].set_ylabel("perplexity, WikiText-2 (lower is better)")
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, panels, path)


def save(figure: Any, panels: Sequence[Axes], path: Path) -> None:
    """Take away what carries no number, and write the file without the time of day."""
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=DPI, metadata={"Software": None}, pil_kwargs={"optimize": True})
    plt.close(figure)


def main() -> None:
    OUT.mkdir(exist_ok=True)
    draw_speed(OUT / "speed.png")
    draw_bits(OUT / "bits.png")
    draw_quality(OUT / "quality.png")
    draw_serving(OUT / "serving.png")
    print(*(f"{path.name} {path.stat().st_size} bytes" for path in sorted(OUT.glob("*.png"))), sep="\n")


if __name__ == "__main__":
    run_script(main)
