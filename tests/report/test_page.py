"""The page holds every number and picture, and nothing from elsewhere."""

from __future__ import annotations

import base64
import importlib.util
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from quantkit.errors import EvaluationError, QuantkitError
from quantkit.report.page import write_report
from tests.pipeline import quantize_tiny
from tests.report import documents

PNG_START = b"\x89PNG\r\n\x1a\n"


class _Page(HTMLParser):
    """Collects text, image sources, and whether tags are balanced."""

    def __init__(self, html: str):
        super().__init__()
        self.text, self.images, self.open, self.links = "", [], [], []  # type: ignore[var-annotated]
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for key, value in attrs if key in ("src", "href")]
        if tag == "img":
            self.images.append(dict(attrs)["src"])
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def results(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    quantize_tiny(tiny_model("opt"), folder / "q4")
    documents.write(folder / "plan.json", documents.search_document())
    documents.write(folder / "d.json", documents.divergence_document())
    documents.write(folder / "p.json", documents.perplexity_document())
    documents.write(folder / "c.json", documents.comparison_document())
    documents.write(folder / "q.json", documents.quality_document())
    return folder


def test_page_is_whole_and_self_contained(results: Path, tmp_path: Path) -> None:
    write_report(results, tmp_path / "r.html", None)
    page = _Page((tmp_path / "r.html").read_text())
    assert page.open == []
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    # search 3, recipes 1, comparison 2 (perplexity, one accuracy), divergence 1, checkpoint 2 (bits, weight error)
    assert len(page.images) == 9
    for image in page.images:
        assert base64.b64decode(image.split(",", 1)[1]).startswith(PNG_START)
    expected = (
        "tiny <model>",
        "l.0.mlp.<up>",
        "0.12500 ± 0.01000",
        "27.375 ± 0.500",
        "0.6250 ± 0.0200",
        "q4",
        "2.7000",
        "27.500 ± 0.500",
        "33.250",
        "hqq:4:64 (peer)",
    )
    for text in (*expected, "model.decoder.layers.1.fc2", "3.25"):
        assert text in page.text, text


def test_figures_also_as_one_png_and_the_same_twice(tmp_path: Path) -> None:
    results = documents.write(tmp_path / "d.json", documents.divergence_document()).parent
    written = write_report(results, tmp_path / "r.html", tmp_path / "r.png")
    assert written == [tmp_path / "r.html", tmp_path / "r.png"]
    first = [path.read_bytes() for path in written]
    assert first[1].startswith(PNG_START)
    write_report(results, tmp_path / "r.html", tmp_path / "r.png")
    assert [path.read_bytes() for path in written] == first


def test_what_was_measured_is_drawn(tmp_path: Path) -> None:
    """The line of a histogram holds the shares of its document, the chosen plan's star its coordinates."""
    from matplotlib.figure import Figure

    from quantkit.report.figures import divergence_figure, search_figures

    axes = Figure().subplots()
    divergence_figure({"d": documents.divergence_document()}).draw(axes)
    assert list(axes.lines[0].get_ydata()) == [0.1, 0.2, 0.4, 0.3, 0.3]
    pareto, bits, sensitivity = search_figures("plan", documents.search_document())
    axes = Figure().subplots()
    pareto.draw(axes)
    (star,) = [line for line in axes.lines if line.get_label() == "chosen"]
    assert (star.get_xdata()[0], star.get_ydata()[0]) == (2.7, 0.05)
    axes = Figure().subplots()
    bits.draw(axes)
    assert axes.images[0].get_array().tolist() == [[2.5, 3.0], [2.75, 3.25]]
    axes = Figure().subplots()
    sensitivity.draw(axes)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["attn.q", "mlp.<up>"]
    assert re.sub("e-0?", "e-", axes.texts[0].get_text()) == "6.2e-2"


def test_recipes_of_one_family_are_joined() -> None:
    """Rows that differ in bits and group alone make one line, at 16 over their bits per weight."""
    from matplotlib.figure import Figure

    from quantkit.report.quality import by_model, quality_figure

    ((model, rows),) = by_model({"q.json": documents.quality_document()}).items()
    axes = Figure().subplots()
    quality_figure(model, rows).draw(axes)
    drawn = {line.get_label(): line for line in axes.lines if not str(line.get_label()).startswith("_")}
    assert drawn.keys() == {"bcq", "search", "hqq (peer)"}
    assert list(drawn["search"].get_ydata()) == [26.5, 33.25]
    assert list(drawn["bcq"].get_xdata()) == [16 / 4.625, 16 / 3.5, 16 / 3.25]
    assert list(drawn["bcq"].get_ydata()) == [25.0, 27.5, 29.0]


def test_names_without_sizes_keep_the_bits_of_activations_and_far_points_stay_in_the_table() -> None:
    from matplotlib.figure import Figure

    from quantkit.report.quality import Measured, quality_figure

    def row(name: str, perplexity: float, bits: float | None = 4.0) -> Measured:
        return Measured(name, bits, None, perplexity, None, "cpu")

    families = {
        "best-3bit": "best",
        "best-2bit+group_size=96": "best",
        "hqq-w3-g128+weight_bits=2+group_size=64+scale_bits=8": "hqq+scale_bits=8",
        "bcq-w3-g64-s8-comp": "bcq-s8-comp",
        "bipolar-w4a8": "bipolar-a8",
        "nuqmm-q3-g128": "nuqmm",
        "search:2.296": "search",
        "gptq:3:128 (peer)": "gptq (peer)",
    }
    assert {name: row(name, 1.0).family for name in families} == families
    axes = Figure().subplots()
    rows = [row("original", 24.0, None), row("bcq-w4-g128", 25.0), row("bcq-w1-g128", 2000.0), row("rtn-w1-g128", 99.0)]
    quality_figure("tiny", rows).draw(axes)
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines[1:]}
    assert drawn == {"bcq": [25.0]}


