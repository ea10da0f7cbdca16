"""Which form of the INT8 attention kernel a problem takes."""

from __future__ import annotations

from quantkit.cuda.architectures import Architecture
from quantkit.errors import KernelError
from quantkit.ops.attention.instances import FORMS, MOST_CODE, AttentionForm
from quantkit.ops.attention.layout import HEAD_DIMS

MOST_KEYS = 2**31 // MOST_CODE**2
"""The largest codes of so many keys still sum within int32."""


def padded_head_dim(width: int) -> int:
    """The narrowest of HEAD_DIMS that holds heads of ``width`` values. Raises KernelError where they are too wide."""
    if width > HEAD_DIMS[-1]:
        raise KernelError(f"int8_attention on a GPU takes heads of up to {HEAD_DIMS[-1]} values, not {width}")
    return next(known for known in HEAD_DIMS if known >= width)


def attention_form(row: Architecture, head_dim: int, masked: bool) -> AttentionForm:
    """The form for heads of one of HEAD_DIMS: warpgroup products where the GPU and the kernel have them."""
    forms = (form for form in FORMS if form.kernel in row.kernels and head_dim in form.head_dims)
    return next(form for form in forms if not (masked and form.swizzled))
