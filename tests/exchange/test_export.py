"""What is exported comes back to the same bits, says what the format's definition says, or is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.jobs.convert import convert_model
from quantkit.jobs.export import export_model
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.recipe import load_recipe
from tests.cli.calls import refusal, run
from tests.pipeline import quantize_tiny

Model = Callable[[str], Path]
LAYER = "model.decoder.layers.0.fc1"


def _rtn(model: Path, out: Path, bits: int, *more: str) -> Path:
    quantize_tiny(model, out, "rtn-w4-g128", "zero=integer", f"weight_bits={bits}", *more)
    return out


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    model = quantkit.load(str(folder))
    return {name: m.dequantize() for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def _assert_same_tensors(before: Path, after: Path) -> None:
    first, second = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_compressed_tensors_come_back_to_the_same_bits(tiny_model: Model, tmp_path: Path, bits: int) -> None:
    _rtn(tiny_model("opt"), tmp_path / "rtn", bits)
    export_model(tmp_path / "rtn", tmp_path / "out", to="compressed-tensors", exact=True)
    convert_model(tmp_path / "out", tmp_path / "back", exact=True)
    _assert_same_tensors(tmp_path / "rtn", tmp_path / "back")


@pytest.mark.parametrize("group_size", ["8", "64", "-1"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_comes_back_to_the_same_bits(tiny_model: Model, tmp_path: Path, bits: int, group_size: str) -> None:
    _rtn(tiny_model("opt"), tmp_path / "rtn", bits, f"group_size={group_size}")
    export_model(tmp_path / "rtn", tmp_path / "out", to="gptq", exact=True)
    convert_model(tmp_path / "out", tmp_path / "back", exact=True)
    before, after = _weights(tmp_path / "rtn"), _weights(tmp_path / "back")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("to", ["compressed-tensors", "gptq"])
def test_plans_with_bits_per_layer_come_back(tiny_model: Model, tmp_path: Path, to: str) -> None:
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(
        "schema: 1\nmethod: rtn\nsettings: {weight_bits: 4, group_size: 32, zero: integer}\n"
        "keep: [lm_head, '*.layers.1.fc2']\nlayers:\n"
        "  - {match: '*.fc1', weight_bits: 8}\n  - {match: '*.0.self_attn.*', weight_bits: 3, group_size: 64}\n"
    )
    quantize_model(
        str(tiny_model("opt")),
        load_recipe(str(recipe)),
        tmp_path / "rtn",
        calibration=None,
        options=QuantizeOptions("cpu"),
    )
    export_model(tmp_path / "rtn", tmp_path / "out", to=to, exact=True)
    convert_model(tmp_path / "out", tmp_path / "back", exact=True)
    before, after = _weights(tmp_path / "rtn"), _weights(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_was_converted_goes_back_as_it_came(tiny_model: Model, tmp_path: Path) -> None:
    from tests.exchange.sources import coded, gptq_fields, write_source

    document = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}

    def fields(_name: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        return gptq_fields(coded(shape, 4, seed=3, symmetric=True), 4, "gptq")

    source = write_source(tiny_model("opt"), tmp_path / "source", document, fields)
    convert_model(source, tmp_path / "converted", exact=True)
    export_model(tmp_path / "converted", tmp_path / "out", to="gptq", exact=True)
    _assert_same_tensors(source, tmp_path / "out")


def test_smoothquant_becomes_int_quantized_and_back(
    tiny_model: Model, calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    quantize_model(
        str(tiny_model("opt")),
        load_recipe("smoothquant", ["smooth_unfed=false"]),
        tmp_path / "smooth",
        calibration=calibrated("opt"),
        options=QuantizeOptions("cpu"),
    )
    export_model(tmp_path / "smooth", tmp_path / "out", to="compressed-tensors", exact=True)
    convert_model(tmp_path / "out", tmp_path / "back", exact=True)
    _assert_same_tensors(tmp_path / "smooth", tmp_path / "back")
    assert "INT8 activations" in refusal("export", tmp_path / "smooth", "--to", "gptq", "-o", tmp_path / "no")


def test_static_int8_with_a_scale_per_row_goes_back_as_it_came(tiny_model: Model, tmp_path: Path) -> None:
    from tests.exchange.sources import coded, compressed_document, scheme, write_source

    channel, tensor = (scheme(8, symmetric=True, strategy=strategy) for strategy in ("channel", "tensor"))

    def fields(_name: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        it = coded(shape, 8, seed=3, symmetric=True, group_size=shape[1])
        codes = (it.codes - 128).to(torch.int8)
        return {"weight": codes, "weight_scale": it.scales.float(), "input_scale": torch.tensor([0.03])}

    document = compressed_document(channel, "int-quantized", tensor)
    source = write_source(tiny_model("opt"), tmp_path / "source", document, fields)
    convert_model(source, tmp_path / "converted", exact=True)
    export_model(tmp_path / "converted", tmp_path / "out", to="compressed-tensors", exact=True)
    _assert_same_tensors(source, tmp_path / "out")
    (group,) = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "config_groups"
    ].values()
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == ("channel", "tensor")


def test_integers_behind_rotated_inputs_are_refused(
    tiny_model: Model, calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    recipe, options = load_recipe("smoothquant", ["rotate_inputs=true"]), QuantizeOptions("cpu")
    quantize_model(str(tiny_model("opt")), recipe, tmp_path / "in", calibration=calibrated("opt"), options=options)
    said = refusal("export", tmp_path / "in", "--to", "compressed-tensors", "-o", tmp_path / "out")
    assert "its inputs are rotated, which no other format says" in said


def _bits_of(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes of dense streams, by Python's integers."""
    rows = []
    for row in words.view(torch.int32).tolist():
        stream = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(row))
        rows.append([(stream >> (bits * i)) & (2**bits - 1) for i in range(count)])
    return torch.tensor(rows)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_mlx_holds_scale_times_code_plus_bias(tiny_model: Model, tmp_path: Path, bits: int) -> None:
    """MLX's affine mode: w = scale * code + bias, codes a dense stream of little-endian words along a row."""
    quantize_tiny(tiny_model("opt"), tmp_path / "rtn", "rtn-w4-g128", f"weight_bits={bits}")
    result = export_model(tmp_path / "rtn", tmp_path / "out", to="mlx")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    words, scales, biases = (tensors[f"{LAYER}.{field}"] for field in ("weight", "scales", "biases"))
    assert (words.dtype, scales.dtype, biases.dtype) == (torch.uint32, torch.float16, torch.float16)
    codes = _bits_of(words, bits, 64)
    weight = scales.float().repeat_interleave(32, 1) * codes + biases.float().repeat_interleave(32, 1)
    own = _weights(tmp_path / "rtn")[LAYER]
    assert ((weight - own).abs().max() / own.abs().max()).item() <= result.rounding <= 2**-11
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": bits, "mode": "affine"}