def test_many_lines_are_named_and_colored_by_their_recipe() -> None:
    """Of up to twelve each has a name of its own, cut off where it is wider than the figure."""
    from matplotlib.figure import Figure

    from quantkit.report.quality import Measured, quality_figure

    def drawn(names: list[str]) -> list[tuple[str, object]]:
        axes = Figure().subplots()
        rows = [Measured(name, 4.0, None, 25.0 + i, None, "cpu") for i, name in enumerate(names)]
        quality_figure("tiny", rows).draw(axes)
        assert [text.get_text() for text in axes.get_legend().get_texts()] == list(
            dict.fromkeys(str(line.get_label()) for line in axes.lines if not str(line.get_label()).startswith("_"))
        )
        return [(str(line.get_label()), line.get_color()) for line in axes.lines]

    settings = [f"bcq-w4-g128+tune.epochs={i}" for i in range(11)]
    few = drawn([*settings, f"bcq-w4{'+rotate=online' * 9}"])
    assert [name for name, _ in few][:2] == ["bcq+tune.epochs=0", "bcq+tune.epochs=1"]
    assert len({color for _, color in few}) == 12
    assert few[-1][0].startswith("bcq+rotate=online")
    assert few[-1][0].endswith("…")
    assert len(few[-1][0]) == 100
    many = drawn([*settings, "llamacpp:IQ2_XS (peer)", "llamacpp:Q4_K (peer)", "search:2.3"])
    assert [name for name, _ in many if not name.startswith("_")] == ["bcq", "llamacpp (peer)", "search"]
    assert len({color for _, color in many}) == 3
    assert many[-1][1] == "black"


@pytest.mark.parametrize(
    ("out", "plot", "message"),
    [
        ("r.htm", None, "`out` .*suffix .html"),
        ("r.html", "r.pdf", "`plot` .*suffix .png"),
        ("none/r.html", None, "does not exist"),
    ],
    ids=["html", "png", "folder"],
)
def test_unfit_paths_are_refused(out: str, plot: str | None, message: str, results: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match=message):
        write_report(results, tmp_path / out, tmp_path / plot if plot else None)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_missing_matplotlib_is_named(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EvaluationError, match=r"pip install 'quantkit\[plot\]'"):
        write_report(results, tmp_path / "r.html", None)
