"""Windows of text that a model writes itself, to be calibrated on.

Tuning moves the quantized model towards the original on these windows, so it gains most where they are like what the
model is used on. A model that writes them itself, drawing token after token from its own predictions, gives text like
the one that it was trained on. Source: LLM-QAT (Liu et al. 2023), section 3.1. Deviation: windows begin with the token
that begins a text, and all others are drawn; LLM-QAT begins with any token and takes the most probable ones at first.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.drawing import Written
from quantkit.errors import DataError, ModelError
from quantkit.models.stream import ModelStream
from quantkit.progress import track
from quantkit.runtime.generation import Runner, new_tokens, start
from quantkit.runtime.memory import free_bytes
from quantkit.runtime.sampling import Sampling, drawer

_AT_ONCE = 64  # windows written at once, where the cache of so many takes no more than _CACHE_BYTES
_CACHE_BYTES = 4 << 30
_KEY_AND_VALUE_BYTES = 2 * 4  # in fp32


def written_by(stream: ModelStream, tokenizer: Any, count: int, seq_len: int, *, seed: int) -> Written | None:
    """``count`` windows that the model will write as write_windows does; None for no windows."""
    return Written(count, partial(write_windows, stream, tokenizer, count, seq_len, seed=seed)) if count else None


@torch.no_grad()
def write_windows(stream: ModelStream, tokenizer: Any, count: int, seq_len: int, *, seed: int) -> Tensor:
    """Windows [count, seq_len] int64 that the model writes: every token behind the first is drawn from its predictions.

    A text that ends before the window does is followed by the next one, as in the texts of training. All of the model
    is in memory meanwhile. Raises DataError where the tokenizer has no token that begins a text, ModelError where the
    model does not fit into memory, GenerationError for a window longer than the model's sliding one.
    """
    _check_memory(stream, count, seq_len)
    first, draw = _first_token(tokenizer, stream.model), drawer(Sampling(temperature=1.0, seed=seed), stream.device)
    sizes = [len(part) for part in torch.arange(count).split(_at_once(stream.model, seq_len))]
    found: list[Tensor] = []

    def tokens() -> Iterator[Tensor]:
        for size in sizes:
            ids = torch.full((size, 1), first, device=stream.device)
            session = start(model, ids, seq_len, runner=Runner(model), draw=draw)
            yield from new_tokens(session, seq_len - 1)
            found.append(session.tokens[:, :seq_len].cpu())

    with stream.whole() as model:
        for _ in track(tokens(), "windows written, tokens", total=len(sizes) * (seq_len - 1)):
            pass
    return torch.cat(found)


def _first_token(tokenizer: Any, model: Any) -> int:
    """The token that begins a text, or else the one that ends the text before it."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise DataError(
        f"{type(model).__name__}: its tokenizer has no token that begins or ends a text, so the model cannot write "
        "windows; calibrate on a text alone"
    )


def _at_once(model: Any, seq_len: int) -> int:
    """How many windows are written at once; by the model alone, as other numbers draw other tokens."""
    return max(1, min(_AT_ONCE, _CACHE_BYTES // _window_bytes(model, seq_len)))


def _window_bytes(model: Any, seq_len: int) -> int:
    """What the cache of a window takes."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return _KEY_AND_VALUE_BYTES * config.num_hidden_layers * heads * width * seq_len


def _check_memory(stream: ModelStream, count: int, seq_len: int) -> None:
    """Raise ModelError where weights that are not in memory yet, and the cache, do not fit."""
    weights = sum(parameter.nbytes for parameter in stream.model.parameters() if parameter.is_meta)
    windows = min(count, _at_once(stream.model, seq_len))
    need, free = weights + windows * _window_bytes(stream.model, seq_len), free_bytes(stream.device)
    if need > free:
        raise ModelError(
            f"{type(stream.model).__name__}: writing windows takes {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
            f"free on {stream.device}; calibrate on a text alone"
        )
