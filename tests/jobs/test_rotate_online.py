"""``rotate: online`` and ``rotate_inputs`` through the whole program: written, read, tuned, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantkit.checkpoint.read import read_report
from quantkit.formats.hadamard import rotate
from quantkit.formats.table import dequantize
from quantkit.models.loading import load_model
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.rounding import RtnSettings
from quantkit.quantizers.rounding import quantize as round_to_nearest
from tests.cli.calls import refusal, run

Folders = Callable[[str], Path]
IDS = torch.tensor([[5, 40, 100, 7, 22, 9]])
FP32_ATOL = 1e-5  # products of the same weights by another path
ONLINE = ("--recipe", "bcq-w4-g64-s8-comp", "--set", "group_size=-1", "--set", "rotate=online")
ONLINE += ("--set", "rounds=2", "--set", "sweeps=1")
EVERY_INPUT = ("--recipe", "rtn-w4-g128", "--set", "group_size=32", "--set", "rotate_inputs=true")


def test_a_user_quantizes_evaluates_and_generates(
    tiny_model: Folders, calibrated: Folders, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def program(*arguments: str | Path) -> str:
        done = run(*arguments)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    model, out = tiny_model("llama"), tmp_path / "out"
    calibration = ("--calibration", calibrated("llama"))
    assert "Layers to be quantized" in program("quantize", model, *ONLINE, *calibration, "-o", "out", "--dry-run")
    assert not out.exists()
    program("quantize", model, *ONLINE, *calibration, "-o", "out")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    rotated = {name for group in config["groups"] if group["spec"].get("rotate_inputs") for name in group["layers"]}
    assert rotated == {f"model.layers.{number}.mlp.down_proj" for number in (0, 1)}
    shown = [line for line in program("inspect", "out").splitlines() if "row s8 rotated" in line]
    assert len(shown) == 2
    assert all("mlp.down_proj" in line for line in shown)
    text = ("--text", text_file, "--seq-len", "32", "--max-windows", "2")
    assert "KL" in program("eval", "divergence", model, "out", *text)
    assert program("generate", "out", "--prompt", "the model reads", "--max-new-tokens", "4")


def test_every_way_to_load_it_computes_the_same(tiny_model: Folders, calibrated: Folders, tmp_path: Path) -> None:
    arguments = ("quantize", tiny_model("llama"), *ONLINE, "--calibration", calibrated("llama"), "-o", tmp_path / "out")
    assert run(*arguments).exit_code == 0
    assert read_report(tmp_path / "out")["transforms"]["bcq"] == {"rotated": 72, "seed": 0, "values": True}
    model, _ = load_model(str(tmp_path / "out"), dtype=torch.float32)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    other.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    plain, _ = load_model(str(tmp_path / "out"), dtype=torch.float32)
    for name, module in list(plain.named_modules()):
        if isinstance(module, QuantizedLinear):
            linear = torch.nn.Linear(module.in_features, module.out_features, bias=False)
            linear.weight.data.copy_(module.dequantize())
            plain.set_submodule(name, linear)
    with torch.no_grad():
        logits = model(IDS).logits
        assert torch.equal(other(IDS).logits, logits)
        assert torch.equal(again(IDS).logits, logits)
        torch.testing.assert_close(plain(IDS).logits, logits, rtol=0, atol=FP32_ATOL)


@pytest.mark.parametrize(
    "tune", ["{blocks: 2, block_codes: true, epochs: 0, rate: 0.01}", "{epochs: 3, batch: 2, rate: 0.01, codes: true}"]
)
def test_it_is_tuned(tune: str, tiny_model: Folders, calibrated: Folders, tmp_path: Path) -> None:
    """Codes start from the rotated weights; those of the weights as they were would begin worse than untuned."""
    settings = ("weight_bits=2", "group_size=-1", "rounds=2", "rotate=online", f"tune={tune}")
    chosen = ["--recipe", "bcq-w4-g128", *(part for setting in settings for part in ("--set", setting))]
    command = ["quantize", tiny_model("llama"), *chosen, "--calibration", calibrated("llama")]
    made = run(*command, "-o", tmp_path / "out")
    assert made.exit_code == 0, made.stderr
    report = read_report(tmp_path / "out")
    for tuned in report.get("tuned_blocks", {"model": report.get("tuning")}).values():
        assert tuned["after"] < tuned["before"]
        assert tuned["passes"][0] < tuned["before"]


@pytest.mark.parametrize("family", ["opt", "gpt2", "mixtral"])
def test_every_input_of_any_family_is_rotated(family: str, tiny_model: Folders, tmp_path: Path) -> None:
    """Without calibration, round-to-nearest of the rotated weight."""
    assert run("quantize", tiny_model(family), *EVERY_INPUT, "-o", tmp_path / "out").exit_code == 0
    model, _ = load_model(str(tmp_path / "out"), dtype=torch.float32)
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert linears
    assert all(linear.spec.rotate_inputs for linear in linears)
    with torch.no_grad():
        assert bool(model(IDS).logits.isfinite().all())


def test_the_product_is_that_of_rotated_operands() -> None:
    weight, x = torch.randn(16, 64), torch.randn(5, 64)
    packed = round_to_nearest(LayerInput("layer", weight), RtnSettings(3, 32, rotate_inputs=True))
    expected = round_to_nearest(LayerInput("layer", rotate(weight)), RtnSettings(3, 32))
    linear = QuantizedLinear.from_packed(packed, None, torch.float32)
    assert torch.equal(linear(x), rotate(x) @ dequantize(expected).T)


def test_a_search_quantizes_behind_rotated_inputs(
    tiny_model: Folders, calibrated: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plan, calibration = tmp_path / "plan.yaml", ("--calibration", calibrated("opt"))
    options = ("--max-bpw", "3.5", "--bits", "2,3,4", "--groups", "32,-1", "--set", "measure=1")
    options += ("--set", "rounds=2", "--set", "sweeps=0")
    found = run("search", tiny_model("opt"), *calibration, *options, "--set", "rotate_inputs=true", "-o", plan)
    assert found.exit_code == 0, found.stderr
    applied = run("quantize", tiny_model("opt"), "--recipe", plan, *calibration, "-o", tmp_path / "out")
    assert applied.exit_code == 0, applied.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert all(group["spec"]["rotate_inputs"] for group in config["groups"])


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["quantize", "dry-run"])
@pytest.mark.parametrize(
    ("family", "message"),
    [("opt", "OPTForCausalLM; set rotate=false"), ("mixtral", "MixtralForCausalLM; set rotate=false")],
    ids=["opt", "mixtral"],
)
def test_other_families_are_refused(
    family: str, message: str, more: tuple[str, ...], tiny_model: Folders, calibrated: Folders, tmp_path: Path
) -> None:
    arguments = ("quantize", tiny_model(family), *ONLINE, "--calibration", calibrated(family), *more)
    assert message in refusal(*arguments, "-o", tmp_path / "out")
    assert not list(tmp_path.iterdir())