def test_mlx_word_by_hand(tiny_model: Model, tmp_path: Path) -> None:
    """MLX's own example of 4 bits: the first of eight codes is in the lowest nibble of a word."""
    _rtn(tiny_model("opt"), tmp_path / "rtn", 4)
    export_model(tmp_path / "rtn", tmp_path / "out", to="mlx")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    scale, bias = (tensors[f"{LAYER}.{field}"][0, 0].float() for field in ("scales", "biases"))
    word = int(tensors[f"{LAYER}.weight"].view(torch.int32)[0, 0]) & 0xFFFFFFFF
    own = _weights(tmp_path / "rtn")[LAYER][0, :8]
    by_hand = [scale * ((word >> shift) & 15) + bias for shift in range(0, 32, 4)]
    torch.testing.assert_close(own, torch.stack(by_hand), rtol=0, atol=2**-11 * abs(bias.item()))


@pytest.mark.parametrize("zero", ["integer", "free"])
def test_humming_holds_scale_times_code_less_zero_point(tiny_model: Model, tmp_path: Path, zero: str) -> None:
    quantize_tiny(tiny_model("opt"), tmp_path / "rtn", "rtn-w4-g128", f"zero={zero}")
    result = export_model(tmp_path / "rtn", tmp_path / "out", to="humming")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    words, scales, points = (tensors[f"{LAYER}.{field}"] for field in ("weight", "weight_scale", "zero_point"))
    points = _bits_of(points.t(), 4, 128).t() if zero == "integer" else points.float()
    codes = _bits_of(words, 4, 64)
    weight = scales.float().repeat_interleave(32, 1) * (codes - points.repeat_interleave(32, 1))
    own = _weights(tmp_path / "rtn")[LAYER]
    assert ((weight - own).abs().max() / own.abs().max()).item() <= result.rounding + 1e-6  # fp32 sums
    assert (result.rounding == 0) == (zero == "integer")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    expected = {"quant_method": "humming", "b_dtype": "uint4", "weight_scale_group_size": 32, "has_zero_point": True}
    assert expected.items() <= config.items()
    assert config["is_fp_zero_point"] == (zero == "free")


