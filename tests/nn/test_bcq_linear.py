"""A checkpoint with 8-bit scales, from the recipe to the loaded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import quantkit
from quantkit.cli.app import app
from quantkit.models.families import block_linears, linear_weight
from quantkit.models.loading import load_model
from quantkit.nn.quantized_linear import QuantizedLinear
from tests.pipeline import quantize_tiny

PROMPT = torch.tensor([[5, 40, 100, 7, 22]])
FP32_ATOL = 1e-5  # one GEMM against a GEMM with the same weights through another path
RECIPE = "bcq-w3-g64-s8"
SETTINGS = {"plain": (), "rotated": ("rotate_inputs=true",)}


@pytest.fixture(scope="module", params=SETTINGS)
def checkpoint(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("coded") / "out"
    quantize_tiny(tiny_model("llama"), out, RECIPE, *SETTINGS[request.param])
    return out


def test_model_computes_with_the_dequantized_weights(checkpoint: Path, tiny_model: Callable[[str], Path]) -> None:
    quantized = quantkit.load(str(checkpoint), device="cpu")
    original, _ = load_model(str(tiny_model("llama")))
    for name, module in block_linears(original).items():
        linear_weight(module).data.copy_(quantized.get_submodule(name).dequantize())
    with torch.no_grad():
        torch.testing.assert_close(quantized(PROMPT).logits, original(PROMPT).logits, atol=FP32_ATOL, rtol=0)


def test_saving_a_prepared_model_writes_the_same_tensors(checkpoint: Path, tmp_path: Path) -> None:
    model = quantkit.load(str(checkpoint), device="cpu")
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.prepare()
    model.save_pretrained(tmp_path)
    first, second = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path))
    assert first.keys() == second.keys()
    assert all(first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first)


def test_factors_stay_fp16_whatever_the_model_computes_in(checkpoint: Path) -> None:
    model = quantkit.load(str(checkpoint), device="cpu", dtype=torch.bfloat16)
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    kinds = {name: tensor.dtype for name, tensor in linears[0].tensors.items()}
    assert kinds == {
        "signs": torch.uint8,
        "scales": torch.uint8,
        "offset": torch.int8,
        "scale_factors": torch.float16,
    }
    stored = load_file(checkpoint / "model.safetensors")
    name = next(name for name, module in model.named_modules() if module is linears[0])
    assert all(torch.equal(tensor, stored[f"{name}.{key}"]) for key, tensor in linears[0].tensors.items())


def test_inspect_and_evaluation_read_it(checkpoint: Path, text_file: Path) -> None:
    seen = CliRunner().invoke(app, ["inspect", str(checkpoint)], env={"COLUMNS": "200"})
    assert seen.exit_code == 0, seen.stderr
    line = next(line for line in seen.stdout.splitlines() if "layers.1.mlp.up_proj" in line)
    assert "32 s8" in line
    text = ["--text", str(text_file), "--seq-len", "32", "--max-windows", "2"]
    scored = CliRunner().invoke(app, ["eval", "perplexity", str(checkpoint), *text])
    assert scored.exit_code == 0, scored.stderr


@pytest.mark.cuda
def test_loads_prepared_onto_a_gpu_and_computes_the_same(checkpoint: Path) -> None:
    model = quantkit.load(str(checkpoint), device="cuda", dtype=torch.float16)
    assert all(module.prepared for module in model.modules() if isinstance(module, QuantizedLinear))
    reference = quantkit.load(str(checkpoint), device="cpu")(PROMPT).logits
    difference = (model(PROMPT.cuda()).logits.float().cpu() - reference).norm() / reference.norm()
    assert difference < 2e-2  # fp16 activations through every layer
