"""A Linear in the ``trellis`` format whose scales have gradients; codes stay, also where others are chosen again.

The filter stays too: Linears of one input can be one product only where they have one filter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantkit.formats.base import PackedWeight
from quantkit.formats.planes import unpack_signs
from quantkit.formats.trellis import TrellisSpec, TrellisTensors, filter_rows
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.tuning.part import Straight, TunedPart


class TunedTrellisLinear(TunedPart):
    """y = x W^T + bias, W = scales * units. scales: [N, 1] fp32, before rounding. units: [N, K] fp32, of the codes."""

    signs: Tensor
    filter: Tensor
    units: Tensor

    def __init__(self, linear: QuantizedLinear):
        """linear: in the ``trellis`` format."""
        super().__init__(linear)
        assert isinstance(linear.spec, TrellisSpec)
        stored = TrellisTensors.of({name: tensor.detach() for name, tensor in linear.tensors.items()})
        self.scales = nn.Parameter(stored.scales.float())
        self.latent = None
        units = filter_rows(unpack_signs(stored.signs, self.shape[1]), stored.filter)
        for name, tensor in (("signs", stored.signs), ("filter", stored.filter), ("units", units)):
            self.register_buffer(name, tensor, persistent=False)

    def dequantize(self) -> Tensor:
        """The weight [N, K] fp32 of the values as they would be stored; W Q where inputs are rotated."""
        scales: Tensor = Straight.apply(self.scales, stored_scales(self.scales.detach()).float())
        return self.units * scales

    @torch.no_grad()
    def packed(self) -> PackedWeight:
        """The format's tensors of the values at hand; what is read back is what ``dequantize`` gave, bit for bit."""
        stored = TrellisTensors(self.signs, stored_scales(self.scales.detach()), self.filter)
        return PackedWeight(self.spec, self.shape, stored.named(), {})


def stored_scales(scales: Tensor) -> Tensor:
    """[N, 1], as the format holds them."""
    return scales.half()