REFUSED = {
    "binary coding": ("bcq-w4-g128", (), "compressed-tensors", "its scales are free (binary coding)"),
    "binary coding for mlx": ("bcq-w4-g128", (), "mlx", "vllm serve"),
    "free offsets": ("rtn-w4-g128", (), "gptq", "quantize with zero: integer"),
    "coded scales": ("rtn-w4-g128", ("scale_bits=8",), "humming", "its scales are free"),
    "rotated inputs": ("rtn-w4-g128", ("rotate_inputs=true",), "mlx", "its inputs are rotated, which no other format"),
    "groups": ("rtn-w4-g128", ("zero=integer", "group_size=24"), "gptq", "groups of 24 do not divide its 64 columns"),
    "bits": ("rtn-w4-g128", ("zero=integer", "weight_bits=6"), "gptq", "has 6 bits; GPTQ stores 2, 3, 4, 8"),
    "mlx groups": ("rtn-w4-g128", ("group_size=8",), "mlx", "has 4 bits in groups of 8; MLX runs"),
    "unknown": ("rtn-w4-g128", (), "exl3", "--to is 'exl3'; known: compressed-tensors, gptq, humming, mlx"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_format_does_not_hold_is_refused(tiny_model: Model, tmp_path: Path, case: str) -> None:
    recipe, settings, to, message = REFUSED[case]
    quantize_tiny(tiny_model("opt"), tmp_path / "in", recipe, *settings)
    assert message in refusal("export", tmp_path / "in", "--to", to, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rounding_is_refused_when_exactness_is_asked_for(tiny_model: Model, tmp_path: Path) -> None:
    quantize_tiny(tiny_model("opt"), tmp_path / "rtn", "rtn-w4-g128")
    arguments = ("export", tmp_path / "rtn", "--to", "mlx", "-o", tmp_path / "out")
    assert "mlx rounds its offsets; without --exact" in refusal(*arguments, "--exact")
    result = run(*arguments, "--json", tmp_path / "numbers.json")
    assert result.exit_code == 0, result.output
    assert "rounding  " in result.stdout
    assert json.loads((tmp_path / "numbers.json").read_text())["rounding"] > 0
    assert "not empty; choose another name or remove it" in refusal(*arguments)


def test_a_checkpoint_that_was_altered_is_not_exported(tiny_model: Model, tmp_path: Path) -> None:
    _rtn(tiny_model("opt"), tmp_path / "rtn", 4)
    path = tmp_path / "rtn" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    assert "digest differs" in refusal("export", tmp_path / "rtn", "--to", "gptq", "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()
