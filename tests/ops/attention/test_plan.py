"""Which form of INT8 attention runs, and that it is compiled and fits the GPU."""

from __future__ import annotations

import pytest

from quantkit.cuda.architectures import ARCHITECTURES, Architecture, Kernel
from quantkit.errors import KernelError
from quantkit.ops.attention.instances import WARP, WARPGROUP, attention_units
from quantkit.ops.attention.layout import HEAD_DIMS
from quantkit.ops.attention.plan import attention_form, padded_head_dim

ROWS = [pytest.param(row, id=row.title) for row in ARCHITECTURES.values()]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_warpgroup_products_are_taken_where_gpu_kernel_and_mask_allow(
    head_dim: int, masked: bool, row: Architecture
) -> None:
    can = Kernel.INT8_ATTENTION_WGMMA in row.kernels and head_dim in WARPGROUP.head_dims and not masked
    assert attention_form(row, head_dim, masked) is (WARPGROUP if can else WARP)


@pytest.mark.parametrize("row", ROWS)
def test_every_form_that_is_taken_is_compiled_and_fits(row: Architecture) -> None:
    compiled = set(attention_units(row))
    for head_dim in HEAD_DIMS:
        for masked in (False, True):
            form = attention_form(row, head_dim, masked)
            assert {form.unit(head_dim), form.quantize_unit(head_dim)} <= compiled
            assert form.unit(head_dim).shared_mem <= row.shared_limit()


def test_heads_are_filled_up_to_the_next_width() -> None:
    assert [padded_head_dim(width) for width in (1, 64, 65, 128, 200)] == [64, 64, 96, 128, 256]
    with pytest.raises(KernelError, match="up to 256 values, not 257"):
        padded_head_dim(257)
