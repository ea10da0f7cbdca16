"""Binary codes while they are tuned, by kernels: quantkit/tuning/codes.py has the same for a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.cuda.architectures import WARP_THREADS
from quantkit.cuda.launch import Launch
from quantkit.ops.solve.instances import CODED_COLUMNS, SOLVE_THREADS, code_gradients_unit, nearest_unit

_WARPS = SOLVE_THREADS // WARP_THREADS


def nearest_codes(latent: Tensor, scales: Tensor, offset: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(codes [N, K] uint8, their weight [N, K]) whose levels are nearest to the latent weights [N, K] fp32.

    scales: [q, N, G]. offset: [N, G]. width: of every group but the last, which may have fewer columns.
    """
    codes, weight = torch.empty_like(latent, dtype=torch.uint8), torch.empty_like(latent)
    _expand(latent.contiguous(), codes, weight, (scales, offset), width)
    return codes, weight


def weight_of(codes: Tensor, scales: Tensor, offset: Tensor, width: int) -> Tensor:
    """[N, K] fp32 of codes [N, K]; the rest as nearest_codes takes it."""
    weight = torch.empty_like(codes, dtype=torch.float32)
    _expand(None, codes, weight, (scales, offset), width)
    return weight


def gradients_of_groups(gradient: Tensor, codes: Tensor, bits: int, width: int) -> tuple[Tensor, Tensor]:
    """(of scales [q, N, G], of offset [N, G]) from the gradient [N, K] of the weight of codes [N, K]."""
    (rows, columns), groups = codes.shape, -(-codes.shape[1] // width)
    offset = torch.empty(rows, groups, device=codes.device)
    scales = torch.empty(bits, rows, groups, device=codes.device)
    warps = 1 if width <= CODED_COLUMNS else _WARPS
    Launch(
        code_gradients_unit(bits),
        codes.device,
        grid=(-(-rows * groups * warps // _WARPS),),
        block=SOLVE_THREADS,
        args={
            "gradient": gradient.contiguous(),
            "codes": codes,
            "scales": scales,
            "offset": offset,
            "N": rows,
            "K": columns,
            "width": width,
            "groups": groups,
            "warps": warps,
        },
    ).run()
    return scales, offset


def _expand(latent: Tensor | None, codes: Tensor, weight: Tensor, coding: tuple[Tensor, Tensor], width: int) -> None:
    """Write the weight, and the codes where they are chosen for a latent weight."""
    scales, offset = (each.contiguous() for each in coding)
    (rows, columns), groups, parts = weight.shape, offset.shape[1], -(-width // CODED_COLUMNS)
    Launch(
        nearest_unit(len(scales)),
        weight.device,
        grid=(-(-rows * groups * parts // _WARPS),),
        block=SOLVE_THREADS,
        args={
            "latent": latent,
            "scales": scales,
            "offset": offset,
            "codes": codes,
            "weight": weight,
            "N": rows,
            "K": columns,
            "width": width,
            "groups": groups,
            "parts": parts,
        },
    ).run()
