"""The calibration file: round trip, merging, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quantkit.calibration.artifact import (
    Calibration,
    CalibrationMeta,
    TextSource,
    check_model,
    load_calibration,
    merge,
    save_calibration,
)
from quantkit.calibration.collectors import Collector, RoutedCollector, sample_positions
from quantkit.errors import CalibrationError, OutputError
from quantkit.models.loading import load_model
from quantkit.stats import SAMPLE_ROWS

MEAN_RTOL = 1e-6  # both means were rounded to fp32 before they are merged
SEQ_LEN = 50
FIELDS = ("absmax", "mean_abs", "mean_square", "histogram", "sample")


def _calibration(x: torch.Tensor, seed: int = 0, fingerprint: str = "f") -> Calibration:
    """q and k share the input x [tokens, K]; o has half of it."""
    layers = {}
    for name, rows in (("q", x), ("o", x / 2)):
        collector = Collector(name, x.shape[1], sample_positions(len(x), seed), x.device)
        collector.update(rows)
        layers[name] = collector.result(len(x))
    windows = torch.arange(len(x), dtype=torch.int32).reshape(-1, SEQ_LEN) + 1000 * seed
    source = TextSource(name="text", sha256="0" * 64, seed=seed, windows=len(windows))
    meta = CalibrationMeta("tiny", fingerprint, (source,), SEQ_LEN, "0.1.0")
    return Calibration({"q": layers["q"], "k": layers["q"], "o": layers["o"]}, windows, meta)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    save_calibration(_calibration(torch.randn(200, 6)), path)
    return path


def test_round_trip_is_exact_and_keeps_sharing(tmp_path: Path) -> None:
    calibration, path = _calibration(torch.randn(200, 6)), tmp_path / "a.safetensors"
    save_calibration(calibration, path)
    read = load_calibration(path)
    assert read.meta == calibration.meta
    assert torch.equal(read.windows, calibration.windows)
    assert read.windows.dtype == torch.int32
    assert list(read.layers) == ["q", "k", "o"]
    assert read.layers["q"] is read.layers["k"]
    for name, stats in calibration.layers.items():
        for field in FIELDS:
            assert torch.equal(getattr(read.layers[name], field), getattr(stats, field))
    with safe_open(path, "pt") as file:
        assert not any(key.startswith("k:") for key in file.keys())  # noqa: SIM118
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


def test_merge_equals_one_collection_of_both_texts() -> None:
    x = torch.randn(500, 6) * torch.logspace(-2, 2, 6)
    merged = merge(_calibration(x[:150], seed=0), _calibration(x[150:], seed=1))
    joint = _calibration(x)
    assert merged.layers["q"] is merged.layers["k"]
    for name in ("q", "o"):
        a, b = merged.layers[name], joint.layers[name]
        assert torch.equal(a.absmax, b.absmax)
        assert torch.equal(a.histogram, b.histogram)
        torch.testing.assert_close(a.mean_abs, b.mean_abs, rtol=MEAN_RTOL, atol=0)
        torch.testing.assert_close(a.mean_square, b.mean_square, rtol=MEAN_RTOL, atol=0)
        assert a.tokens == b.tokens == 500
        assert a.sample.shape == (SAMPLE_ROWS, 6)
    assert merged.windows.shape == (10, SEQ_LEN)
    assert merged.meta.tokens == 500
    assert [source.seed for source in merged.meta.texts] == [0, 1]


def test_merged_sample_keeps_the_proportion_of_tokens_and_the_same_rows_in_every_layer() -> None:
    first, second = _calibration(torch.ones(200, 2)), _calibration(torch.full((600, 2), 2.0), seed=1)
    merged = merge(first, second)
    counts = [int((merged.layers["q"].sample[:, 0] == value).sum()) for value in (1, 2)]
    assert counts == [SAMPLE_ROWS // 4, SAMPLE_ROWS * 3 // 4]
    assert torch.equal(merged.layers["o"].sample, merged.layers["q"].sample / 2)


def test_merge_of_two_short_runs_can_be_saved(tmp_path: Path) -> None:
    merged = merge(_calibration(torch.randn(50, 3)), _calibration(torch.randn(50, 3), seed=1))
    save_calibration(merged, tmp_path / "m.safetensors")
    assert load_calibration(tmp_path / "m.safetensors").layers["q"].sample.shape == (100, 3)


def test_merge_refuses_what_does_not_belong_together() -> None:
    x = torch.randn(200, 6)
    first = _calibration(x)
    with pytest.raises(CalibrationError, match="different models"):
        merge(first, _calibration(x, seed=1, fingerprint="g"))
    with pytest.raises(CalibrationError, match="counted twice"):
        merge(first, _calibration(x))
    other = _calibration(x, seed=1)
    with pytest.raises(CalibrationError, match="windows of 50 and of 25 tokens"):
        merge(first, replace(other, meta=replace(other.meta, seq_len=25)))


def test_calibration_of_another_model_is_refused(tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model("llama")))
    with pytest.raises(CalibrationError, match=r"made for another model \(tiny\)"):
        check_model(_calibration(torch.randn(50, 6)), model)


def _resave(path: Path, **changes: object) -> None:
    """Write the file again with some tensors replaced (or dropped, for None) and the same metadata."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    tensors |= {key.replace("__", ":"): value for key, value in changes.items()}
    save_file({key: value for key, value in tensors.items() if value is not None}, path, metadata=metadata)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q__absmax": None}, "q:absmax"),
        ({"windows": None}, "windows"),
        ({"q__sample": torch.zeros(3, 6)}, r"q:sample is F32\[3, 6\] instead of F32\[128, 6\]"),
        ({"q__mean_abs": torch.zeros(5)}, r"q:mean_abs is F32\[5\]"),
        ({"windows": torch.zeros(2, 50, dtype=torch.int32)}, "windows is"),
    ],
    ids=["absent-tensor", "absent-windows", "short-sample", "misshaped", "other-windows"],
)
def test_damaged_tensors_are_named(saved: Path, changes: dict[str, object], message: str) -> None:
    _resave(saved, **changes)
    with pytest.raises(CalibrationError, match=message):
        load_calibration(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q__absmax": torch.full((6,), -1.0)}, "q:absmax holds values from -1.0"),
        ({"q__mean_abs": torch.full((6,), float("nan"))}, "q:mean_abs holds values from nan"),
        ({"o__sample": torch.full((128, 6), float("inf"))}, "o:sample holds values from inf"),
        ({"windows": torch.full((4, 50), -1, dtype=torch.int32)}, "windows holds values from -1.0"),
        ({"q__absmax": torch.ones(6, dtype=torch.float64)}, r"q:absmax is F64\[6\] instead of F32\[6\]"),
        ({"q__absmax": torch.tensor(1.0)}, r"q:absmax is F32\[\] instead of"),
        ({"q__absmax": torch.ones(0)}, r"q:absmax is F32\[0\] instead of"),
        ({"x__absmax": torch.ones(6)}, "x:absmax is no tensor of a calibration"),
    ],
    ids=["negative", "nan", "inf", "token", "dtype", "scalar", "empty", "unknown"],
)
def test_what_no_calibration_gives_is_refused_without_digests_too(
    changes: dict[str, object], message: str, saved: Path
) -> None:
    with safe_open(saved, "pt") as file:
        document = file.metadata()["quantkit.calibration"]
    _resave(saved, **changes)
    tensors = load_file(saved)
    save_file(tensors, saved, metadata={"quantkit.calibration": document})
    with pytest.raises(CalibrationError, match=message):
        load_calibration(saved)


