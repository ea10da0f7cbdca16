from __future__ import annotations

import pytest
import torch

from quantkit.formats.base import PackedWeight
from quantkit.formats.planes import pack_bits
from quantkit.formats.table import dequantize
from quantkit.formats.trellis import TrellisSpec
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.nn.table import LINEARS
from quantkit.runtime.expanded_weights import expand_weights

N, K = 80, 72


def _packed(*, rotate_inputs: bool = False) -> PackedWeight:
    spec = TrellisSpec(3, 4, rotate_inputs)
    tensors = {
        "signs": pack_bits(torch.randint(0, 2, (3, N, K))),
        "scales": (torch.rand(N, 1) * 0.1).half(),
        "filter": torch.randn(3, 4) * 0.3,
    }
    return PackedWeight(spec, (N, K), tensors, {})


@pytest.mark.parametrize("rotate_inputs", [False, True])
def test_the_product_is_that_of_the_dequantized_weight(rotate_inputs: bool) -> None:
    packed = _packed(rotate_inputs=rotate_inputs)
    linear = QuantizedLinear.from_packed(packed, torch.randn(N), torch.float32)
    x = torch.randn(2, 5, K)
    assert linear.bias is not None
    expected = x @ dequantize(packed).t() + linear.bias
    torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-4)  # sums of 72 terms, turned twice
    assert torch.equal(linear.dequantize(), dequantize(packed))


def test_preparing_changes_no_product_and_no_stored_bit() -> None:
    packed, row = _packed(), LINEARS["trellis"]
    assert row.prepare is not None
    assert row.preparation("batch") is row.prepare
    assert row.prepared_forward is not None
    assert row.restore is not None
    prepared = row.prepare(packed.spec, packed.tensors, packed.shape)
    x = torch.randn(3, K)
    y = row.prepared_forward(packed.spec, prepared, packed.shape, x, None)
    assert torch.equal(y, row.forward(packed.spec, packed.tensors, x, None))
    restored = row.restore(packed.spec, prepared, packed.shape)
    assert restored.keys() == packed.tensors.keys()
    assert all(torch.equal(tensor, packed.tensors[name]) for name, tensor in restored.items())


def test_a_model_is_expanded_once_with_the_same_bits() -> None:
    model = torch.nn.Sequential(QuantizedLinear.from_packed(_packed(), None, torch.float32))
    x = torch.randn(2, K)
    before = model(x)
    assert expand_weights(model).linears == 1
    assert torch.equal(model(x), before)


def test_storage_types_survive_a_change_of_the_models_type() -> None:
    linear = QuantizedLinear.from_packed(_packed(), torch.randn(N), torch.float32).to(torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in linear.held.items()} == {
        "signs": torch.uint8,
        "scales": torch.float16,
        "filter": torch.float32,
    }
