"""Which models take a key/value prefix in front of every text (runtime/prefix.py)."""

from __future__ import annotations

from torch import nn

from quantkit.errors import ModelError
from quantkit.models.experts import expert_linears
from quantkit.models.families import family_of


def check_takes_prefix(model: nn.Module) -> None:
    """Raise ModelError unless a model is dense, its attention known, its positions rotary and without a window.

    A prefix stands before position 0, and every token sees it. Which token goes to which expert is not followed.
    """
    row, config = family_of(model).block, getattr(model, "config", None)
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if row is None or not row.attention.rotary or sliding or expert_linears(model):
        raise ModelError(
            f"{type(model).__name__}: takes no prefix; it is for dense models with rotary positions and without a "
            "sliding window, such as llama and qwen3"
        )