def test_a_calibration_without_digests_is_read(saved: Path) -> None:
    with safe_open(saved, "pt") as file:
        document = file.metadata()["quantkit.calibration"]
    save_file(load_file(saved), saved, metadata={"quantkit.calibration": document})
    assert list(load_calibration(saved).layers) == ["q", "k", "o"]


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 0},
        {"seq_len": True},
        {"texts": []},
        {"texts": [{"name": "x"}]},
        {"model": 3},
        {"unheard_of": 1},
    ],
    ids=["zero", "bool", "no-texts", "half-a-text", "number", "unknown"],
)
def test_malformed_metadata_is_refused(change: dict[str, object], saved: Path) -> None:
    with safe_open(saved, "pt") as file:
        document = json.loads(file.metadata()["quantkit.calibration"])
    document["meta"] |= change
    save_file(load_file(saved), saved, metadata={"quantkit.calibration": json.dumps(document)})
    with pytest.raises(CalibrationError, match="its metadata is malformed"):
        load_calibration(saved)


def test_every_changed_byte_of_the_values_is_found(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(saved.read_bytes())
    for place in range(len(content) - 400, len(content), 7):
        content[place] ^= 1
        saved.write_bytes(content)
        with pytest.raises(CalibrationError, match=r"digest differs|holds values"):
            load_calibration(saved)
        content[place] ^= 1
    content[-1] ^= 1
    saved.write_bytes(content)
    monkeypatch.setenv("QUANTKIT_VERIFY", "0")
    load_calibration(saved)


def test_tokens_and_channels_that_the_model_lacks_are_refused(
    tiny_model: Callable[[str], Path], calibrated: Callable[[str], Path]
) -> None:
    model, _ = load_model(str(tiny_model("opt")))
    calibration = load_calibration(calibrated("opt"))
    check_model(calibration, model)
    with pytest.raises(CalibrationError, match="holds the token 320 of a vocabulary of 320"):
        check_model(replace(calibration, windows=calibration.windows + 320 - calibration.windows.max()), model)
    name, stats = next(iter(calibration.layers.items()))
    narrow = {**calibration.layers, name: replace(stats, absmax=stats.absmax[:-1])}
    with pytest.raises(CalibrationError, match=f"{name} has 64 input channels"):
        check_model(replace(calibration, layers=narrow), model)


def test_truncated_missing_or_foreign_files_are_refused(saved: Path, tmp_path: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:-10])
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_calibration(saved)
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_calibration(tmp_path / "none.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(CalibrationError, match="not a calibration artifact"):
        load_calibration(tmp_path / "other.safetensors")


def test_unknown_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata={"quantkit.calibration": json.dumps({"schema": 99})})
    with pytest.raises(CalibrationError, match="schema 99; this version reads up to 2"):
        load_calibration(path)


