"""What a GPU does by kernels, all rows at a time, is what the loops do: here with the kernels in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantkit.formats.base import PackedWeight
from quantkit.formats.table import dequantize
from quantkit.jobs.solve_layers import split_rows
from quantkit.ops.solve import op
from quantkit.quantizers import rounding
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.bcq import compensation, kernels, quantizer
from quantkit.quantizers.bcq.kernels import block_columns
from quantkit.quantizers.bcq.quantizer import BcqSettings, quantize
from quantkit.quantizers.gptq import _factor_of_inverse, _reversed_factor
from tests.ops.solve import reference

LOSS_RTOL = 1e-3  # a few weights next to a middle, where sums round in another order
AGREEING = 0.98


@pytest.fixture
def layer() -> LayerInput:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(600, 320, generator=generator) * torch.rand(320, generator=generator).add(0.1)
    return LayerInput("layer", torch.randn(24, 320, generator=generator), hessian=x.t() @ x / 600)


def _loss(layer: LayerInput, packed: PackedWeight) -> float:
    assert layer.hessian is not None
    left = layer.weight - dequantize(packed)
    return ((left @ layer.hessian) * left).sum().item()


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, tensors count as on a GPU whose kernels are the references."""

    def start() -> None:
        fit = quantizer.solve_groups

        def solve_groups(values: Tensor, importance: Tensor, settings: BcqSettings) -> object:
            with monkeypatch.context() as context:
                context.setattr(Tensor, "is_cuda", False)
                return fit(values, importance, settings)

        monkeypatch.setattr(quantizer, "solve_groups", solve_groups)
        monkeypatch.setattr(compensation, "round_columns", reference.round_columns)
        for name in ("descend_columns", "signs", "residual", "refit_scales"):
            monkeypatch.setattr(op, name, getattr(reference, name))
        monkeypatch.setattr(kernels, "_STRETCH", 128)  # several of them
        monkeypatch.setattr(Tensor, "is_cuda", True)

    return start


@pytest.mark.parametrize(
    ("group_size", "offset", "scale_bits", "group_sweeps"),
    [(64, True, 16, 0), (128, False, 16, 2), (88, True, 16, 0), (-1, True, 16, 2), (32, True, 8, 0), (88, True, 8, 2)],
    ids=["64", "no-offset-short-last-group", "88", "row-wise", "8-bit-scales", "8-bit-scales-refined-groups"],
)
def test_kernels_steps_are_the_loops(
    group_size: int,
    offset: bool,
    scale_bits: int,
    group_sweeps: int,
    layer: LayerInput,
    by_kernels: Callable[[], None],
) -> None:
    settings = BcqSettings(
        3, group_size, offset, compensate=True, sweeps=2, scale_bits=scale_bits, group_sweeps=group_sweeps
    )
    looped = quantize(layer, settings)
    by_kernels()
    layer.memo.clear()
    found = quantize(layer, settings)
    agree = (found.tensors["signs"] == looped.tensors["signs"]).float().mean()
    assert agree > AGREEING
    assert _loss(layer, found) == pytest.approx(_loss(layer, looped), rel=LOSS_RTOL)


def test_rounding_is_compensated_by_kernels_too(layer: LayerInput, by_kernels: Callable[[], None]) -> None:
    settings = rounding.RtnSettings(3, 64, compensate=True)
    looped = rounding.quantize(layer, settings)
    by_kernels()
    layer.memo.clear()
    assert _loss(layer, rounding.quantize(layer, settings)) == pytest.approx(_loss(layer, looped), rel=LOSS_RTOL)


@pytest.mark.parametrize(("width", "columns"), [(128, 64), (64, 64), (88, 44), (32, 32), (200, 50), (67, 1), (8, 8)])
def test_no_block_of_columns_reaches_into_the_next_group(width: int, columns: int) -> None:
    assert block_columns(width) == columns


def test_the_inverse_factor_by_half_the_operations_is_the_same(layer: LayerInput) -> None:
    assert layer.hessian is not None
    damped = layer.hessian + 0.01 * torch.eye(320)
    expected, found = _factor_of_inverse(damped), _reversed_factor(damped)
    assert found is not None
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)  # of the condition of the matrix
    assert _reversed_factor(damped - 2 * damped.diagonal().max() * torch.eye(320)) is None


def test_layers_solved_as_one_weight_are_those_solved_alone(layer: LayerInput) -> None:
    settings = BcqSettings(weight_bits=4, group_size=64, compensate=True, scale_bits=8)
    parts = [
        LayerInput(f"part{n}", rows.contiguous(), hessian=layer.hessian)
        for n, rows in enumerate(layer.weight.split([8, 16]))
    ]
    together = list(split_rows(quantize(layer, settings), parts))
    for part, packed in zip(parts, together, strict=True):
        alone = quantize(part, settings)
        assert packed.shape == alone.shape == tuple(part.weight.shape)
        agree = (packed.tensors["signs"] == alone.tensors["signs"]).float().mean()
        assert agree > AGREEING  # products of other sizes round otherwise, which moves weights next to a middle
        assert packed.report["weight_error"] == pytest.approx(alone.report["weight_error"], rel=0.01)


@pytest.mark.cuda
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(
    ("shape", "group_size", "scale_bits"),
    [((96, 512), 128, 16), ((256, 256), 64, 16), ((64, 896), 128, 8), ((37, 200), 88, 16), ((16, 320), -1, 16)],
    ids=str,
)
def test_a_gpu_finds_codes_as_good_as_a_cpus(
    bits: int, shape: tuple[int, int], group_size: int, scale_bits: int
) -> None:
    x = torch.randn(2 * shape[1], shape[1]) * torch.rand(shape[1]).add(0.1)
    weight, hessian = torch.randn(shape), x.t() @ x / len(x)
    settings = BcqSettings(bits, group_size, compensate=True, scale_bits=scale_bits)
    expected = quantize(LayerInput("layer", weight, hessian=hessian), settings)
    found = [quantize(LayerInput("layer", weight.cuda(), hessian=hessian.cuda()), settings) for _ in range(2)]
    assert all(torch.equal(tensor, found[1].tensors[name]) for name, tensor in found[0].tensors.items())
    layer = LayerInput("layer", weight, hessian=hessian)
    assert _loss(layer, found[0].to("cpu")) == pytest.approx(_loss(layer, expected), rel=5 * LOSS_RTOL)
