"""Context passes in a CUDA graph with the attention that they have outside of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def plain_causal(model: Any) -> Iterator[None]:
    """Inside, attention that is only causal gets no mask, also while a graph is captured. All tokens must count.

    transformers leaves a mask out after looking at its content. During a capture it cannot look and makes one, and
    attention that reads a mask takes several times as long. Sliding windows and models that take no attention function
    keep their masks.
    """
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    name = model.config._attn_implementation
    if ALL_MASK_ATTENTION_FUNCTIONS.get(name) is not sdpa_mask:
        yield
        return

    def mask(*arguments: Any, **options: Any) -> Tensor | None:
        plain = options.get("allow_is_causal_skip", True) and options.get("local_size") is None
        made: Tensor | None = None if plain else sdpa_mask(*arguments, **options)
        return made

    AttentionMaskInterface.register(name, mask)
    try:
        yield
    finally:
        AttentionMaskInterface.register(name, sdpa_mask)
