"""FlattenQuant through the whole job: calibrate, quantize, save, load, evaluate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from quantkit.checkpoint.summary import summarize
from quantkit.cli.app import app
from quantkit.data.corpora import Corpus
from quantkit.evaluation.perplexity import perplexity
from quantkit.formats.flatten import FlattenSpec, segment_capacity
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.models.families import block_linears
from quantkit.models.loading import load_model
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.recipe import load_recipe

RECIPES = ("w8a8-per-tensor", "smoothquant", "flatten-o1", "flatten-o2", "flatten-o3")
FAMILIES = ("llama", "opt", "bloom", "gpt2")
INT8_LOGITS_RTOL = 0.05  # of the logits' spread: 2 blocks of W8A8 on random weights
INT4_LOGITS_RTOL = 0.5


def _quantize(model: Path, calibration: Path, out: Path, recipe: str, *overrides: str) -> Path:
    loaded = load_recipe(recipe, overrides)
    quantize_model(str(model), loaded, out, calibration=calibration, options=QuantizeOptions())
    return out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", ["flatten-o1", "flatten-o3"])
def test_every_family_keeps_its_logits(
    tiny_model: Callable[[str], Path], calibrated: Callable[[str], Path], tmp_path: Path, family: str, recipe: str
) -> None:
    out = _quantize(tiny_model(family), calibrated(family), tmp_path / "q", recipe)
    ids = torch.arange(40).reshape(2, 20) + 3
    with torch.no_grad():
        original = load_model(str(tiny_model(family)))[0](ids).logits
        quantized = load_model(str(out))[0](ids).logits
    bound = INT8_LOGITS_RTOL if recipe == "flatten-o1" else INT4_LOGITS_RTOL
    assert (quantized - original).std() < bound * original.std()


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_evaluates_and_reports(
    tiny_model: Callable[[str], Path], calibrated: Callable[[str], Path], corpus: Corpus, tmp_path: Path, recipe: str
) -> None:
    out = _quantize(tiny_model("opt"), calibrated("opt"), tmp_path / "q", recipe)
    for layer in summarize(out).layers:
        assert layer.format == "flatten"
        assert layer.weight_bits == layer.act_bits
        assert {"act_threshold", "weight_threshold", "flatten_ratio", "clip_rate"} <= layer.measured.keys()
        assert ("kl_ratio" in layer.measured) == (recipe in ("flatten-o2", "flatten-o3"))
        if recipe in ("w8a8-per-tensor", "smoothquant"):
            assert layer.measured["flatten_ratio"] == 0
    results = [
        perplexity(*load_model(str(folder)), corpus, seq_len=64, max_windows=2) for folder in (tiny_model("opt"), out)
    ]
    assert results[1].perplexity == pytest.approx(results[0].perplexity, rel=0.1)


def test_index_maps_and_codes_come_back_bit_for_bit(
    tiny_model: Callable[[str], Path], calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    out = _quantize(tiny_model("llama"), calibrated("llama"), tmp_path / "q", "flatten-o1")
    first, tokenizer = load_model(str(out))
    first.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    second, _ = load_model(str(tmp_path / "again"))
    layers = {n: m for n, m in first.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(layers) == 14
    cut = 0
    for name, module in layers.items():
        other = second.get_submodule(name)
        assert other.spec == module.spec
        assert all(torch.equal(other.tensors[key], tensor) for key, tensor in module.tensors.items())
        slices = segment_capacity(
            module.tensors["source_channel"], module.tensors["source_segment"], module.in_features
        )
        cut += int((slices > 1).sum())
        assert torch.equal(module.tensors["source_channel"][: module.in_features], torch.arange(module.in_features))
    assert cut > 0


@pytest.mark.parametrize(
    ("overrides", "shown"), [((), " row "), (("row_scales=false",), " tensor ")], ids=["row", "tensor"]
)
def test_inspect_says_whether_rows_have_scales(
    overrides: tuple[str, ...],
    shown: str,
    tiny_model: Callable[[str], Path],
    calibrated: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    out = _quantize(tiny_model("opt"), calibrated("opt"), tmp_path / "q", "flatten-o1", *overrides)
    result = CliRunner().invoke(app, ["inspect", str(out)], env={"COLUMNS": "200"})
    assert shown in next(line for line in result.stdout.splitlines() if "layers.1.fc1" in line)


def test_smoothing_is_folded_where_a_norm_or_linear_feeds_and_run_elsewhere(
    tiny_model: Callable[[str], Path], calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    out = _quantize(tiny_model("llama"), calibrated("llama"), tmp_path / "q", "flatten-o1")
    model, _ = load_model(str(out))
    smoothed = {n.rsplit(".", 1)[1]: m.spec.smooth for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    # With fewer key than query heads, v_proj's channels feed o_proj several times: not folded.
    assert smoothed == {name: name == "o_proj" for name in smoothed}
    folded = json.loads((out / "quantkit.json").read_text())["transforms"]["flatten"]["folded_into"]
    assert folded[:3] == [f"model.layers.0.{n}" for n in ("input_layernorm", "post_attention_layernorm", "mlp.up_proj")]


def test_gptq_lowers_the_error_of_int4_models(
    tiny_model: Callable[[str], Path], calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    model, calibration = tiny_model("gpt2"), calibrated("gpt2")
    ids = torch.randint(5, 250, (4, 60))
    with torch.no_grad():
        original = load_model(str(model))[0](ids).logits
        errors = []
        for gptq in ("false", "true"):
            out = _quantize(model, calibration, tmp_path / gptq, "flatten-o3", "bits=4", f"gptq={gptq}")
            errors.append((load_model(str(out))[0](ids).logits - original).square().mean())
    assert errors[1] < errors[0]


def test_no_layer_is_left_unquantized(
    tiny_model: Callable[[str], Path], calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    out = _quantize(tiny_model("bloom"), calibrated("bloom"), tmp_path / "q", "w8a8-per-tensor")
    model, _ = load_model(str(out))
    assert not block_linears(model)
    specs = {m.spec for m in model.modules() if isinstance(m, QuantizedLinear)}
    assert specs == {FlattenSpec(8, 8, 64), FlattenSpec(8, 8, 256)}
