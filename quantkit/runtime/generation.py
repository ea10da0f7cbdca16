"""Greedy generation with a static KV cache; on a GPU every token is one replay of a captured CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import BenchError
from quantkit.runtime.cuda_graph import FilledScalars
from quantkit.runtime.decoder_block import fast_blocks
from quantkit.runtime.fast_step import Parts, fast_step
from quantkit.runtime.merged_linears import join_siblings

_WARM_UP_STEPS = 2
_CACHE_STEP = 64  # attention kernels want rows of the mask aligned; others copy it in every layer
_ALIBI_MODELS = ("bloom",)  # build their position bias from a two-dimensional mask


@dataclass(frozen=True)
class Session:
    """One prompt being continued; all tensors stay where they are, so that a graph can replay on them.

    token: [1, 1] the last token. position: [1] its position, equal to the tokens in the cache. tokens: [1, capacity].
    parts: what single tokens run in another way; nothing on a CPU.
    """

    model: Any
    cache: Any
    capacity: int
    token: Tensor
    position: Tensor
    tokens: Tensor
    parts: Parts


def _mask(session: Session, positions: Tensor) -> Tensor:
    """Which cache entries the tokens at ``positions`` may see."""
    device = session.token.device
    if session.model.config.model_type in _ALIBI_MODELS:
        return torch.ones(1, session.capacity, dtype=torch.long, device=device)
    columns = torch.arange(session.capacity, device=device)
    return (columns[None, :] <= positions[:, None])[None, None]


def _forward(session: Session, ids: Tensor, first: Tensor) -> Tensor:
    """Logits [1, vocabulary] after ids [1, count]."""
    count = ids.shape[1]
    positions = first if count == 1 else first + torch.arange(count, device=ids.device)
    takes_positions = session.model.config.model_type not in _ALIBI_MODELS
    output = session.model(
        input_ids=ids,
        attention_mask=_mask(session, positions),
        **({"position_ids": positions[None]} if takes_positions else {}),
        past_key_values=session.cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits[:, -1]
    return logits


def start(model: Any, ids: Tensor, capacity: int) -> Session:
    """Read the prompt ids [1, count] into a cache for ``capacity`` tokens or some more and choose the first new token.

    Raises BenchError for a prompt of no tokens, or where prompt and answer do not fit the model's positions or its
    sliding window.
    """
    if not ids.shape[1]:
        raise BenchError("--prompt: the tokenizer makes no token of it; give some text to continue")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and capacity > limit:
        raise BenchError(f"{capacity} tokens of prompt and answer exceed the model's {limit} positions")
    cache, capacity = _static_cache(model, capacity)
    device = ids.device
    session = Session(
        model,
        cache,
        capacity,
        token=torch.zeros(1, 1, dtype=torch.long, device=device),
        position=torch.zeros(1, dtype=torch.long, device=device),
        tokens=torch.zeros(1, capacity, dtype=torch.long, device=device),
        parts=Parts(join_siblings(model), fast_blocks(model)) if device.type == "cuda" else Parts(),
    )
    session.tokens[:, : ids.shape[1]] = ids
    with torch.no_grad():
        _choose(session, _forward(session, ids, session.position), ids.shape[1])
    return session


def _static_cache(model: Any, needed: int) -> tuple[Any, int]:
    """A cache of the model for ``needed`` tokens or some more, and for how many.

    Within a sliding window nothing slides, so a layer that has one keeps its tokens like any other.
    """
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

    capacity = -(-needed // _CACHE_STEP) * _CACHE_STEP
    cache = StaticCache(config=model.config, max_cache_len=capacity)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, StaticSlidingWindowLayer):
            if layer.max_cache_len < needed:
                window = layer.max_cache_len
                raise BenchError(f"{needed} tokens of prompt and answer exceed the model's sliding window of {window}")
            cache.layers[index] = StaticLayer(max_cache_len=capacity)
    return cache, capacity


def _choose(session: Session, logits: Tensor, count: int) -> None:
    session.token.copy_(logits.argmax(-1, keepdim=True))
    session.position.add_(count)
    session.tokens.index_copy_(1, session.position, session.token)


def next_logits(session: Session, *, fast: bool = True) -> Tensor:
    """Logits [1, vocabulary] after the last token, whose keys and values are cached on the way.

    fast: on a GPU with fast_step's parts, otherwise with transformers' own code.
    """
    with torch.no_grad():
        if not fast:
            return _forward(session, session.token, session.position)
        with fast_step(session.model, session.cache, session.position, session.parts):
            return _forward(session, session.token, session.position)


def step(session: Session) -> None:
    """Append one token. Makes no decision on the host, so it can be captured."""
    logits = next_logits(session)
    with torch.no_grad():
        _choose(session, logits, 1)


def captured_step(session: Session) -> Callable[[], None]:
    """``step`` as a graph replay on a GPU, as itself elsewhere; the session is left as it was found."""
    if session.token.device.type != "cuda":
        return lambda: step(session)
    kept = (
        session.token.clone(),
        session.position.clone(),
        [layer.cumulative_length.clone() for layer in _layers(session)],
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP_STEPS):
            step(session)
            _rewind(session, *kept)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), FilledScalars():
        step(session)
    _rewind(session, *kept)
    replay: Callable[[], None] = graph.replay
    return replay


def _layers(session: Session) -> Iterator[Any]:
    return (layer for layer in session.cache.layers if layer.is_initialized)


def _rewind(session: Session, token: Tensor, position: Tensor, lengths: list[Tensor]) -> None:
    session.token.copy_(token)
    session.position.copy_(position)
    for layer, length in zip(_layers(session), lengths, strict=True):
        layer.cumulative_length.copy_(length)


def generate(model: Any, ids: Tensor, new_tokens: int, stop: int | None = None) -> Tensor:
    """The prompt ids [1, count] and up to ``new_tokens`` greedy tokens, ending with ``stop`` where it comes.

    Raises BenchError as start does.
    """
    session = start(model, ids, ids.shape[1] + new_tokens)
    advance = captured_step(session) if new_tokens > 1 else None
    for _ in range(new_tokens - 1):
        if stop is not None and int(session.token) == stop:
            break
        assert advance is not None
        advance()
    return session.tokens[0, : int(session.position) + 1]
