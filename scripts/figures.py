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
SPEED_FILE, SPEED_SHAPE = "bcq-rows-h200.json", "12288x12288"
SPEED_METHODS = {"nuqmm-q4-g128": "4 bits", "nuqmm-q2-g128": "2 bits", "nuqmm-q1-g128": "1 bit"}
MODELS = {"wiki-opt-34m": (22.8, 60.0), "smollm2-135m": (17.8, 60.0)}  # range of the axis of perplexity
SHADES = ("#6baed6", "#3182bd", "#08519c")
GREY = "#555555"
DPI = 105


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
)


def read(name: str) -> dict[str, Any]:
    """A document of docs/results."""
    document: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return document


def speed_lines(results: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """By label, rows of activations and microseconds; fp16 was measured beside each method, so its mean is taken."""
    own = [row for row in results if row["shape"] == SPEED_SHAPE and row["method"] in SPEED_METHODS]
    rows = sorted({row["tokens"] for row in own})
    fp16 = [[row["baseline_us"] for row in own if row["tokens"] == count] for count in rows]
    lines = {"fp16": (rows, [sum(times) / len(times) for times in fp16])}
    for method, label in SPEED_METHODS.items():
        found = {row["tokens"]: row["median_us"] for row in own if row["method"] == method}
        lines[label] = (rows, [found[count] for count in rows])
    return lines


def quality_points(model: str) -> dict[str, list[tuple[float, float]]]:
    """By label of SERIES, (bits per weight, perplexity) of a model, sorted; "original" has its perplexity alone."""
    own, peers = read(f"quality-{model}.json")["rows"], read("quality-peers.json")["rows"]
    named = [(row["recipe"].partition("+")[0], row) for row in own]
    named += [(row["peer"], row) for row in peers if row["model"] == model]
    points: dict[str, list[tuple[float, float]]] = {"original": [(16.0, named[0][1]["evaluation"]["perplexity"])]}
    for series in SERIES:
        found = [
            (row["bits_per_weight"], row["evaluation"]["perplexity"])
            for name, row in named
            if name.startswith(series.prefixes) and name.endswith("-comp") == (series.suffix == "-comp")
        ]
        points[series.label] = sorted(found)
    return points


def draw_speed(path: Path) -> None:
    """Microseconds against rows of activations."""
    document = read(SPEED_FILE)
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for (label, (rows, times)), colour in zip(
        speed_lines(document["results"]).items(), (GREY, *reversed(SHADES)), strict=True
    ):
        axes.plot(range(len(rows)), times, marker="o", color=colour, linewidth=2)
        for index, time in enumerate(times):
            above = -13 if label == "1 bit" else 7
            axes.annotate(
                f"{time:.0f}", (index, time), (0, above), textcoords="offset points", ha="center", color=colour
            )
        axes.annotate(
            label, (len(rows) - 1, times[-1]), (10, -4), textcoords="offset points", color=colour, weight="bold"
        )
    axes.set_xticks(range(len(rows)), [str(count) for count in rows])
    axes.set_xlim(-0.25, len(rows) - 0.55)
    axes.set_ylim(0, 90)
    axes.set(xlabel="rows of activations (tokens at once)", ylabel="microseconds")
    facts = document["environment"]
    axes.set_title(
        f"One {SPEED_SHAPE.replace('x', ' x ')} Linear, groups of 128, cold L2\n{facts['device']}, torch "
        f"{facts['torch'].partition('+')[0]}",
        fontsize=10,
        loc="left",
    )
    save(figure, [axes], path)


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
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    OUT.mkdir(exist_ok=True)
    draw_speed(OUT / "speed.png")
    draw_quality(OUT / "quality.png")
    print(*(f"{path.name} {path.stat().st_size} bytes" for path in sorted(OUT.glob("*.png"))), sep="\n")


if __name__ == "__main__":
    run_script(main)
