"""The whole product of the trellis format on a GPU: planes, then the filter, or the expanded weight.

By itself, as racecheck does not get through the product of planes, which is binary coding's.
"""

from __future__ import annotations

import pytest
import torch

from quantkit.formats.trellis import dequantize_stored
from quantkit.ops.trellis.op import MOST_TOKENS, trellis_linear_prepared
from tests.ops.trellis.problem import FILTERS, SHAPES, stored_weight, tiles_of

# Of the largest |y|: the planes' sums and y are rounded to x's type, and K terms are added in another order.
ATOL = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4}
TOKENS = [1, 2, 4, 7, 16, 40, 64, 129, MOST_TOKENS[2], MOST_TOKENS[1] + 1]


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", list(ATOL))
@pytest.mark.parametrize("tokens", TOKENS)
def test_products_are_right_and_repeat_bit_for_bit(tokens: int, dtype: torch.dtype) -> None:
    for (n, k), (bits, taps) in zip(SHAPES, FILTERS, strict=False):
        stored, x = stored_weight(n, k, bits, taps, "cuda"), torch.randn(tokens, k).to("cuda", dtype)
        tiles, bias = tiles_of(stored, k), torch.randn(n).to("cuda", dtype)
        held = tiles.planes.tiles, tiles.planes.scale_tiles, stored.scales, stored.filter
        torch.cuda.synchronize()
        y, again = (trellis_linear_prepared(x, *held, bias, weights_ready=True) for _ in range(2))
        assert torch.equal(y, again)
        expected = x.double() @ dequantize_stored(stored, k).double().t() + bias.double()
        largest = expected.abs().max().item()
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=ATOL[dtype] * largest)
