"""The figures of a report, each drawn on axes of its own."""

from __future__ import annotations

import importlib.util
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import EvaluationError

Document = Mapping[str, Any]

_DPI = 110
_WIDTH, _HEIGHT = 8.0, 4.8
_BLOCK = re.compile(r"^(.*?)\.(\d+)\.(.+)$")
_MANY_CELLS = 320  # above this many, numbers in a heat map's cells are too small to read


@dataclass(frozen=True)
class FigureSpec:
    """title: above the figure. caption: what it shows and how to read it. draw: axes -> None. height: in inches."""

    title: str
    caption: str
    draw: Callable[[Any], None]
    height: float = _HEIGHT


def check_matplotlib() -> None:
    """Raise EvaluationError, with the pip line, where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise EvaluationError("figures are drawn by matplotlib, which is not installed: pip install 'quantkit[plot]'")


def png(figures: Sequence[FigureSpec]) -> bytes:
    """The figures one below the other, as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [spec.height for spec in figures]
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(figures), 1, squeeze=False, height_ratios=heights)
    for spec, axes in zip(figures, rows[:, 0], strict=True):
        axes.set_title(spec.title, fontsize="medium", loc="left")
        spec.draw(axes)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def search_figures(name: str, document: Document) -> list[FigureSpec]:
    """Pareto plot, bits per layer and sensitivity per layer of one search."""
    layers: Mapping[str, Document] = document["layers"]
    bits = {layer: float(row["bits_per_weight"]) for layer, row in layers.items()}
    reference = _reference_option(layers)
    losses = {layer: float(_row_at(row, reference)["predicted_kl"]) for layer, row in layers.items()}
    label = f"q{reference}, widest group"
    return [
        FigureSpec(
            f"Predicted KL against size ({name})",
            "All uniform (q, g), all pairs for attention and FFN, the best plans per layer; the star is this plan.",
            lambda axes: _draw_pareto(axes, document),
        ),
        _heat_map(f"Bits per weight chosen ({name})", "Scales and offsets included.", bits, "{:.2f}", log=False),
        _heat_map(
            f"Sensitivity ({name})",
            f"Predicted KL in nats per token of each layer alone at {label}; logarithmic.",
            losses,
            "{:.1e}",
            log=True,
        ),
    ]


def checkpoint_figures(name: str, document: Document) -> list[FigureSpec]:
    """Bits, and the output error where a calibration was used, of every layer of a checkpoint."""
    layers = document["layers"]
    bits = {layer["name"]: float(layer["bits_per_weight"]) for layer in layers}
    figures = [_heat_map(f"Bits per weight ({name})", "Scales and offsets included.", bits, "{:.2f}", log=False)]
    for key, meaning in (("output_error", "output"), ("weight_error", "weight")):
        errors = {layer["name"]: float(layer["measured"][key]) for layer in layers if key in layer["measured"]}
        if errors:
            caption = f"Relative squared error of each layer's {meaning}, as measured while quantizing; logarithmic."
            figures.append(_heat_map(f"Relative {meaning} error ({name})", caption, errors, "{:.1e}", log=True))
            break
    return figures


def divergence_figure(documents: Mapping[str, Document]) -> FigureSpec:
    """Histogram of the KL per token of every measured model."""
    return FigureSpec(
        "KL divergence per token",
        "Share of tokens by their KL from the reference (logarithmic bins); dashed lines are the means.",
        lambda axes: _draw_histograms(axes, documents),
    )


def comparison_figures(name: str, document: Document) -> list[FigureSpec]:
    """Perplexity, and each task's accuracy where tasks were run, against the compression ratio."""
    rows = [row for row in document["rows"] if row["bytes"]]
    if len(rows) < 2:
        return []
    figures = [
        FigureSpec(
            f"Perplexity against compression ratio ({name})",
            "Ratio of the weight files' sizes, reference to model; checkpoints of equal bit width are joined.",
            lambda axes: _draw_ratio(axes, rows, lambda row: row["divergence"]["perplexity"], "perplexity"),
        )
    ]
    accuracies = [(s["task"], s["metric"]) for s in rows[0]["scores"] if s["metric"] == "acc"]
    for task, metric in accuracies:
        figures.append(
            FigureSpec(
                f"{task}: accuracy against compression ratio ({name})",
                "Ratio of the weight files' sizes, reference to model.",
                _accuracy_drawing(rows, task, metric),
            )
        )
    return figures


def _accuracy_drawing(rows: Sequence[Document], task: str, metric: str) -> Callable[[Any], None]:
    def value(row: Document) -> float:
        return next(float(s["value"]) for s in row["scores"] if (s["task"], s["metric"]) == (task, metric))

    return lambda axes: _draw_ratio(axes, rows, value, "accuracy")


