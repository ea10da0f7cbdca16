"""llama.cpp's program is given the Linears and the mean squares of their inputs, and its file is read back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.calibration.artifact import Calibration, load_calibration
from quantkit.errors import EvaluationError
from quantkit.models.families import block_linears, linear_weight
from quantkit.models.loading import load_model
from scripts.common import run_script
from scripts.quality import llamacpp, peers
from scripts.quality.peer import Inputs, Setting
from tests.cli.calls import run

PROGRAM = '''#!{python}
"""Stands for llama-quantize: every tensor becomes Q8_0, its rows times the square root of their importance."""
import sys
import gguf
import numpy as np
print("build = 12 (abc)")
_, importance, *_, source, out, kind, _threads = sys.argv[1:]
if kind == "Q9_9":
    sys.exit("no such type: Q9_9")
wanted = ["--imatrix"] if kind != "Q8_0" else ["--imatrix", "--pure", "--tensor-type"]
assert [word for word in sys.argv if word.startswith("--")] == wanted, sys.argv
weights = {{tensor.name: tensor.data for tensor in gguf.GGUFReader(importance).tensors}}
writer = gguf.GGUFWriter(out, "llama")
for tensor in gguf.GGUFReader(source).tensors:
    mean = weights[tensor.name + ".in_sum2"] / weights[tensor.name + ".counts"]
    blocks = gguf.quants.quantize(tensor.data * np.sqrt(mean), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor(tensor.name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
'''
Q8_0_BITS, BLOCK = 8.5, 32
Q8_0_STEP = 1 / 127  # of the largest of a block: half of it to round, the rest for its scale in fp16


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "llama-quantize"
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    return path


def _calibrated(model: Path, text_file: Path, tmp_path: Path) -> Calibration:
    artifact = str(tmp_path / "c.safetensors")
    calibrate = ["calibrate", str(model), "--text", str(text_file), "--windows", "2", "--seq-len", "16"]
    assert run(*calibrate, "--out", artifact).exit_code == 0
    return load_calibration(Path(artifact))


def _weights(model: Path) -> dict[str, Tensor]:
    loaded, _ = load_model(str(model), dtype=torch.float32)
    return {name: linear_weight(module).detach() for name, module in block_linears(loaded).items()}


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_what_the_program_made_of_the_weights_is_read_back(
    family: str, program: Path, tiny_model: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    model = tiny_model(family)
    calibration, weights = _calibrated(model, text_file, tmp_path), _weights(model)
    inputs = Inputs(str(model), calibration, "cpu", program)
    done = llamacpp.llamacpp(mixed=False)(inputs, Setting("llamacpp", 0, 0, "Q8_0"))
    assert done.weights.keys() == weights.keys()
    for name, weight in weights.items():
        expected = weight * calibration.layers[name].mean_square.sqrt()
        assert (done.weights[name] - expected).abs().max() <= Q8_0_STEP * expected.abs().max(), name
    stored = sum(Q8_0_BITS * n * -(-k // BLOCK) * BLOCK for n, k in (weight.shape for weight in weights.values()))
    assert done.stored_bits == stored
    assert done.told == {"types": {"Q8_0": len(weights)}, "build": "build = 12 (abc)"}


def test_a_mixture_is_asked_for_by_name_and_a_failure_tells_the_programs_last_line(
    program: Path, tiny_model: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    inputs = Inputs(str(model), _calibrated(model, text_file, tmp_path), "cpu", program)
    with pytest.raises(EvaluationError, match="llama-quantize: no such type: Q9_9"):
        llamacpp.llamacpp(mixed=True)(inputs, Setting("llamacpp-mix", 0, 0, "Q9_9"))
    with pytest.raises(EvaluationError, match="Q9_9 is not a type"):
        llamacpp.llamacpp(mixed=False)(inputs, Setting("llamacpp", 0, 0, "Q9_9"))


def test_rows_are_padded_to_whole_blocks() -> None:
    padded = llamacpp.padded(torch.ones(2, 1408), 256)
    assert padded.shape == (2, 1536)
    assert padded.sum() == 2 * 1408
    assert llamacpp.padded(padded, 256).shape == padded.shape


def test_layers_have_the_names_that_mixtures_look_for() -> None:
    assert llamacpp.tensor_name("model.layers.3.self_attn.o_proj") == "blk.3.attn_output.weight"
    assert llamacpp.tensor_name("model.decoder.layers.11.fc2") == "blk.11.ffn_down.weight"
    for other in ("lm_head", "model.layers.3.mlp.experts.0.down_proj", "model.layers.3.mixer.in_proj"):
        with pytest.raises(EvaluationError, match="has no name"):
            llamacpp.tensor_name(other)


def test_a_type_needs_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["no-model", "--text", "no-text", "--calibration", "no-artifact", "--peers", "llamacpp:Q4_K"]
    monkeypatch.setattr(sys, "argv", ["peers.py", *arguments, "--json", str(tmp_path / "p.json")])
    with pytest.raises(SystemExit):
        run_script(peers.main)
    assert "name its file: --llama-quantize PATH" in capsys.readouterr().err
