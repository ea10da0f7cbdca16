"""Quality tables in a report: perplexity against bits per weight of many recipes, of quantkit and of other toolkits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.report.figures import FigureSpec

Document = Mapping[str, Any]

_SIZES = re.compile(  # but for the bits of activations: "-w4a8" leaves "-a8"
    r"(?<=-)w\d+(?=a\d)|-?[wq]\d+(?!\d*a\d)|-\dbit\b|-g\d+|\+(?:group_size|weight_bits)=-?\d+|:\d+(?:\.\d+)?"
)
COLUMNS = ("recipe", "bits/weight", "MB", "perplexity", "device")
_PLAIN_COLORS = 10
_MANY_FAMILIES = 12  # above this many, a name each would take more room than the figure
_LEGEND_WIDTH = 100  # characters that fit beside each other
_STORED_BITS = 16  # what compression ratios are stated against
_HIGHEST = 4  # times the original's perplexity; what is above would hide how the others differ


@dataclass(frozen=True)
class Measured:
    """One row. name: a recipe, with its settings, or NAME:BITS:GROUP of another toolkit. megabytes: None where nothing
    was written. bits_per_weight: None for the original. stderr: None where it was not taken."""

    name: str
    bits_per_weight: float | None
    megabytes: float | None
    perplexity: float
    stderr: float | None
    device: str

    @property
    def family(self) -> str:
        """The name without bits and group size: what one line of the figure joins."""
        return _SIZES.sub("", self.name)

    def cells(self) -> list[str]:
        """The row as text, under COLUMNS."""
        bits = "" if self.bits_per_weight is None else f"{self.bits_per_weight:.3f}"
        size = "" if self.megabytes is None else f"{self.megabytes:.1f}"
        error = "" if self.stderr is None else f" ± {self.stderr:.3f}"
        return [self.name, bits, size, f"{self.perplexity:.3f}{error}", self.device]


def by_model(documents: Mapping[str, Document]) -> dict[str, list[Measured]]:
    """The rows of all tables by model; a row that names no model is of its table's."""
    models: dict[str, list[Measured]] = {}
    for document in documents.values():
        for row in document["rows"]:
            measured = Measured(
                row.get("recipe") or f"{row['peer']} (peer)",
                row.get("bits_per_weight"),
                row["bytes"] / 1e6 if "bytes" in row else None,
                row["evaluation"]["perplexity"],
                row["evaluation"].get("stderr"),
                row.get("environment", {}).get("device", ""),
            )
            models.setdefault(str(row.get("model") or document["model"]), []).append(measured)
    return models


def quality_figure(model: str, rows: Sequence[Measured]) -> FigureSpec:
    """Perplexity of every row against its compression ratio (nuQmm Fig 6)."""
    return FigureSpec(
        f"Perplexity against compression ratio ({model})",
        "Ratio of 16 bits to the bits per weight of the quantized layers, scales and offsets counted; rows that differ "
        "in bits and group size alone are joined, and plans of a search. The dotted line is the original; what is "
        f"above {_HIGHEST} times its perplexity stands in the table alone. Of more than {_MANY_FAMILIES} lines those "
        "of one recipe, whatever its settings, have one color.",
        lambda axes: _draw(axes, rows),
        height=8.4,
    )


def _draw(axes: Any, rows: Sequence[Measured]) -> None:
    originals = {row.perplexity for row in rows if row.bits_per_weight is None}
    for perplexity in originals:
        axes.axhline(perplexity, color="black", linewidth=0.8, linestyle=":")
    highest = _HIGHEST * min(originals, default=float("inf"))
    families: dict[str, set[tuple[float, float]]] = {}
    for row in rows:
        if row.bits_per_weight is not None and row.perplexity <= highest:
            families.setdefault(row.family, set()).add((_STORED_BITS / row.bits_per_weight, row.perplexity))
    many = len(families) > _MANY_FAMILIES
    names = {family: _without_settings(family) if many else family for family in families}
    colors = _colors(list(dict.fromkeys(names.values())))
    named: set[str] = set()
    for family, points in families.items():
        name = names[family]
        style, size = ("s--", 4) if "(peer)" in family else ("*-", 8) if family == "search" else ("o-", 4)
        label = None if name in named else _shortened(name)
        named.add(name)
        axes.plot(
            *zip(*sorted(points), strict=True), style, color=colors[name], markersize=size, linewidth=1, label=label
        )
    axes.set(xlabel="compression ratio", ylabel="perplexity", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")  # 40, not 4 x 10^1
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    columns = max(1, min(4, _LEGEND_WIDTH // max(map(len, named), default=1)))
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=columns, frameon=False)


def _colors(names: Sequence[str]) -> dict[str, Any]:
    """One for each name, in turn; plans of a search are black."""
    from matplotlib import colormaps

    maps = [colormaps[each] for each in (("tab20", "tab20b") if len(names) > _PLAIN_COLORS else ("tab10",))]
    colors = [each(i) for each in maps for i in range(each.N)]
    return {name: "black" if name == "search" else colors[i % len(colors)] for i, name in enumerate(names)}


def _without_settings(family: str) -> str:
    """A recipe, or a toolkit: "hqq+scale_bits=8" is of hqq, "llamacpp:Q4_K (peer)" of llamacpp."""
    peer = " (peer)" if family.endswith(" (peer)") else ""
    return family.removesuffix(peer).split("+")[0].split(":")[0] + peer


def _shortened(name: str) -> str:
    """The name, cut off where it is wider than the figure."""
    return name if len(name) <= _LEGEND_WIDTH else f"{name[: _LEGEND_WIDTH - 1]}…"
