"""Weights with a scale per row and group of columns: which the kernels take, and the order in which they read them."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.cuda.architectures import Kernel
from quantkit.cuda.device import gpu_of
from quantkit.formats.bcq import group_width
from quantkit.formats.bipolar import FLOAT_ACT_BITS, BipolarSpec, largest_value
from quantkit.ops.bipolar.instances import GROUPED_BITS
from quantkit.ops.bipolar.layout import LINE_BYTES, plane_group_sums, tile_scales, tile_weight
from quantkit.ops.bipolar.product import GroupedWeight


def takes_groups(spec: BipolarSpec, in_features: int, device: torch.device) -> bool:
    """Whether the product of groups takes this weight: quantized activations, whole lines of columns, and the GPU."""
    width = group_width(spec.group_size, in_features)
    known = spec.act_bits != FLOAT_ACT_BITS and spec.weight_bits <= GROUPED_BITS
    if not known or width >= in_features or width % LINE_BYTES:
        return False
    return device.type != "cuda" or Kernel.BIPOLAR_GROUPED_WGMMA in gpu_of(device).architecture.kernels


def grouped_weight(bit_planes: Tensor, scales: Tensor, group_size: int, in_features: int) -> GroupedWeight:
    """Canonical tensors [bits, N, ceil(K / 8)] and [N, G] in the order that the kernel reads."""
    starts = torch.arange(0, in_features, group_size, device=scales.device)
    columns = (in_features - starts).clamp(max=group_size)
    codes = plane_group_sums(bit_planes, in_features, group_size)
    offsets = ((2 * codes - largest_value(len(bit_planes)) * columns) * scales.double()).sum(dim=1).float()
    return GroupedWeight(tile_weight(bit_planes), tile_scales(scales, group_size, in_features), offsets)