def _draw_pareto(axes: Any, document: Document) -> None:
    def coordinates(points: Sequence[Document]) -> tuple[list[float], list[float]]:
        ordered = sorted(points, key=lambda point: point["bits_per_weight"])
        return [p["bits_per_weight"] for p in ordered], [p["predicted_kl"] for p in ordered]

    axes.plot(*coordinates(document["types"]), ".", color="0.75", markersize=4, label="attention x FFN", zorder=1)
    uniform: dict[str, list[Document]] = {}
    for point in document["uniform"]:
        uniform.setdefault(point["label"].split()[0], []).append(point)
    for bits, points in uniform.items():
        axes.plot(*coordinates(points), "o-", markersize=4, linewidth=1, label=f"uniform {bits}", zorder=2)
    axes.plot(*coordinates(document["frontier"]), "k-", linewidth=1.2, label="per layer", zorder=3)
    chosen = document["bits_per_weight"], document["predicted_kl"]
    axes.plot(*chosen, "*", color="crimson", markersize=14, label="chosen", zorder=4)
    axes.set(xlabel="bits per weight", ylabel="predicted KL, nats per token", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")


def _draw_histograms(axes: Any, documents: Mapping[str, Document]) -> None:
    for name, document in documents.items():
        edges, counts = document["histogram"]["edges"], document["histogram"]["counts"]
        shares = [count / sum(counts) for count in counts]
        (patch,) = axes.plot(edges, [*shares, shares[-1]], drawstyle="steps-post", linewidth=1.4, label=name)
        axes.axvline(max(document["mean_kl"], edges[0]), color=patch.get_color(), linestyle="--", linewidth=1)
    axes.set(xscale="log", xlabel="KL, nats", ylabel="share of tokens", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_ratio(axes: Any, rows: Sequence[Document], value: Callable[[Document], float], what: str) -> None:
    base = rows[0]["bytes"]
    series: dict[str, list[Document]] = {}
    for row in rows:
        series.setdefault(str(row["label"]).split(" g")[0].removesuffix(" row"), []).append(row)
    for name, members in series.items():
        members = sorted(members, key=lambda row: row["bytes"])
        axes.plot([base / row["bytes"] for row in members], [value(row) for row in members], "o-", label=name)
        for row in members:
            place = (base / row["bytes"], value(row))
            text = row["model"].rstrip("/").rsplit("/", 1)[-1]
            axes.annotate(text, place, textcoords="offset points", xytext=(5, 5), fontsize="x-small")
    axes.axhline(value(rows[0]), color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="compression ratio", ylabel=what)
    axes.margins(x=0.12, y=0.1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _reference_option(layers: Mapping[str, Document]) -> int:
    """The middle of the bit widths in the table: where layers are compared."""
    widths = sorted({row["weight_bits"] for layer in layers.values() for row in layer["table"]})
    return int(widths[(len(widths) - 1) // 2])


def _row_at(layer: Document, bits: int) -> Document:
    """The layer's row of the error table with these bits and the fewest bytes: the widest group."""
    rows = [row for row in layer["table"] if row["weight_bits"] == bits]
    smallest: Document = min(rows, key=lambda row: row["stored"])
    return smallest


def _heat_map(title: str, caption: str, values: Mapping[str, float], form: str, *, log: bool) -> FigureSpec:
    """Sub-layers down, blocks across."""
    places = {name: _place(name) for name in values}
    rows = list(dict.fromkeys(sublayer for sublayer, _ in places.values()))
    columns = sorted({block for _, block in places.values()})
    grid = [[math.nan] * len(columns) for _ in rows]
    for name, (sublayer, block) in places.items():
        grid[rows.index(sublayer)][columns.index(block)] = values[name]
    height = 1.6 + 0.36 * len(rows)
    return FigureSpec(title, caption, lambda axes: _draw_grid(axes, grid, rows, columns, form=form, log=log), height)


def _place(name: str) -> tuple[str, int]:
    """(sub-layer, block) of a module name; what has no block number is a block of its own."""
    match = _BLOCK.match(name)
    return (match[3], int(match[2])) if match else (name, 0)


def _draw_grid(
    axes: Any, grid: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[int], *, form: str, log: bool
) -> None:
    shown = [[math.log10(v) if log and v > 0 else math.nan if log else v for v in row] for row in grid]
    image = axes.imshow(shown, aspect="auto", cmap="viridis")
    axes.set_yticks(range(len(rows)), rows, fontsize="small")
    step = max(1, len(columns) // 16)
    axes.set_xticks(range(0, len(columns), step), [str(c) for c in columns[::step]])
    axes.set_xlabel("block")
    axes.figure.colorbar(image, ax=axes, label="log10" if log else None)
    finite = [v for row in shown for v in row if not math.isnan(v)]
    middle = (min(finite) + max(finite)) / 2 if finite else 0.0
    if len(rows) * len(columns) <= _MANY_CELLS:
        size = "x-small" if len(columns) <= 12 else 4
        for i, row in enumerate(grid):
            for j, value in enumerate(row):
                if not math.isnan(value):
                    color = "black" if shown[i][j] > middle else "white"
                    axes.text(j, i, form.format(value), ha="center", va="center", fontsize=size, color=color)
