"""The solvers' kernels in plain PyTorch, under the names and with the arguments of quantkit/ops/solve/op.py."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.ops.solve.op import ColumnCodes
from quantkit.quantizers.bcq.levels import Coding
from quantkit.quantizers.bcq.systems import solve_positive

MOST_CODES = 255.0, 127.0  # of 8-bit scales and offsets


def round_columns(values: Tensor, factor: Tensor, group: ColumnCodes) -> tuple[Tensor, Tensor]:
    rows, levels = values.clone(), Coding(group.scales, group.offset)
    stored, errors = torch.empty_like(rows), torch.empty_like(rows)
    for i in range(len(rows)):
        codes, nearest = levels.encode(rows[i][:, None])
        group.codes[:, i], stored[i] = codes[:, 0].to(torch.uint8), nearest[:, 0]
        errors[i] = (rows[i] - stored[i]) / factor[i, i]
        rows[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)
    return stored, errors


def descend_columns(pressure: Tensor, hessian: Tensor, group: ColumnCodes) -> Tensor:
    levels, before = Coding(group.scales, group.offset), _levels(group)
    moved = torch.zeros_like(before.t())
    for k in range(len(moved)):
        residual = pressure[:, k] - hessian[:k, k] @ moved[:k]
        codes, nearest = levels.encode((before[:, k] + residual / hessian[k, k])[:, None])
        group.codes[:, k], moved[k] = codes[:, 0].to(torch.uint8), nearest[:, 0] - before[:, k]
    return moved


def signs(codes: Tensor, bits: int, *, offset: bool) -> Tensor:
    planes = [((codes >> i) & 1).float() * 2 - 1 for i in range(bits)]
    return torch.stack([*planes, torch.ones_like(planes[0])] if offset else planes, dim=1)


def residual(weight: Tensor, codes: Tensor, scales: Tensor, offset: Tensor, width: int) -> Tensor:
    groups = range(0, weight.shape[1], width)
    parts = [ColumnCodes(codes[:, k : k + width], scales[:, :, i], offset[:, i]) for i, k in enumerate(groups)]
    return weight - torch.cat([_levels(part) for part in parts], dim=1)


def refit_scales(
    products: Tensor, pressure: Tensor, group: ColumnCodes, factors: Tensor | None, *, proximal: float
) -> Tensor:
    bits, offset = group.bits, products.shape[1] > group.bits
    basis = signs(group.codes, bits, offset=offset)
    normal = (products @ basis.transpose(1, 2)).double()
    diagonal = normal.diagonal(dim1=1, dim2=2)
    diagonal += proximal * diagonal.mean(dim=-1, keepdim=True) + torch.finfo(torch.float32).tiny
    step = solve_positive(normal, (basis @ pressure[..., None]).double()[..., 0]).float()
    before = torch.cat([group.scales, group.offset[None]] if offset else [group.scales]).t()
    after = _rounded(before + step, normal, bits, factors)
    turned = (after[:, :bits] < 0) & (factors is not None)
    for i in range(bits):
        group.codes.bitwise_xor_(turned[:, i, None].to(torch.uint8) << i)
    group.scales.copy_(torch.where(turned, -after[:, :bits], after[:, :bits]).t())
    if offset:
        group.offset.copy_(after[:, bits])
    return torch.einsum("nu,nug->ng", after - before, basis)


def _rounded(wanted: Tensor, normal: Tensor, bits: int, factors: Tensor | None) -> Tensor:
    if factors is None:
        return wanted.half().float()
    upper, rounded = torch.linalg.cholesky(normal, upper=True).float(), torch.empty_like(wanted)
    for u in reversed(range(wanted.shape[1])):
        missing = ((wanted - rounded)[:, u + 1 :] * upper[:, u, u + 1 :]).sum(dim=1) / upper[:, u, u]
        best, most = wanted[:, u] + missing, MOST_CODES[u >= bits]
        rounded[:, u] = (best / factors[:, 0]).round().clamp(-most, most) * factors[:, 0]
    return rounded


def _levels(group: ColumnCodes) -> Tensor:
    levels = Coding(group.scales, group.offset).levels()
    return levels.gather(1, group.codes.long())
