"""The logic of scripts/bipolar/tables.py: what it refuses, and what it makes of a run."""

from __future__ import annotations

from typing import Any

import pytest

from quantkit.errors import BenchError
from scripts.bipolar import tables

SHAPE = (4096, 4096, 4096)
PEAK = 15.4e15


def test_the_papers_own_time_would_be_refused_here() -> None:
    """29.5 us for W1A2 at 4096^3 is possible on an H200's 15.4 Pop/s, but not on the RTX 3090's 2.3."""
    work = 2 * 4096**3 * 2
    assert tables.percent_of_peak("w1a2", work, 29.5e-6, tables.Unit("binary", PEAK)) == pytest.approx(60.5, abs=0.1)
    with pytest.raises(BenchError, match=r"w1a2: 4\d\d % of this GPU's binary peak; not a valid measurement"):
        tables.percent_of_peak("w1a2", work, 29.5e-6, tables.Unit("binary", 2.3e15))


def test_a_time_at_the_peak_is_allowed_and_one_below_it_is_not() -> None:
    unit = tables.Unit("int8", 1e12)
    assert tables.percent_of_peak("x", 1e12, 1.0, unit) == 100
    with pytest.raises(BenchError, match="int8 peak"):
        tables.percent_of_peak("x", 1e12, 0.98, unit)


def test_an_unknown_gpu_has_no_percentage() -> None:
    assert tables.percent_of_peak("x", 1e12, 1e-9, tables.Unit("binary", None)) is None
    assert "percent_of_peak" not in tables.entry("w2a2", SHAPE, 1e-5)


def test_a_table_compares_with_fp16_and_shows_the_share_of_the_peak() -> None:
    entries: list[dict[str, Any]] = [
        tables.entry("fp16", SHAPE, 200e-6),
        tables.entry("w2a2", SHAPE, 50e-6, "binary", 71.4),
        tables.entry("w8a8", SHAPE, 100e-6, "int8", 71.3),
        tables.entry("w2a2 op", SHAPE, 60e-6, "binary", 60.0),
    ]
    products = tables.render(entries[:3], [SHAPE, (8192, 8192, 8192)])
    assert products.splitlines() == [
        "| us (x fp16, % of peak) | 4096 x 4096 x 4096 |",
        "| --- | --- |",
        "| fp16 | 200.0 (1.00) |",
        "| w2a2 | 50.0 (4.00, 71 %) |",
        "| w8a8 | 100.0 (2.00, 71 % INT8) |",
    ]
    assert "| w2a2 | 2749 |" in tables.render(entries, [SHAPE], tops=True)
    whole_op = tables.report(entries).split("Whole op")[1]
    assert "| w2a2 op | 60.0 (3.33, 60 %) |" in whole_op
    assert "| w2a2 |" not in whole_op


def test_bursts_stand_beside_the_long_measurement_with_their_clocks() -> None:
    long = [
        tables.entry("fp16", SHAPE, 217e-6, "", 64.0, 1500),
        tables.entry("w1a1", SHAPE, 26e-6, "binary", 34.0, 1600),
    ]
    short = [tables.entry("fp16", SHAPE, 190e-6, "", 73.1, 1980), tables.entry("w1a1", SHAPE, 20e-6, "binary", 44.6)]
    assert tables.report(long, short).split("Sustained and in bursts\n\n")[1].splitlines() == [
        "| us (x fp16, % of peak) | 4096 x 4096 x 4096, sustained | burst |",
        "| --- | --- | --- |",
        "| fp16 | 217.0 (1.00, 64 %) at 1500 MHz | 190.0 (1.00, 73 %) at 1980 MHz |",
        "| w1a1 | 26.0 (8.35, 34 %) at 1600 MHz | 20.0 (9.50, 45 %) |",
    ]
    assert "bursts" not in tables.report(long)


def test_a_case_above_the_peak_is_refused_by_name() -> None:
    case = tables.Case("w2a2", SHAPE, [], 2 * 4096**3 * 4, tables.Unit("binary", PEAK), "binary")
    assert case.entry(50e-6, None)["percent_of_peak"] == pytest.approx(71.4, abs=0.1)
    with pytest.raises(BenchError, match=r"w2a2 at \(4096, 4096, 4096\): \d+ % of this GPU's binary peak"):
        case.entry(30e-6, None)
