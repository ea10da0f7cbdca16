"""Preparing and restoring QuantizedLinear, on the CPU: the tile order is the same there, and the twin reads it."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.formats.base import PackedWeight
from quantkit.formats.bcq import SCALE_BITS, BcqSpec
from quantkit.nn.quantized_linear import QuantizedLinear
from tests.ops.bcq.cases import random_weight
from tests.pipeline import quantize_tiny


def make_linear(rows: int = 40, columns: int = 328, *, bias: bool = True, scale_bits: int = 16) -> QuantizedLinear:
    weight = random_weight(3, rows, columns, 64, offset=True, scale_bits=scale_bits)
    packed = PackedWeight(BcqSpec(3, 64, True, scale_bits), (rows, columns), weight.stored.named(), {})
    return QuantizedLinear.from_packed(packed, torch.randn(rows) if bias else None, torch.float32)


@pytest.mark.parametrize("scale_bits", SCALE_BITS, ids="s{}".format)
def test_prepared_module_computes_the_same(scale_bits: int) -> None:
    linear, x = make_linear(scale_bits=scale_bits), torch.randn(2, 5, 328)
    expected = linear(x)
    linear.prepare()
    assert torch.equal(linear(x), expected)


@pytest.mark.parametrize("scale_bits", SCALE_BITS, ids="s{}".format)
def test_the_order_for_batches_computes_the_same_and_is_restored_bit_for_bit(scale_bits: int) -> None:
    linear, x = make_linear(scale_bits=scale_bits), torch.randn(2, 5, 328)
    expected, before = linear(x), {name: tensor.clone() for name, tensor in linear.state_dict().items()}
    linear.layout = "batch"
    linear.prepare()
    assert "code_tiles" in linear.held
    assert torch.equal(linear(x), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in linear.state_dict().items())


@pytest.mark.parametrize(("bits", "equal_steps"), [(4, False), (4, True), (2, True), (8, True)])
def test_for_a_few_tokens_four_planes_and_more_in_equal_steps_are_numbers(bits: int, equal_steps: bool) -> None:
    weight = random_weight(bits, 40, 328, 64, offset=True, equal_steps=equal_steps)
    packed = PackedWeight(BcqSpec(bits, 64, True), (40, 328), weight.stored.named(), {})
    linear, x = QuantizedLinear.from_packed(packed, None, torch.float32), torch.randn(3, 328)
    expected = linear(x)
    linear.layout = "few"
    linear.prepare()
    assert ("grid_tiles" if bits >= 4 and equal_steps else "tiles") in linear.held
    assert torch.equal(linear(x), expected)


@pytest.mark.parametrize("offset", [False, True], ids=["plain", "offset"])
def test_weights_in_equal_steps_are_found_and_restored_bit_for_bit(offset: bool) -> None:
    weight = random_weight(4, 40, 328, 64, offset=offset, equal_steps=True)
    packed = PackedWeight(BcqSpec(4, 64, offset), (40, 328), weight.stored.named(), {})
    linear, x = QuantizedLinear.from_packed(packed, None, torch.float32), torch.randn(3, 328)
    expected, before = linear(x), {name: tensor.clone() for name, tensor in linear.state_dict().items()}
    linear.layout = "batch"
    linear.prepare()
    assert "grid_tiles" in linear.held
    assert torch.equal(linear(x), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in linear.state_dict().items())


def test_weights_that_no_product_reads_in_the_order_for_batches_keep_the_other() -> None:
    weight = random_weight(3, 40, 320, 40, offset=True)
    packed = PackedWeight(BcqSpec(3, 40, True), (40, 320), weight.stored.named(), {})
    linear = QuantizedLinear.from_packed(packed, None, torch.float32)
    linear.layout = "batch"
    linear.prepare()
    assert "tiles" in linear.held


def test_prepared_tensors_replace_the_canonical_ones() -> None:
    linear = make_linear()
    linear.prepare()
    assert sorted(name for name, _ in linear.named_parameters()) == ["bias", "scale_tiles", "tiles"]
    assert not hasattr(linear, "signs")


@pytest.mark.parametrize("scale_bits", SCALE_BITS, ids="s{}".format)
def test_state_dict_of_a_prepared_module_is_canonical_bit_for_bit(scale_bits: int) -> None:
    linear = make_linear(scale_bits=scale_bits)
    before = {name: tensor.clone() for name, tensor in linear.state_dict().items()}
    linear.prepare()
    after = linear.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert linear.prepared


def test_state_dict_loads_into_a_prepared_module() -> None:
    source, target = make_linear(), make_linear()
    target.prepare()
    target.load_state_dict(source.state_dict())
    assert target.prepared
    x = torch.randn(3, 328)
    assert torch.equal(target(x), source(x))


def test_moving_to_the_cpu_restores_and_keeps_dtypes() -> None:
    linear = make_linear()
    canonical = {name: tensor.clone() for name, tensor in linear.tensors.items()}
    linear.prepare()
    linear.to(torch.bfloat16)
    assert not linear.prepared
    assert linear.compute_dtype == torch.bfloat16
    assert all(torch.equal(tensor, canonical[name]) for name, tensor in linear.tensors.items())


def test_prepared_module_survives_deepcopy_and_weight_stand_in() -> None:
    linear = make_linear(bias=False)
    linear.prepare()
    twin, x = copy.deepcopy(linear), torch.randn(1, 328)
    assert torch.equal(twin(x), linear(x))
    assert twin.weight.shape == (40, 328)
    assert torch.equal(twin.dequantize(), linear.dequantize())


def test_saving_a_prepared_model_writes_the_checkpoint_it_came_from(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    quantize_tiny(tiny_model("llama"), tmp_path / "first")
    model = quantkit.load(str(tmp_path / "first"), device="cpu")
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.prepare()
    model.save_pretrained(tmp_path / "second")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.cuda
def test_checkpoint_loads_prepared_onto_a_gpu(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    quantize_tiny(tiny_model("llama"), tmp_path / "first")
    model = quantkit.load(str(tmp_path / "first"), device="cuda", dtype=torch.float16)
    assert all(module.prepared for module in model.modules() if isinstance(module, QuantizedLinear))
    ids = torch.arange(10, 20)[None]
    reference = quantkit.load(str(tmp_path / "first"), device="cpu")(ids).logits
    difference = (model(ids.cuda()).logits.float().cpu() - reference).norm() / reference.norm()
    assert difference < 2e-2  # fp16 activations through every layer
