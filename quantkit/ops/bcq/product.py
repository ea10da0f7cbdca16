"""A product of a bcq weight and what every kernel takes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.cuda.launch import DTYPE_CODES
from quantkit.cuda.parameters import Argument
from quantkit.errors import KernelError
from quantkit.formats.bcq import group_width
from quantkit.ops.bcq.candidates import binary_segment
from quantkit.ops.bcq.gemm import is_vectors
from quantkit.ops.bcq.layout import BcqTiles
from quantkit.ops.epilogue import NO_EPILOGUE, Epilogue


@dataclass(frozen=True, eq=False)
class Product:
    """y [M, N], or gated [M, N / 2], = the epilogue of x [M, K] W^T + bias. x: contiguous, 16 bits. bias: in x's type.

    weights_ready: nothing queued on the GPU still writes the weight, so it may be read before the previous kernel ends.
    """

    x: Tensor
    weight: BcqTiles
    bias: Tensor | None
    y: Tensor
    epilogue: Epilogue = NO_EPILOGUE
    weights_ready: bool = False

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: BcqTiles,
        bias: Tensor | None,
        *,
        epilogue: Epilogue = NO_EPILOGUE,
        weights_ready: bool = False,
    ) -> Product:
        """With room for y."""
        y = torch.empty(x.shape[0], epilogue.width(weight.out_features), dtype=x.dtype, device=x.device)
        return cls(x, weight, bias, y, epilogue, weights_ready)

    def args(self) -> dict[str, Argument]:
        """What the kernels that read x and the weight take."""
        dtype = DTYPE_CODES[self.x.dtype]
        return {**weight_args(self.weight), "x": self.x, "dtype": dtype, "vectors": is_vectors(self.x)}

    def epilogue_args(self) -> dict[str, Argument]:
        """What the kernels that write y take."""
        return {
            "bias": self.bias,
            "residual": self.epilogue.addend(self.y),
            "y": self.y,
            "M": self.y.shape[0],
            "activation": self.epilogue.number,
        }


def weight_args(weight: BcqTiles) -> dict[str, Argument]:
    """What kernels take of a weight."""
    return {
        "tiles": weight.tiles,
        "scales": weight.scale_tiles,
        "factors": weight.factor_tiles,
        "N": weight.out_features,
        "K": weight.in_features,
        "groups": weight.groups,
        "entries": weight.entries,
    }


def _magic(divisor: int) -> int:
    """2^32 / divisor rounded up; 0 for the divisor 1."""
    return 0 if divisor == 1 else -(-(1 << 32) // divisor)


def activation_segment(group_size: int, in_features: int, names: str) -> int:
    """Elements of x per activation scale. Raises KernelError, which begins with ``names``, where there is none."""
    segment = binary_segment(group_size, in_features)
    if segment is None:
        raise KernelError(f"{names} a group size that is a multiple of 32, not {group_size}")
    return segment


def group_magic(group_size: int, in_features: int, segment: int) -> int:
    """What the number of a segment is multiplied by for that of its group."""
    return _magic(max(1, -(-group_width(group_size, in_features) // segment)))
