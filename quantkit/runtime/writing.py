"""Windows of text that a model writes itself, to be calibrated on.

Tuning moves the quantized model towards the original on these windows, so it gains most where they are like what the
model is used on. A model that writes them itself, drawing token after token from its own predictions, gives text like
the one that it was trained on. Source: LLM-QAT (Liu et al. 2023), section 3.1. Deviation: windows begin with the token
that begins a text, and all others are drawn; LLM-QAT begins with any token and takes the most probable ones at first.

A GPU draws by a copy of the model in bf16, which the kernels of generation take: their attention reads the tokens
that are there, and not the whole cache.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibration.drawing import Written
from quantkit.errors import DataError, ModelError
from quantkit.memory import free_bytes
from quantkit.models.stream import ModelStream
from quantkit.progress import track
from quantkit.runtime.generation import new_tokens, runner_for, start
from quantkit.runtime.sampling import Sampling, drawer
from quantkit.runtime.session_cache import SessionCache


@dataclass(frozen=True)
class _Place:
    """How windows are written on a kind of device.

    at_once: windows, where their cache takes no more than cache_bytes. copied: what a copy of the model is in, or None
    where the model writes by itself, in fp32.
    """

    at_once: int
    cache_bytes: int
    copied: torch.dtype | None

    @property
    def value_bytes(self) -> int:
        """Bytes of a value of the cache."""
        return (self.copied or torch.float32).itemsize


_PLACES = {"cpu": _Place(64, 4 << 30, None), "cuda": _Place(512, 8 << 30, torch.bfloat16)}


def written_by(stream: ModelStream, tokenizer: Any, count: int, seq_len: int, *, seed: int) -> Written | None:
    """``count`` windows that the model will write as write_windows does; None for no windows."""
    return Written(count, partial(write_windows, stream, tokenizer, count, seq_len, seed=seed)) if count else None


def check_writes(stream: ModelStream, tokenizer: Any, count: int, seq_len: int) -> None:
    """Raise what write_windows does, without a window."""
    place = _PLACES[stream.device.type]
    at_once = min(count, _at_once(stream.model, seq_len, place))
    _first_token(tokenizer, stream.model)
    # It refuses a sliding window that is too short, and holds nothing before its first token.
    SessionCache(stream.model, seq_len, stream.device, padded=False, together=())
    _check_memory(stream, place, at_once * _window_bytes(stream.model, seq_len, place))


@torch.no_grad()
def write_windows(stream: ModelStream, tokenizer: Any, count: int, seq_len: int, *, seed: int) -> Tensor:
    """Windows [count, seq_len] int64 that the model writes: every token behind the first is drawn from its predictions.

    A text that ends before the window does is followed by the next one, as in the texts of training. All of the model
    is in memory meanwhile. Raises DataError where the tokenizer has no token that begins a text, ModelError where the
    model does not fit into memory, GenerationError for a window longer than the model's sliding one.
    """
    check_writes(stream, tokenizer, count, seq_len)
    place = _PLACES[stream.device.type]
    most = _at_once(stream.model, seq_len, place)
    first, draw = _first_token(tokenizer, stream.model), drawer(Sampling(temperature=1.0, seed=seed), stream.device)
    sizes = [len(part) for part in torch.arange(count).split(most)]
    found: list[Tensor] = []

    def tokens() -> Iterator[Tensor]:
        for size in sizes:
            ids = torch.full((size, 1), first, device=stream.device)
            session = start(writer, ids, seq_len, runner=runner, draw=draw)
            yield from new_tokens(session, seq_len - 1)
            found.append(session.tokens[:, :seq_len].cpu())
            del session  # its cache goes before the next one comes

    with stream.whole() as model:
        writer = model if place.copied is None else _copy_in(model, place.copied)
        runner = runner_for(writer, stream.device)
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
        "windows; take those of a text alone"
    )


def _copy_in(model: Any, dtype: torch.dtype) -> Any:
    """A copy of the model with its parameters in this dtype, and its buffers as they are."""
    copies = {
        id(own): nn.Parameter(own.detach().to(dtype), requires_grad=False)
        for own in model.parameters()
        if own.is_floating_point()
    }
    return copy.deepcopy(model, copies)  # takes what is in copies for copied


def _at_once(model: Any, seq_len: int, place: _Place) -> int:
    """How many windows are written at once; by the model and the kind of device, as other numbers draw other tokens."""
    return max(1, min(place.at_once, place.cache_bytes // _window_bytes(model, seq_len, place)))


def _window_bytes(model: Any, seq_len: int, place: _Place) -> int:
    """What the cache of a window takes."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * place.value_bytes * config.num_hidden_layers * heads * width * seq_len


def _check_memory(stream: ModelStream, place: _Place, cache: int) -> None:
    """Raise ModelError where weights that are not in memory yet, a copy's, and so many bytes of cache do not fit."""
    parameters = list(stream.model.parameters())
    weights = sum(parameter.nbytes for parameter in parameters if parameter.is_meta)
    if place.copied is not None:
        weights += place.copied.itemsize * sum(parameter.numel() for parameter in parameters)
    need, free = weights + cache, free_bytes(stream.device)
    if need > free:
        raise ModelError(
            f"{type(stream.model).__name__}: writing windows takes {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
            f"free on {stream.device}; take those of a text alone"
        )