def test_unwritable_place_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="does not exist"):
        save_calibration(_calibration(torch.randn(50, 3)), tmp_path / "none" / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def _with_experts(tokens: tuple[int, ...]) -> Calibration:
    """Experts 0, 1, ... of one block, each with rows of its own size beside a layer that saw all 200."""
    calibration = _calibration(torch.randn(200, 6))
    for index, count in enumerate(tokens):
        collector = RoutedCollector("expert", 6, 0, torch.device("cpu"))
        if count:
            collector.update(torch.randn(count, 6) * (index + 1))
        calibration.layers[f"block.experts.{index}.down"] = collector.result(200)
    return calibration


def test_tokens_of_experts_are_kept_and_added(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_calibration(_with_experts((150, 50, 0)), path)
    read = load_calibration(path)
    assert [read.layers[f"block.experts.{index}.down"].tokens for index in range(3)] == [150, 50, 0]
    assert read.layers["q"].tokens == 200
    other = _with_experts((0, 120, 80))
    other = replace(other, windows=other.windows + 7)
    both = merge(read, other)
    assert [both.layers[f"block.experts.{index}.down"].tokens for index in range(3)] == [150, 170, 80]
    assert torch.equal(both.layers["block.experts.0.down"].mean_square, read.layers["block.experts.0.down"].mean_square)


def test_more_tokens_than_the_text_has_are_refused(tmp_path: Path) -> None:
    path, calibration = tmp_path / "a.safetensors", _with_experts((150,))
    calibration.layers["block.experts.0.down"] = replace(calibration.layers["block.experts.0.down"], tokens=201)
    save_calibration(calibration, path)
    with pytest.raises(CalibrationError, match="201 tokens of 200"):
        load_calibration(path)


def test_an_expert_without_tokens_takes_the_ranges_of_the_others_and_counts_channels_alike() -> None:
    calibration = _with_experts((150, 50, 0))
    first, second = (calibration.layers[f"block.experts.{index}.down"] for index in range(2))
    stats = calibration.stats_of("block.experts.2.down")
    assert torch.equal(stats.absmax, torch.maximum(first.absmax, second.absmax))
    assert len(stats.sample) == SAMPLE_ROWS
    assert torch.equal(stats.mean_square, torch.ones(6))
    assert calibration.stats_of("q") is calibration.layers["q"]
