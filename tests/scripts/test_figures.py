"""The pictures show the rows of the JSON documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import figures

LARGEST = 100_000  # bytes of a picture in the repository


def test_speed_takes_the_rows_of_one_shape() -> None:
    def entry(shape: str, what: str, rows: int, us: float) -> dict[str, object]:
        return {"shape": shape, "what": what, "rows": rows, "us": us}

    own = [entry(figures.SPEED_SHAPE, what, rows, 10.0 + rows) for what in figures.SPEED_LINES for rows in (8, 1, 4096)]
    lines = figures.speed_lines([*own, entry("4096x4096", "fp16", 4, 1.0), entry(figures.SPEED_SHAPE, "fp8", 1, 9.0)])
    assert lines == {what: [(1, 11.0), (8, 18.0)] for what in figures.SPEED_LINES}


def test_bits_take_every_width_of_one_shape_and_number_of_rows() -> None:
    entries = figures.read(figures.BITS_FILE)["entries"]
    own = {entry["what"]: entry["us"] for entry in entries if (entry["shape"], entry["rows"]) == ("4096x14336", 16)}
    lines = figures.bits_lines(entries, 16)
    assert lines["Humming"] == [(2, own["humming-2"]), (3, own["humming-3"]), (4, own["humming-4"])]
    assert lines["fp16"] == [(16, own["fp16"])]


def test_serving_takes_the_settings_of_one_gpu_that_were_measured() -> None:
    steps = {"16": 4.0, "1": 2.0}
    results = {
        f"{figures.SERVING_MODEL} bcq-w4-g128 tp1": {"ms_per_step": steps},
        f"{figures.SERVING_MODEL} fp16 tp2": {"ms_per_step": steps},
        f"{figures.SERVING_MODEL} fp8 tp1": {"error": "exit status 1"},
    }
    assert figures.serving_lines(results) == {"bcq-w4-g128": [(1, 500.0), (16, 4000.0)]}


def test_quality_tells_compensated_recipes_and_peers_apart() -> None:
    points = figures.quality_points("wiki-opt-34m")
    assert points["original"][0][1] == pytest.approx(24.108, abs=1e-3)
    by_bits = {label: dict(found) for label, found in points.items()}
    assert by_bits["bcq, compensated"][3.5] == pytest.approx(25.672, abs=1e-3)
    assert by_bits["bcq"][3.5] == pytest.approx(27.004, abs=1e-3)
    assert by_bits["hqq"][3.5] == pytest.approx(30.214, abs=1e-3)
    assert by_bits["HQQ 0.2.8"][3.25] == pytest.approx(30.499, abs=1e-3)


def test_quality_has_searched_plans_where_they_were_measured() -> None:
    points = figures.quality_points("wiki-opt-34m")
    assert dict(points["searched plans"])[2.5] == pytest.approx(29.405, abs=1e-3)
    assert dict(points["searched plans, tuned"])[2.5] == pytest.approx(27.649, abs=2e-3)  # not with codes
    assert figures.quality_points("smollm2-135m")["searched plans"] == []


def test_quality_tells_tuned_trellis_codes_apart() -> None:
    points = figures.quality_points("wiki-opt-34m")
    assert [perplexity for _, perplexity in points["trellis"]] == pytest.approx([31.14, 25.02, 24.39], abs=1e-2)
    assert [perplexity for _, perplexity in points["trellis, tuned"]] == pytest.approx([29.04, 25.10, 24.39], abs=1e-2)


def test_pictures_are_drawn_and_stay_light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "OUT", tmp_path / "img")
    figures.main()
    drawn = sorted(path.name for path in (tmp_path / "img").iterdir())
    assert drawn == sorted(path.name for path in (figures.RESULTS.parent / "img").iterdir())
    for folder in (tmp_path / "img", figures.RESULTS.parent / "img"):
        assert all(0 < path.stat().st_size < LARGEST for path in folder.iterdir())
