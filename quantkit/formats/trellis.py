"""Trellis format: binary coding in which a row's signs also act on the rows behind it.

    w[n, k] = scales[n] * sum_{i < q, d < taps} filter[i, d] * (2 * signs[i, ring(n - d), k] - 1)

ring: counted round within blocks of 64 rows; the last block of a weight may have 16, 32 or 48. With taps = 1 this is
binary coding with one set of scales per row. With more, the q bits of a row choose among 2**(q * taps) values, so a
path through all rows comes nearer to a weight than q bits at each row by itself.

Source: trellis-coded quantization with bit-shift trellises (QTIP, Tseng et al. 2024). Deviation: QTIP's values are a
pseudo-random function of the window of bits, which a kernel has to compute for every weight. Here they are a sum over
the bits of the window, so the filter may be applied behind the product: y = scales * filter(signs x), where
``signs x`` is the product of binary coding with q N rows and no scales. That is all a kernel of bit planes has to do.
The input may be rotated (formats/hadamard.py): the planes then stand for W Q, and the product is with x Q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import RecipeError
from quantkit.formats.base import Format, Shape, Tensors, TensorSpec
from quantkit.formats.hadamard import unrotate
from quantkit.formats.planes import packed_width, unpack_signs

BLOCK_ROWS = 64
ROW_STEP = 16
MOST_BITS, MOST_TAPS = 6, 8
MOST_WINDOW_BITS = 16  # kernels look them up by two bytes


@dataclass(frozen=True)
class TrellisSpec:
    """weight_bits: q, 1-6 planes. taps: rows that a sign acts on, 1-8; at most 16 bits in all. rotate_inputs: whether x
    is rotated before the product."""

    weight_bits: int
    taps: int
    rotate_inputs: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.weight_bits <= MOST_BITS:
            raise RecipeError(f"weight_bits is {self.weight_bits}; method trellis has 1 to {MOST_BITS}")
        if not 1 <= self.taps <= MOST_TAPS:
            raise RecipeError(f"taps is {self.taps}; choose 1 to {MOST_TAPS}")
        if self.weight_bits * self.taps > MOST_WINDOW_BITS:
            raise RecipeError(
                f"weight_bits {self.weight_bits} with taps {self.taps} make a window of {self.weight_bits * self.taps} "
                f"bits; choose at most {MOST_WINDOW_BITS}"
            )


@dataclass(frozen=True)
class TrellisTensors:
    """The stored tensors of one weight [N, K].

    signs: [q, N, ceil(K/8)] uint8, see planes.py. scales: [N, 1] fp16. filter: [q, taps] fp32.
    """

    signs: Tensor
    scales: Tensor
    filter: Tensor

    @classmethod
    def of(cls, tensors: Tensors) -> TrellisTensors:
        """The tensors by their stored names."""
        return cls(**tensors)

    def named(self) -> dict[str, Tensor]:
        """Inverse of ``of``."""
        return dict(vars(self))


def check_rows(rows: int) -> None:
    """Raise RecipeError unless N is a multiple of 16."""
    if rows % ROW_STEP:
        raise RecipeError(
            f"method trellis needs Linears whose out_features are a multiple of {ROW_STEP}, not {rows}; "
            "name another method for them under 'layers', or 'keep' them"
        )


def trellis_tensors(spec: TrellisSpec, shape: Shape) -> dict[str, TensorSpec]:
    """What is stored, by the names and shapes of TrellisTensors."""
    rows, columns = shape
    check_rows(rows)
    return {
        "signs": TensorSpec((spec.weight_bits, rows, packed_width(columns)), torch.uint8),
        "scales": TensorSpec((rows, 1), torch.float16),
        "filter": TensorSpec((spec.weight_bits, spec.taps), torch.float32),
    }


def filter_rows(planes: Tensor, filter: Tensor) -> Tensor:
    """sum_{i, d} filter[i, d] * planes[i, ring(n - d)]: [q, N, ...] fp32 -> [N, ...] fp32, in the order of d, then i.

    Raises RecipeError unless N is a multiple of 16.
    """
    rows = planes.shape[1]
    check_rows(rows)
    whole = rows - rows % BLOCK_ROWS
    filtered = torch.zeros(planes.shape[1:], dtype=torch.float32, device=planes.device)
    for first, stop, ring in ((0, whole, BLOCK_ROWS), (whole, rows, rows % BLOCK_ROWS)):
        if first == stop:
            continue
        blocks = planes[:, first:stop].unflatten(1, (-1, ring))
        into = filtered[first:stop].unflatten(0, (-1, ring))
        for d in range(filter.shape[1]):
            for i, plane in enumerate(blocks):
                into += filter[i, d] * plane.roll(d, dims=1)
    return filtered


def dequantize_stored(stored: TrellisTensors, columns: int) -> Tensor:
    """The weight [N, columns] fp32 that the planes stand for: W Q where inputs are rotated."""
    return filter_rows(unpack_signs(stored.signs, columns), stored.filter) * stored.scales.float()


def _dequantize(spec: TrellisSpec, tensors: Tensors, shape: Shape) -> Tensor:
    weight = dequantize_stored(TrellisTensors.of(tensors), shape[1])
    return unrotate(weight) if spec.rotate_inputs else weight


FORMAT = Format(
    spec=TrellisSpec, tensors=trellis_tensors, dequantize=_dequantize, weight_bits=lambda spec: spec.weight_bits
)
