"""The arithmetic of bipolar-INT against int64, for every pair of widths, and the op on every device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.formats.bipolar import (
    ActCoding,
    act_values,
    codes_to_values,
    dequantize_bipolar,
    largest_scale,
    largest_value,
    quantize_activations,
)
from quantkit.formats.planes import pack_codes, unpack_codes
from quantkit.ops.bipolar.op import bipolar_linear, bitwise_product, integer_product, popcount_product

PAIRS = [(p, q) for p in range(1, 9) for q in range(1, 9)]
ODD_SHAPES = [(1, 5, 3), (7, 65, 130), (65, 7, 1030)]
FP32_DOT_RTOL = 1e-5  # fp32 against fp64 over at most 1030 products


def _codes(rows: int, columns: int, bits: int) -> Tensor:
    return torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)


def _exact(x_codes: Tensor, w_codes: Tensor, act_bits: int, weight_bits: int) -> Tensor:
    x, w = codes_to_values(x_codes, act_bits).long(), codes_to_values(w_codes, weight_bits).long()
    return x @ w.T


@pytest.mark.parametrize(("weight_bits", "act_bits"), PAIRS, ids=[f"w{p}a{q}" for p, q in PAIRS])
def test_every_form_of_the_product_equals_int64(weight_bits: int, act_bits: int) -> None:
    x, w = _codes(3, 77, act_bits), _codes(5, 77, weight_bits)
    expected = _exact(x, w, act_bits, weight_bits)
    assert torch.equal(bitwise_product(x, w, act_bits, weight_bits), expected)
    assert torch.equal(popcount_product(x, w, act_bits, weight_bits), expected)
    bound = largest_value(act_bits) * largest_value(weight_bits)
    fast = integer_product(codes_to_values(x, act_bits), codes_to_values(w, weight_bits), bound)
    assert torch.equal(fast.long(), expected)


def test_the_product_is_exact_at_its_largest() -> None:
    x, w = torch.full((1, 4096), 255, dtype=torch.uint8), torch.full((1, 4096), 255, dtype=torch.uint8)
    expected = 255 * 255 * 4096
    assert popcount_product(x, w, 8, 8).item() == expected
    assert integer_product(codes_to_values(x, 8), codes_to_values(w, 8), 255 * 255).item() == expected


def test_one_bit_weights_need_no_all_ones_matrix() -> None:
    """The example of section 3.1: W in {-1, 1} times X in {0, 1} needs W X = 2 W' X - J X; bipolar X needs neither."""
    w = torch.tensor([[-1, 1], [1, 1]])
    x = torch.tensor([[1, 0], [0, 1]])
    w_hat, ones = (w + 1) // 2, torch.ones_like(w)
    assert torch.equal(w @ x, 2 * w_hat @ x - ones @ x)
    x_bipolar = 2 * x - 1
    assert torch.equal(bitwise_product(x.T.to(torch.uint8), w_hat.to(torch.uint8), 1, 1), (w @ x_bipolar).T)


def _operands(
    shape: tuple[int, int, int], weight_bits: int, group_size: int, device: torch.device
) -> dict[str, Tensor | int | bool]:
    rows, outputs, columns = shape
    groups = 1 if group_size == -1 else -(-columns // group_size)
    return {
        "x": torch.randn(rows, columns, device=device),
        "bit_planes": pack_codes(_codes(outputs, columns, weight_bits), weight_bits).to(device),
        "scales": (torch.rand(outputs, groups, device=device) + 0.5).half(),
        "act_clip": torch.tensor([0.7], device=device),
        "bias": torch.randn(outputs, device=device),
        "act_bits": 4,
        "group_size": group_size,
        "per_token": True,
    }


@pytest.mark.parametrize("group_size", [-1, 64], ids="g{}".format)
@pytest.mark.parametrize("weight_bits", [1, 3, 8], ids="w{}".format)
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=[f"{m}x{n}x{k}" for m, n, k in ODD_SHAPES])
def test_linear_is_the_product_of_the_dequantized_operands(
    shape: tuple[int, int, int], weight_bits: int, group_size: int
) -> None:
    given = _operands(shape, weight_bits, group_size, torch.device("cpu"))
    codes, step = quantize_activations(given["x"], given["act_clip"], 4, True)  # type: ignore[arg-type]
    x_hat = codes_to_values(codes, 4).double() * step
    weight = dequantize_bipolar(given["bit_planes"], given["scales"], shape[2], group_size).double()  # type: ignore[arg-type]
    expected = x_hat @ weight.T + given["bias"]
    torch.testing.assert_close(bipolar_linear(**given).double(), expected, rtol=FP32_DOT_RTOL, atol=1e-3)


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("zero", [False, True], ids=["symmetric", "zero"])
@pytest.mark.parametrize("group_size", [-1, 64], ids="g{}".format)
def test_linear_is_that_of_int64_and_fp64(group_size: int, zero: bool, rotated: bool) -> None:
    """Every group's integer sum in int64, scaled and added up in fp64."""
    given = _operands((7, 65, 1160), 4, group_size, torch.device("cpu"))
    x, clip, coding = given["x"], given["act_clip"], ActCoding(4, True, zero, rotated)
    values, step = act_values(x, clip, coding)  # type: ignore[arg-type]
    weight = codes_to_values(unpack_codes(given["bit_planes"], 1160), 4).long()  # type: ignore[arg-type]
    width, scales = (1160 if group_size == -1 else group_size), given["scales"].double()  # type: ignore[union-attr]
    expected = given["bias"].double().expand(7, -1).clone()  # type: ignore[union-attr]
    for group, start in enumerate(range(0, 1160, width)):
        sums = values.long()[:, start : start + width] @ weight[:, start : start + width].T
        expected += sums.double() * step.double() * scales[:, group]
    y = bipolar_linear(**given, act_zero=zero, rotate_inputs=rotated)
    torch.testing.assert_close(y.double(), expected, rtol=FP32_DOT_RTOL, atol=1e-3)


