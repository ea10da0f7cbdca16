"""``quantkit search`` from the outside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.checkpoint.read import read_checkpoint
from quantkit.formats.trellis import TrellisSpec
from quantkit.quantizers.trellis.filters import FILTERS
from tests.cli.calls import refusal, run

TRELLIS = ("--set", "method=trellis")


@pytest.fixture(scope="module")
def artifact(tiny_model: Callable[[str], Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "c.safetensors"
    result = run("calibrate", tiny_model("opt"), "--text", text_file, "--windows", "2", "--seq-len", "32", "-o", path)
    assert result.exit_code == 0, result.stderr
    return path


def test_a_plan_is_found_and_applied(
    artifact: Path, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plan, out = tmp_path / "plan.yaml", tmp_path / "q"
    options = ("--max-bpw", "3.25", "--bits", "2,3", "--groups", "32,-1", "--set", "rounds=2")
    result = run("search", tiny_model("opt"), "--calibration", artifact, "-o", plan, *options)
    assert result.exit_code == 0, result.stderr
    document = json.loads(plan.with_suffix(".json").read_text())
    assert f"{document['bits_per_weight']:.4f}" in result.stdout
    assert "proven best" in result.stdout
    applied = run("quantize", tiny_model("opt"), "--recipe", plan, "--calibration", artifact, "-o", out)
    assert applied.exit_code == 0, applied.stderr
    assert f"{document['bits_per_weight']:.3f}" in applied.stdout
    assert {"plan.yaml", "plan.json"} <= {path.name for path in tmp_path.iterdir()}


def test_a_plan_of_the_trellis_format_is_found_and_applied(
    artifact: Path, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    quick = {(bits, taps): FILTERS[bits, taps] for bits, taps in ((2, 4), (3, 3))}
    monkeypatch.setattr("quantkit.quantizers.trellis.quantizer.FILTERS", quick)
    plan, out = tmp_path / "plan.yaml", tmp_path / "q"
    options = ("--max-bpw", "2.75", "--bits", "2,3", *TRELLIS, "--set", "compensate=false", "--set", "measure=1")
    result = run("search", tiny_model("opt"), "--calibration", artifact, "-o", plan, *options)
    assert result.exit_code == 0, result.stderr
    document = json.loads(plan.with_suffix(".json").read_text())
    assert document["options"] == ["q2 row", "q3 row"]
    assert 2.25 < document["bits_per_weight"] <= 2.75
    applied = run("quantize", tiny_model("opt"), "--recipe", plan, "--calibration", artifact, "-o", out)
    assert applied.exit_code == 0, applied.stderr
    assert f"{document['bits_per_weight']:.3f}" in applied.stdout
    specs = {layer.spec for layer in read_checkpoint(out).layers.values()}
    assert specs == {TrellisSpec(2, 4, True), TrellisSpec(3, 3, True)}


def test_rows_that_the_trellis_format_does_not_take_are_refused_before_the_work(
    artifact: Path, tiny_model: Callable[[str], Path], tmp_path: Path, text_file: Path
) -> None:
    calibration, model = tmp_path / "c.safetensors", tiny_model("llama")
    run("calibrate", model, "--text", text_file, "--windows", "2", "--seq-len", "32", "-o", calibration)
    arguments = ("--calibration", calibration, "-o", tmp_path / "plan.yaml", "--max-bpw", "3", *TRELLIS)
    needed = "model.layers.0.self_attn.q_proj: method trellis needs Linears whose out_features are a multiple of 16"
    assert needed in refusal("search", model, *arguments)
    quantize = ("quantize", model, "--recipe", "trellis-w2", "--calibration", calibration, "-o", tmp_path / "out")
    assert needed in refusal(*quantize)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give one budget"),
        (("--max-bpw", "3", "--max-kl", "0.1"), "give one budget"),
        (("--max-bpw", "-1"), "leaves nothing"),
        (("--max-bytes", "many"), "expected a size such as 90MB"),
        (("--max-bpw", "3", "--bits", "2,x"), "--bits 2,x: expected integers"),
        (("--max-bpw", "3", "--bits", "9"), "weight_bits is 9"),
        (("--max-bpw", "3", "--groups", "20"), "group_size is 20"),
        (("--max-bpw", "3", "--set", "method=bqc"), "did you mean 'bcq'"),
        (("--max-bpw", "3", *TRELLIS, "--groups", "32,-1"), "method trellis has no groups"),
        (("--max-bpw", "3", *TRELLIS, "--bits", "5"), "weight_bits is 5; method trellis has 2, 3, 4"),
        (("--max-bpw", "3", *TRELLIS, "--set", "taps=4"), "taps: is what the search chooses"),
    ],
    ids=["none", "two", "negative", "bytes", "bits-text", "bits", "groups", "method", "no-groups", "filter", "taps"],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    options: tuple[str, ...], message: str, artifact: Path, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    assert message in refusal("search", tiny_model("opt"), "--calibration", artifact, "-o", plan, *options)
    assert list(tmp_path.glob("plan*")) == []


def test_an_existing_plan_is_kept(artifact: Path, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("mine")
    arguments = ("--calibration", artifact, "-o", tmp_path / "plan.yaml", "--max-bpw", "3")
    assert "exists already" in refusal("search", tiny_model("opt"), *arguments)
    assert (tmp_path / "plan.yaml").read_text() == "mine"
