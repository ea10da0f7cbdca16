"""Sources of every format become checkpoints whose weights are the source's own, to the bit where that is promised."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.errors import CheckpointError
from quantkit.exchange.summary import summarize_source
from quantkit.jobs.convert import ConvertResult, convert_model
from quantkit.nn.quantized_linear import QuantizedLinear
from tests.exchange.sources import (
    Coded,
    awq_fields,
    coded,
    compressed_document,
    gptq_fields,
    linears_of,
    packed_fields,
    scheme,
    write_source,
)

Model = Callable[[str], Path]
ROUNDING = 2**-11  # of the offset, which is no larger than the largest weight of its group


class Sources:
    """Writes one source and remembers what each Linear stands for."""

    def __init__(self, model: Path, out: Path):
        self.model, self.out = model, out
        self.coded: dict[str, Coded] = {}

    def write(
        self, document: dict[str, Any], fields: Callable[[Coded], dict[str, torch.Tensor]], bits: int, **how: Any
    ) -> Path:
        def of(name: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
            self.coded[name] = coded(shape, bits, seed=len(self.coded), **how)
            return fields(self.coded[name])

        return write_source(self.model, self.out, document, of)


@pytest.fixture
def sources(tiny_model: Model, tmp_path: Path) -> Sources:
    return Sources(tiny_model("opt"), tmp_path / "source")


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    model = quantkit.load(str(folder))
    return {name: m.dequantize() for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def _assert_exact(sources: Sources, folder: Path, result: ConvertResult) -> None:
    found = _weights(folder)
    assert found.keys() == sources.coded.keys()
    for name, it in sources.coded.items():
        assert torch.equal(found[name].to(it.scales.dtype), it.weight), name
    assert (result.exact, result.rounding) == (len(found), 0)


def _gptq(bits: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": "gptq_v2", **more}


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_gptq_is_exact(sources: Sources, tmp_path: Path, bits: int, version: str) -> None:
    document = _gptq(bits, checkpoint_format=version)
    source = sources.write(document, lambda it: gptq_fields(it, bits, version), bits, symmetric=True)
    result = convert_model(source, tmp_path / "out")
    _assert_exact(sources, tmp_path / "out", result)
    assert all(report["extra_planes"] == 0 for report in result.report.values())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_zero_points_are_exact_with_a_plane_more(sources: Sources, tmp_path: Path, bits: int) -> None:
    source = sources.write(_gptq(bits), lambda it: gptq_fields(it, bits), bits, symmetric=False)
    _assert_exact(sources, tmp_path / "out", convert_model(source, tmp_path / "out", exact=True))


def test_zero_points_round_by_what_is_stated_otherwise(sources: Sources, tmp_path: Path) -> None:
    source = sources.write(_gptq(4), lambda it: gptq_fields(it, 4), 4, symmetric=False)
    result = convert_model(source, tmp_path / "out")
    found = _weights(tmp_path / "out")
    for name, it in sources.coded.items():
        largest = it.scales.double() * torch.maximum(it.zeros, 15 - it.zeros)
        exact = it.scales.double().repeat_interleave(32, dim=1) * (it.codes - it.zeros.repeat_interleave(32, dim=1))
        error = ((found[name].double() - exact).abs() / largest.repeat_interleave(32, dim=1)).max()
        assert error <= result.report[name]["rounding"] + 1e-6
    assert 0 < result.rounding <= ROUNDING
    assert result.exact < result.layers


def test_eight_bits_with_zero_points_cannot_be_exact(sources: Sources, tmp_path: Path) -> None:
    source = sources.write(_gptq(8), lambda it: gptq_fields(it, 8), 8, symmetric=False)
    with pytest.raises(CheckpointError, match="without `exact` they are rounded"):
        convert_model(source, tmp_path / "out", exact=True)
    assert not (tmp_path / "out").exists()


def test_groups_in_another_order_are_put_in_order(sources: Sources, tmp_path: Path) -> None:
    def swapped(it: Coded) -> dict[str, torch.Tensor]:
        fields = gptq_fields(it, 4)
        order = torch.arange(fields["scales"].shape[0]).flip(0)
        index = order.repeat_interleave(32).int()
        return {**fields, "scales": fields["scales"][order], "qzeros": fields["qzeros"][order], "g_idx": index}

    source = sources.write(_gptq(4), swapped, 4, symmetric=False)
    _assert_exact(sources, tmp_path / "out", convert_model(source, tmp_path / "out", exact=True))


def test_columns_of_a_group_that_are_apart_are_refused(sources: Sources, tmp_path: Path) -> None:
    def shuffled(it: Coded) -> dict[str, torch.Tensor]:
        fields = gptq_fields(it, 4)
        return {**fields, "g_idx": fields["g_idx"][torch.randperm(len(fields["g_idx"]))]}

    source = sources.write(_gptq(4, desc_act=True), shuffled, 4, symmetric=True)
    with pytest.raises(CheckpointError, match=r"g_idx: the columns of a group are apart \(desc_act\)"):
        convert_model(source, tmp_path / "out")


def test_awq_is_exact(sources: Sources, tmp_path: Path) -> None:
    document = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    source = sources.write(document, awq_fields, 4, symmetric=False)
    _assert_exact(sources, tmp_path / "out", convert_model(source, tmp_path / "out", exact=True))


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("group_size", [32, 128], ids=["group", "channel"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7])
def test_packed_compressed_tensors_are_exact(
    sources: Sources, tmp_path: Path, bits: int, group_size: int, symmetric: bool
) -> None:
    strategy = {"strategy": "group", "group_size": 32} if group_size == 32 else {"strategy": "channel"}
    document = compressed_document(scheme(bits, symmetric=symmetric, **strategy))
    source = sources.write(
        document,
        lambda it: packed_fields(it, bits, symmetric=symmetric),
        bits,
        symmetric=symmetric,
        group_size=group_size,
    )
    _assert_exact(sources, tmp_path / "out", convert_model(source, tmp_path / "out", exact=True))


def test_static_int8_of_both_sides_becomes_flatten(sources: Sources, tmp_path: Path) -> None:
    tensor = scheme(8, symmetric=True, strategy="tensor")
    document = compressed_document(tensor, "int-quantized", tensor)

    def fields(it: Coded) -> dict[str, torch.Tensor]:
        codes = (it.codes - 128).to(torch.int8)
        return {"weight": codes, "weight_scale": it.scales[:1, 0].float(), "input_scale": torch.tensor([0.03])}

    source = sources.write(document, fields, 8, symmetric=True, group_size=128)
    result = convert_model(source, tmp_path / "out")
    model = quantkit.load(str(tmp_path / "out"))
    for name, it in sources.coded.items():
        module = model.get_submodule(name)
        assert (module.format_name, module.spec.act_bits) == ("flatten", 8)
        exact = (it.codes - 128).float() * it.scales[0, 0].float()
        assert torch.equal(module.dequantize(), exact)
        assert module.act_scale.item() == torch.tensor(0.03).item()
    assert result.exact == result.layers


def test_static_int8_with_a_scale_per_row_becomes_flatten(sources: Sources, tmp_path: Path) -> None:
    channel, tensor = (scheme(8, symmetric=True, strategy=strategy) for strategy in ("channel", "tensor"))
    document = compressed_document(channel, "int-quantized", tensor)

    def fields(it: Coded) -> dict[str, torch.Tensor]:
        codes = (it.codes - 128).to(torch.int8)
        return {"weight": codes, "weight_scale": it.scales, "input_scale": torch.tensor([0.03])}

    source = sources.write(document, fields, 8, symmetric=True, group_size=128)
    result = convert_model(source, tmp_path / "out")
    model = quantkit.load(str(tmp_path / "out"))
    for name, it in sources.coded.items():
        module = model.get_submodule(name)
        assert (module.format_name, module.spec.act_bits, module.spec.row_scales) == ("flatten", 8, True)
        assert torch.equal(module.dequantize(), (it.codes - 128).float() * it.scales.float())
    assert result.exact == result.layers


def test_static_activations_beside_groups_of_columns_are_refused(sources: Sources, tmp_path: Path) -> None:
    groups, tensor = scheme(8, symmetric=True, strategy="group", group_size=32), scheme(8, symmetric=True)
    document = compressed_document(groups, "int-quantized", tensor)

    def fields(it: Coded) -> dict[str, torch.Tensor]:
        codes = (it.codes - 128).to(torch.int8)
        return {"weight": codes, "weight_scale": it.scales, "input_scale": torch.tensor([0.03])}

    source = sources.write(document, fields, 8, symmetric=True)
    with pytest.raises(CheckpointError, match="one scale or one per row; pass `weights_only`"):
        convert_model(source, tmp_path / "out")


def test_dynamic_activations_are_refused_or_left_out(sources: Sources, tmp_path: Path) -> None:
    inputs = scheme(8, symmetric=True, strategy="token") | {"dynamic": True}
    document = compressed_document(scheme(8, symmetric=True, strategy="channel"), "int-quantized", inputs)

    def fields(it: Coded) -> dict[str, torch.Tensor]:
        return {"weight": (it.codes - 128).to(torch.int8), "weight_scale": it.scales}

    source = sources.write(document, fields, 8, symmetric=True, group_size=128)
    with pytest.raises(CheckpointError, match="pass `weights_only`"):
        convert_model(source, tmp_path / "out")
    result = convert_model(source, tmp_path / "out", weights_only=True)
    _assert_exact(sources, tmp_path / "out", result)
    assert result.notes == {"activations left in floating point": result.layers}


@pytest.mark.parametrize(
    ("strategy", "inputs", "bits"),
    [
        ("tensor", {"strategy": "tensor"}, 8),
        ("channel", {"strategy": "token", "dynamic": True}, 4),
        ("channel", None, 16),
    ],
    ids=["static INT8", "INT4 per token", "floating point"],
)
def test_inspect_shows_the_bits_of_a_sources_activations(
    sources: Sources, strategy: str, inputs: dict[str, Any] | None, bits: int
) -> None:
    """Also where ``convert`` would refuse them or leave them out."""
    stated = scheme(bits, symmetric=True) | inputs if inputs else None
    document = compressed_document(scheme(8, symmetric=True, strategy=strategy), "int-quantized", stated)

    def fields(it: Coded) -> dict[str, torch.Tensor]:
        scales = it.scales[:1, 0] if strategy == "tensor" else it.scales
        return {"weight": (it.codes - 128).to(torch.int8), "weight_scale": scales}

    source = sources.write(document, fields, 8, symmetric=True, group_size=128)
    assert {(layer.weight_bits, layer.act_bits) for layer in summarize_source(source).layers} == {(8, bits)}


def test_all_other_tensors_and_files_stay_as_they_are(sources: Sources, tmp_path: Path) -> None:
    source = sources.write(_gptq(4), lambda it: gptq_fields(it, 4), 4, symmetric=True)
    convert_model(source, tmp_path / "out")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    kept = [name for name in before if name.rpartition(".")[2] not in ("qweight", "qzeros", "scales", "g_idx")]
    assert len(kept) > 10
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_biases_of_zeros_that_a_model_has_no_place_for_are_dropped(tiny_model: Model, tmp_path: Path) -> None:
    sources = Sources(tiny_model("llama"), tmp_path / "source")
    document = compressed_document(scheme(4, symmetric=True, strategy="group", group_size=8))

    def fields(it: Coded) -> dict[str, torch.Tensor]:
        return {**packed_fields(it, 4, symmetric=True), "bias": torch.zeros(it.codes.shape[0])}

    source = sources.write(document, fields, 4, symmetric=True, group_size=8)
    _assert_exact(sources, tmp_path / "out", convert_model(source, tmp_path / "out", exact=True))
    tensors = load_file(source / "model.safetensors")
    name = f"{next(iter(sources.coded))}.bias"
    save_file({**tensors, name: tensors[name] + 1}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match="the model's Linear has none"):
        convert_model(source, tmp_path / "again")


def test_a_layer_may_have_bits_of_its_own(sources: Sources, tmp_path: Path) -> None:
    """GPTQModel's ``dynamic``."""
    names = list(linears_of(sources.model))

    def of(name: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
        bits = 8 if name == names[0] else 4
        sources.coded[name] = coded(shape, bits, seed=len(sources.coded), symmetric=True)
        return gptq_fields(sources.coded[name], bits)

    document = _gptq(4) | {"dynamic": {f"+:^{re.escape(names[0])}$": {"bits": 8}}}
    source = write_source(sources.model, sources.out, document, of)
    _assert_exact(sources, tmp_path / "out", convert_model(source, tmp_path / "out"))
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["groups"]
    assert sorted(group["spec"]["weight_bits"] for group in groups) == [4, 8]


def test_the_same_source_gives_the_same_bytes(sources: Sources, tmp_path: Path) -> None:
    source = sources.write(_gptq(3), lambda it: gptq_fields(it, 3), 3, symmetric=True)
    for out in ("a", "b"):
        convert_model(source, tmp_path / out)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