@pytest.mark.parametrize(("weight_bits", "act_bits"), PAIRS, ids=[f"w{p}a{q}" for p, q in PAIRS])
def test_the_product_with_zero_points_is_what_the_kernels_recover(weight_bits: int, act_bits: int) -> None:
    """4 U_x.U_w - 2 c_w rowsum(U_x) + 2 z (K c_w - 2 rowsum(U_w)): the c_x of planes.cuh is 2 z of the token."""
    x, w = _codes(3, 77, act_bits).long(), _codes(5, 77, weight_bits).long()
    zero = torch.randint(0, largest_value(act_bits) + 1, (3, 1))
    c_w = largest_value(weight_bits)
    expected = (2 * (x - zero)) @ (2 * w - c_w).T
    recovered = 4 * x @ w.T - 2 * c_w * x.sum(1)[:, None] + 2 * zero * (77 * c_w - 2 * w.sum(1))[None, :]
    assert torch.equal(recovered, expected)


@pytest.mark.parametrize("group_size", [-1, 64, 128], ids="g{}".format)
@pytest.mark.parametrize(
    ("weight_bits", "act_bits"), [(1, 8), (4, 8), (4, 4), (6, 2)], ids=["w1a8", "w4a8", "w4a4", "w6a2"]
)
def test_with_scale_codes_linear_is_one_sum_of_integers(weight_bits: int, act_bits: int, group_size: int) -> None:
    given = _operands((7, 65, 1160), weight_bits, group_size, torch.device("cpu")) | {
        "act_bits": act_bits,
        "bias": None,
    }
    scales, factors = torch.randint(0, largest_scale(weight_bits) + 1, given["scales"].shape), torch.rand(65, 1).half()  # type: ignore[union-attr]
    values, step = act_values(given["x"], given["act_clip"], ActCoding(act_bits, zero=True))  # type: ignore[arg-type]
    weight = codes_to_values(unpack_codes(given["bit_planes"], 1160), weight_bits).long()  # type: ignore[arg-type]
    weight = weight * scales.repeat_interleave(1160 if group_size == -1 else group_size, 1)[:, :1160]
    expected = (values.long() @ weight.T).float() * (step * factors.float().T)
    given["scales"] = scales.to(torch.uint8)
    assert torch.equal(bipolar_linear(**given, act_zero=True, scale_factors=factors), expected)


def test_weight_only_leaves_activations_alone() -> None:
    given = _operands((7, 65, 130), 3, 64, torch.device("cpu")) | {"act_clip": None, "act_bits": 16}
    weight = dequantize_bipolar(given["bit_planes"], given["scales"], 130, 64)  # type: ignore[arg-type]
    expected = torch.nn.functional.linear(given["x"], weight, given["bias"])  # type: ignore[arg-type]
    assert torch.equal(bipolar_linear(**given), expected)


def test_linear_keeps_leading_dimensions_and_dtype() -> None:
    given = _operands((6, 65, 130), 2, -1, torch.device("cpu"))
    x = given["x"].reshape(2, 3, 130).half()  # type: ignore[union-attr]
    y = bipolar_linear(**(given | {"x": x}))
    assert y.shape == (2, 3, 65)
    assert y.dtype == torch.float16
