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
    attention that reads a mask takes several times as long. So the model takes its own attention function under another
    name, which stands for the masks made here. Sliding windows and models that take no attention function keep theirs.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = model.config._attn_implementation
    if ALL_MASK_ATTENTION_FUNCTIONS.get(name) is not sdpa_mask:
        yield
        return
    plain = f"{name}_plain_causal"
    AttentionInterface.register(plain, ALL_ATTENTION_FUNCTIONS[name])
    AttentionMaskInterface.register(plain, _mask)
    model.config._attn_implementation = plain
    try:
        yield
    finally:
        model.config._attn_implementation = name


def _mask(*arguments: Any, **options: Any) -> Tensor | None:
    from transformers.masking_utils import sdpa_mask

    plain = options.get("allow_is_causal_skip", True) and options.get("local_size") is None
    made: Tensor | None = None if plain else sdpa_mask(*arguments, **options)
    return made
