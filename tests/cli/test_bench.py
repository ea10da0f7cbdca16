import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.bench import memory, shapes
from quantkit.bench.shapes import ModelShape
from tests.cli.calls import refusal, run


def test_linear_prints_a_row_per_case_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    result = run(
        *("bench", "linear", "--shapes", "32x64", "--method", "bcq-w2-g32", "--rows", "1,2", "--device", "cpu"),
        *("--json", out, "--plot", tmp_path / "bench.png"),
    )
    assert result.exit_code == 0, result.stderr
    assert "times the reference implementation" in result.stdout
    document = json.loads(out.read_text())
    assert [row["tokens"] for row in document["results"]] == [1, 2]
    assert document["environment"]["commit"]
    assert (tmp_path / "bench.png").is_file()


def test_widths_given_apart_make_one_method_each(tmp_path: Path) -> None:
    out, cpu = tmp_path / "bench.json", ("--shapes", "32x64", "--rows", "1", "--device", "cpu")
    result = run("bench", "linear", "--method", "bipolar", "--bits", "w1a2,w2a2", *cpu, "--json", out)
    assert result.exit_code == 0, result.stderr
    assert [row["method"] for row in json.loads(out.read_text())["results"]] == ["bipolar-w1a2", "bipolar-w2a2"]
    assert "choose 1 to 8" in refusal("bench", "linear", "--method", "bipolar", "--bits", "w9a2", *cpu)


def test_bad_requests_are_refused_in_one_line(tmp_path: Path) -> None:
    linear = ("bench", "linear", "--device", "cpu")
    assert "did you mean 'opt-30b'" in refusal(*linear, "--shapes", "opt-30", "--method", "bcq-w4-g128")
    assert "known forms" in refusal(*linear, "--shapes", "4x64", "--method", "int3")
    assert "whole numbers" in refusal(*linear, "--shapes", "4x64", "--method", "bcq-w4-g32", "--rows", "one")
    missing = tmp_path / "absent" / "x.png"
    assert "--plot" in refusal(*linear, "--shapes", "4x64", "--method", "bcq-w4-g32", "--plot", missing)
    assert "not a device" in refusal("bench", "decode", "opt-30b", "--method", "bcq-w4-g128", "--device", "gpu")
    assert "--method: needed" in refusal("bench", "decode", "opt-30b", "--device", "cpu")


def test_prefill_runs_a_folder_and_refuses_bad_requests(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    out, sizes = tmp_path / "prefill.json", ("--batch", "1", "--seq", "4,8", "--device", "cpu")
    result = run("bench", "prefill", tiny_model("opt"), *sizes, "--json", out)
    assert result.exit_code == 0, result.stderr
    assert [row["length"] for row in json.loads(out.read_text())["results"]] == [4, 8]
    assert "as stored" in result.stdout
    assert "unknown; choose fp16" in refusal("bench", "prefill", "opt-13b", "--method", "int3", *sizes)


@pytest.mark.parametrize("packed_only", [True, False], ids=["packed-only", "both-fit"])
def test_decode_says_that_floating_point_does_not_fit(packed_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ModelShape("llama", layers=3, hidden=64, ffn=96, heads=4, kv_heads=2, vocabulary=100)
    monkeypatch.setitem(shapes.MODELS, "tiny", tiny)
    if packed_only:
        whole = memory.model_bytes(tiny, torch.float32)
        monkeypatch.setattr(memory, "free_bytes", lambda device: whole)
    result = run("bench", "decode", "tiny", "--method", "bcq-w2-g32", "--prompt", 4, "--new", 4, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert ("tiny in floating point does not fit into memory: not timed" in result.stderr) == packed_only
    assert ("tiny float" in result.stdout) != packed_only
