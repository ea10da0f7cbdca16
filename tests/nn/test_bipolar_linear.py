"""The bipolar rows of LINEARS: prepared weights restore exactly and multiply alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.formats.bipolar import BipolarSpec, largest_scale
from quantkit.formats.planes import pack_codes
from quantkit.nn.table import LINEARS

ROWS, COLUMNS = 70, 136
SPECS = [
    BipolarSpec(2, 2),
    BipolarSpec(3, 4, -1, "per_tensor"),
    BipolarSpec(4, 8, 64),
    BipolarSpec(4, 16),
    BipolarSpec(4, 4, act_zero=True, rotate_inputs=True),
    BipolarSpec(4, 8, 64, act_zero=True, rotate_inputs=True),
    BipolarSpec(4, 8, 128, act_zero=True, rotate_inputs=True),
    BipolarSpec(4, 8, 128, act_zero=True, rotate_inputs=True, scale_bits=8),
    BipolarSpec(2, 4, scale_bits=8),
    BipolarSpec(3, 8, 64, scale_bits=8),
    BipolarSpec(3, 16, 64, scale_bits=8),
]
FLOAT_RTOL = 2e-2  # fp16 outputs of a product of fp16-rounded operands (per group, weight only)


def _tensors(spec: BipolarSpec, device: torch.device) -> dict[str, Tensor]:
    groups = 1 if spec.group_size == -1 else -(-COLUMNS // spec.group_size)
    codes = torch.randint(0, 1 << spec.weight_bits, (ROWS, COLUMNS), dtype=torch.uint8)
    tensors = {
        "bit_planes": pack_codes(codes, spec.weight_bits),
        "scales": (torch.rand(ROWS, groups) * 0.01 + 0.01).half(),
    }
    if spec.coded:
        most = largest_scale(spec.weight_bits)
        tensors["scales"] = torch.randint(1, most + 1, (ROWS, groups), dtype=torch.uint8)
        tensors["scale_factors"] = (torch.rand(ROWS, 1) * 0.01 + 0.01).half() / most
    if spec.act_bits != 16:
        tensors["act_clip"] = torch.tensor([0.8 if spec.act_granularity == "per_token" else 2.0])
    return {name: tensor.to(device) for name, tensor in tensors.items()}


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_restore_is_the_inverse_of_prepare(spec: BipolarSpec) -> None:
    row, tensors = LINEARS["bipolar"], _tensors(spec, torch.device("cpu"))
    assert row.prepare is not None
    assert row.restore is not None
    restored = row.restore(spec, row.prepare(spec, tensors, (ROWS, COLUMNS)), (ROWS, COLUMNS))
    assert restored.keys() == tensors.keys()
    assert all(torch.equal(restored[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_prepared_product_is_the_canonical_one(spec: BipolarSpec, device: torch.device) -> None:
    row, tensors = LINEARS["bipolar"], _tensors(spec, torch.device("cpu"))
    assert row.prepare is not None
    assert row.prepared_forward is not None
    x, bias = torch.randn(5, COLUMNS).half(), torch.randn(ROWS).half()
    expected = row.forward(spec, tensors, x, bias)
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    prepared = row.prepare(spec, on_device, (ROWS, COLUMNS))
    y = row.prepared_forward(spec, prepared, (ROWS, COLUMNS), x.to(device), bias.to(device)).cpu()
    if "row_sums" in prepared:
        assert torch.equal(y, expected)  # integers, then the same roundings
    else:
        torch.testing.assert_close(y, expected, rtol=FLOAT_RTOL, atol=FLOAT_RTOL)
