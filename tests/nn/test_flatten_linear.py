from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantkit.bench.flatten_layers import random_flatten_linear
from quantkit.formats.base import PackedWeight
from quantkit.formats.flatten import FlattenSpec
from quantkit.nn.flatten_linear import forward
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.flatten.quantizer import quantize
from quantkit.quantizers.flatten.settings import FlattenSettings
from quantkit.stats import HISTOGRAM_BINS, LayerStats

HALF_ATOL = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}  # of outputs up to about 20


@pytest.fixture(name="module")
def _module(device: torch.device) -> QuantizedLinear:
    x = torch.randn(64, 20) * torch.logspace(-1, 1, 20)
    stats = LayerStats(x.abs().amax(0), x.abs().mean(0), x.square().mean(0), torch.zeros(HISTOGRAM_BINS), x, 64)
    packed = quantize(LayerInput("proj", torch.randn(12, 20), stats), FlattenSettings(smoothing="smoothquant"))
    return QuantizedLinear.from_packed(packed, torch.randn(12), torch.float32).to(device)


@pytest.mark.parametrize("dtype", HALF_ATOL, ids=["fp32", "fp16", "bf16"])
def test_every_dtype_and_leading_shape_gives_the_same_rows(
    module: QuantizedLinear, device: torch.device, dtype: torch.dtype
) -> None:
    x = (torch.randn(2, 3, 20, device=device)).to(dtype)
    y = module(x)
    assert (y.shape, y.dtype) == ((2, 3, 12), dtype)
    one_by_one = torch.stack([module(row.float()) for row in x.flatten(0, 1)])
    torch.testing.assert_close(y.float().flatten(0, 1), one_by_one, rtol=0, atol=HALF_ATOL[dtype])


def test_one_row_and_a_vector_agree(module: QuantizedLinear, device: torch.device) -> None:
    x = torch.randn(20, device=device)
    assert torch.equal(module(x), module(x[None])[0])


def test_bias_is_added(module: QuantizedLinear, device: torch.device) -> None:
    assert module.bias is not None
    assert torch.equal(module(torch.zeros(1, 20, device=device))[0], module.bias)


def test_casting_the_model_leaves_codes_and_scales_alone(module: QuantizedLinear) -> None:
    dtypes = {name: tensor.dtype for name, tensor in module.tensors.items()}
    module.half()
    assert {name: tensor.dtype for name, tensor in module.tensors.items()} == dtypes


@pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])
def test_prepared_module_computes_the_same_and_saves_the_stored_tensors(device: torch.device, bits: int) -> None:
    x = torch.randn(64, 20) * torch.logspace(-1, 1, 20)
    stats = LayerStats(x.abs().amax(0), x.abs().mean(0), x.square().mean(0), torch.zeros(HISTOGRAM_BINS), x, 64)
    settings = FlattenSettings(bits=bits, smoothing="smoothquant")
    packed = quantize(LayerInput("proj", torch.randn(12, 20), stats), settings)
    plain = QuantizedLinear.from_packed(packed, torch.randn(12), torch.float32)
    stored = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    expected = plain(x)
    plain.to(device)
    plain.prepare()
    assert "tiles" in dict(plain.named_parameters())
    assert torch.equal(plain(x.to(device)).cpu(), expected)
    saved = plain.state_dict()
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name].cpu(), tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])
def test_a_scale_per_row_is_each_rows_own(device: torch.device, bits: int) -> None:
    """Every row of y is that of a Linear that has its scale as the one scale, prepared or not."""
    spec = FlattenSpec(bits, bits, 64, row_scales=True)
    linear = random_flatten_linear(spec, (12, 40), torch.zeros(1, device=device, dtype=torch.float16))
    assert linear.weight_scale.shape == (12, 1)
    x = torch.randn(33, 40, device=device).half()
    y, dense = linear(x), linear.dequantize()
    canonical = {name: tensor.to(device) for name, tensor in linear.state_dict().items()}
    assert torch.equal(forward(spec, canonical, x, None), y)
    for n in range(12):
        one = replace(spec, row_scales=False)
        tensors = {**canonical, "codes": canonical["codes"][n : n + 1], "weight_scale": canonical["weight_scale"][n]}
        row = QuantizedLinear.from_packed(PackedWeight(one, (1, 40), tensors, {}), None, torch.float16)
        assert torch.equal(row(x)[:, 0], y[:, n])
        assert torch.equal(row.dequantize()[0], dense[n])


@pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])
def test_rotated_inputs_are_quantized_as_on_the_cpu(device: torch.device, bits: int) -> None:
    """Bit for bit, as both kernels are."""
    x = torch.randn(33, 96) * torch.logspace(-1, 1, 96)
    stats = LayerStats(x.abs().amax(0), x.abs().mean(0), x.square().mean(0), torch.zeros(HISTOGRAM_BINS), x, 33)
    settings = FlattenSettings(bits=bits, rotate_inputs=True)
    packed = quantize(LayerInput("proj", torch.randn(24, 96), stats), settings)
    linear = QuantizedLinear.from_packed(packed, torch.randn(24), torch.float32)
    expected = [linear(x), linear(x.half())]
    error = (expected[0] - linear.bias - x @ linear.dequantize().T).norm() / expected[0].norm()
    assert error < (0.2 if bits == 4 else 0.02)  # static ranges of the inputs
    linear.to(device)
    assert torch.equal(linear(x.to(device)).cpu(), expected[0])
    linear.prepare()
    assert torch.equal(linear(x.to(device)).cpu(), expected[0])
    assert torch.equal(linear(x.half().to(device)).cpu(), expected[1])
