"""The pictures show the rows of the JSON documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import figures

LARGEST = 100_000  # bytes of a picture in the repository


def test_speed_takes_the_rows_of_one_shape() -> None:
    def row(shape: str, method: str, tokens: int, us: float, fp16: float) -> dict[str, object]:
        return {"shape": shape, "method": method, "tokens": tokens, "median_us": us, "baseline_us": fp16}

    results = [
        row(figures.SPEED_SHAPE, method, tokens, 10.0 * bits + tokens, 80.0 + bits)
        for bits, method in ((4, "nuqmm-q4-g128"), (2, "nuqmm-q2-g128"), (1, "nuqmm-q1-g128"), (9, "nuqmm-q1-g32"))
        for tokens in (8, 1)
    ]
    lines = figures.speed_lines([*results, row("16384x16384", "nuqmm-q4-g128", 4, 1.0, 1.0)])
    assert lines["4 bits"] == ([1, 8], [41.0, 48.0])
    assert lines["fp16"] == ([1, 8], [pytest.approx(80 + 7 / 3)] * 2)


def test_quality_tells_compensated_recipes_and_peers_apart() -> None:
    points = figures.quality_points("wiki-opt-34m")
    assert points["original"][0][1] == pytest.approx(24.108, abs=1e-3)
    by_bits = {label: dict(found) for label, found in points.items()}
    assert by_bits["bcq, compensated"][3.5] == pytest.approx(25.672, abs=1e-3)
    assert by_bits["bcq"][3.5] == pytest.approx(27.004, abs=1e-3)
    assert by_bits["hqq"][3.5] == pytest.approx(30.214, abs=1e-3)
    assert by_bits["HQQ 0.2.8"][3.25] == pytest.approx(30.499, abs=1e-3)


def test_pictures_are_drawn_and_stay_light(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "OUT", tmp_path / "img")
    figures.main()
    drawn = sorted(path.name for path in (tmp_path / "img").iterdir())
    assert drawn == sorted(path.name for path in (figures.RESULTS.parent / "img").iterdir())
    for folder in (tmp_path / "img", figures.RESULTS.parent / "img"):
        assert all(0 < path.stat().st_size < LARGEST for path in folder.iterdir())
