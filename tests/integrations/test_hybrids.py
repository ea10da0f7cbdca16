"""Models with convolutions, recurrences or a vision tower: their Linears are quantized, the rest stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.models.experts import separate_experts
from quantkit.models.families import block_linears, linear_weight
from quantkit.models.loading import load_model
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.recipe import load_recipe
from tests.tiny import HYBRIDS, SEEING

Tiny = Callable[[str], Path]
LOGIT_ATOL = 1e-4  # fp32 products through another path, four blocks deep
WORDS = 299  # tokens that stand for no image


@pytest.mark.parametrize("family", [*HYBRIDS, *SEEING])
def test_linears_are_quantized_and_the_rest_is_kept(
    family: str, tiny_model: Tiny, calibrated: Tiny, tmp_path: Path
) -> None:
    out, recipe = tmp_path / "out", load_recipe("rtn-w4-g128", ["group_size=32", "compensate=true"])
    model, calibration = str(tiny_model(family)), calibrated(family)
    quantize_model(model, recipe, out, calibration=calibration, options=QuantizeOptions())
    loaded, (original, _) = quantkit.load(str(out)), load_model(model)
    separate_experts(original)
    linears = block_linears(original)
    quantized = {name for name, own in loaded.named_modules() if isinstance(own, QuantizedLinear)}
    assert quantized == linears.keys()
    for name, linear in linears.items():
        linear_weight(linear).data.copy_(loaded.get_submodule(name).dequantize())
    ids = torch.randint(2, WORDS, (1, 24))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, original(ids).logits, atol=LOGIT_ATOL, rtol=0)
    kept = {name: own for name, own in original.state_dict().items() if own.ndim > 2}
    assert kept
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize(
    ("family", "layer"),
    [("gemma3", "language_model.model.layers.0"), ("qwen2_5_vl", "model.layers.0")],
    ids=list(SEEING),
)
def test_files_keep_the_hubs_names(family: str, layer: str, tiny_model: Tiny, tmp_path: Path) -> None:
    recipe = load_recipe("rtn-w4-g128", ["group_size=32"])
    quantize_model(str(tiny_model(family)), recipe, tmp_path / "out", calibration=None, options=QuantizeOptions())
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_model(family), tmp_path / "out"))
    fields = {name.rpartition(".")[0] for name in after}
    assert fields == {name.rpartition(".")[0] for name in before}
    assert f"{layer}.mlp.up_proj.signs" in after
    towers = [name for name in before if "vis" in name]
    assert towers
    assert all(torch.equal(after[name], before[name]) for name in towers)
