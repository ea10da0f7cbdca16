"""What a peer made of the weights is what gets evaluated, at the bits that it stores."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.models.families import block_linears, linear_weight
from quantkit.models.loading import load_model
from scripts.common import run_script
from scripts.quality import peers, table
from scripts.quality.peer import Inputs, Peer, Quantized, Setting, grouped
from tests.cli.calls import run

GROUP_BITS = 20


def test_weights_of_the_peer_are_evaluated(
    tiny_model: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, artifact, document = str(tiny_model("opt")), tmp_path / "c.safetensors", tmp_path / "p.json"
    calibrate = ["calibrate", model, "--text", str(text_file), "--windows", "2", "--seq-len", "16"]
    assert run(*calibrate, "--out", str(artifact)).exit_code == 0
    evaluated = {}

    def halved(inputs: Inputs, setting: Setting) -> Quantized:
        assert inputs.calibration.windows.shape == (2, 16)
        loaded, _ = load_model(inputs.model)
        weights = {name: linear_weight(module).detach() / 2 for name, module in block_linears(loaded).items()}
        return grouped(weights, setting, GROUP_BITS)

    def evaluate(*command: str) -> None:
        loaded, _tokenizer = load_model(command[2 if command[1] == "perplexity" else 3])
        evaluated.update({name: linear_weight(module) for name, module in block_linears(loaded).items()})
        assert run(*command).exit_code == 0

    monkeypatch.setattr(table, "run_quantkit", evaluate)
    monkeypatch.setattr(peers, "PEERS", {"half": Peer("torch", "torch", halved, "w / 2")})
    arguments = [model, "--name", "tiny", "--text", str(text_file), "--calibration", str(artifact)]
    arguments += ["--peers", "half:3:48", "--seq-len", "16", "--max-windows", "2", "--divergence"]
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text()[::-1])
    arguments += ["--other-texts", str(other), "--json", str(document)]
    monkeypatch.setattr(sys, "argv", ["peers.py", *arguments])
    peers.main()
    original = block_linears(load_model(model)[0])
    assert evaluated.keys() == original.keys()
    for name, module in original.items():
        assert torch.equal(evaluated[name], linear_weight(module) / 2), name
    (row,) = json.loads(document.read_text())["rows"]
    shapes = [linear_weight(module).shape for module in original.values()]
    stored = sum(n * (3 * k + GROUP_BITS * -(-k // 48)) for n, k in shapes)
    assert row["bits_per_weight"] == pytest.approx(stored / sum(n * k for n, k in shapes))
    assert (row["model"], row["peer"], row["environment"]["device"]) == ("tiny", "half:3:48", "cpu")
    assert row["calibration_windows"] == 2
    assert row["divergence"]["mean_kl"] > 0
    assert [score["text"] for score in row["other_divergences"]] == ["other.txt"]
    assert row["other_divergences"][0]["mean_kl"] != row["divergence"]["mean_kl"]
    assert str(tmp_path) not in json.dumps(row)  # a reader's command, not this machine's folders
    assert "| tiny | half:3:48 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("gptq:4:128", Setting("gptq", 4, 128)),
        ("exl3:2.5", Setting("exl3", 2.5, 0)),
        ("llamacpp:IQ2_XXS", Setting("llamacpp", 0, 0, "IQ2_XXS")),
    ],
    ids=["groups", "half-a-bit", "type"],
)
def test_a_setting_reads_as_it_is_written(text: str, setting: Setting) -> None:
    assert peers.setting_of(text) == setting
    assert setting.label == text


def test_rows_of_before_windows_were_noted_are_of_32() -> None:
    row = {"model": "m", "peer": "gptq:4:128"}
    assert peers.key_of(row) == peers.key_of(row | {"calibration_windows": 32})
    assert peers.key_of(row) != peers.key_of(row | {"calibration_windows": 128})


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        ("gptk:4:128", "did you mean 'gptq'"),
        ("gptq:4:128", "pip install gptqmodel"),
        ("gptq", "expected NAME:BITS:GROUP"),
    ],
    ids=["unknown", "not-installed", "no-bits"],
)
def test_a_peer_that_cannot_run_is_named_in_one_line(
    peer: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is loaded: neither model nor text exists."""
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    arguments = ["no-model", "--text", "no-text", "--calibration", "no-artifact", "--peers", peer]
    monkeypatch.setattr(sys, "argv", ["peers.py", *arguments, "--json", str(tmp_path / "p.json")])
    with pytest.raises(SystemExit) as ended:
        run_script(peers.main)
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert message in printed.err
