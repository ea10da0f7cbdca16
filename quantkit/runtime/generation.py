"""Generation with a static KV cache; on a GPU every token is one replay of a captured CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import GenerationError
from quantkit.models.families import uses_alibi
from quantkit.runtime.cuda_graph import DEVICE_LOCK, capture
from quantkit.runtime.decoder_block import token_blocks
from quantkit.runtime.grouped_experts import run_by_host
from quantkit.runtime.norms import fast_norm
from quantkit.runtime.sampling import Draw
from quantkit.runtime.shared_products import share_products
from quantkit.runtime.twin import Forward, is_watched, twin_of

_WARM_UP_STEPS = 2
_CACHE_STEP = 64  # attention kernels want the mask aligned; others copy it in every layer


@dataclass(frozen=True)
class TokenModel:
    """What runs single tokens. layers: of the cache, whose counts it leaves to whoever calls it."""

    model: Any
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Session:
    """Some prompts being continued at once; all tensors stay where they are, so that a graph can replay on them.

    token: [B, 1] the last token of each. position: [1] its place, equal to the tokens in the cache.
    tokens: [B, capacity]. alibi: whether the model makes its positions from a two-dimensional mask.
    fast, padding, draw: as start takes them.
    """

    model: Any
    cache: Any
    capacity: int
    token: Tensor
    position: Tensor
    tokens: Tensor
    alibi: bool
    fast: bool
    padding: Tensor | None = None
    draw: Draw | None = None

    @cached_property
    def decoder(self) -> TokenModel:
        """What runs single tokens; made behind the prompt, whose first token does not wait for it."""
        return token_model(self.model) if self.fast else TokenModel(self.model)


def _mask(session: Session, positions: Tensor) -> Tensor:
    """Which cache entries the tokens at ``positions`` may see."""
    device, padding = session.token.device, session.padding
    entries = torch.arange(session.capacity, device=device)
    if session.alibi:
        every = torch.ones(len(session.token), session.capacity, dtype=torch.long, device=device)
        return every if padding is None else every * (entries >= padding[:, None])
    seen = (entries[None, :] <= positions[:, None])[None, None]
    if padding is None:
        return seen
    # What stands in for a token sees itself: of nothing at all, attention gives NaN, which would spread.
    own = entries[None, :] == positions[:, None]
    return seen & ((entries >= padding[:, None])[:, None, None] | own)


def _forward(model: Any, session: Session, ids: Tensor, first: Tensor) -> Tensor:
    """Logits [B, vocabulary] after ids [B, count]."""
    count = ids.shape[1]
    places = first if count == 1 else first + torch.arange(count, device=ids.device)
    positions = places[None] if session.padding is None else (places[None] - session.padding[:, None]).clamp(min=0)
    output = model(
        input_ids=ids,
        attention_mask=_mask(session, places),
        **({} if session.alibi else {"position_ids": positions}),
        past_key_values=session.cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits[:, -1]
    return logits


def start(
    model: Any,
    ids: Tensor,
    capacity: int,
    *,
    fast: bool | None = None,
    padding: Tensor | None = None,
    draw: Draw | None = None,
) -> Session:
    """Read prompts, ids [B, count], into a cache for ``capacity`` tokens or some more and choose their next tokens.

    The prompts are read by the model's own code. fast: whether single tokens run through ``token_model``, whose kernels
    are a GPU's; by default there. padding: [B] how many of each prompt's first ids stand for none.
    draw: what chooses a token; by default the most probable one is taken.
    Raises GenerationError for a prompt of no tokens, or where prompt and answer do not fit the model's positions or its
    sliding window.
    """
    if not ids.shape[1]:
        raise GenerationError("the prompt has no tokens; give some text to continue")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and capacity > limit:
        raise GenerationError(f"{capacity} tokens of prompt and answer exceed the model's {limit} positions")
    device = ids.device
    cache, capacity = _static_cache(model, capacity, device)
    session = Session(
        model,
        cache,
        capacity,
        token=torch.zeros(len(ids), 1, dtype=torch.long, device=device),
        position=torch.zeros(1, dtype=torch.long, device=device),
        tokens=torch.zeros(len(ids), capacity, dtype=torch.long, device=device),
        alibi=uses_alibi(model),
        fast=device.type == "cuda" if fast is None else fast,
        padding=padding,
        draw=draw,
    )
    session.tokens[:, : ids.shape[1]] = ids
    with torch.no_grad():
        _choose(session, _forward(model, session, ids, session.position), ids.shape[1])
    return session


def token_model(model: Any) -> TokenModel:
    """A twin of the model for single tokens: described decoder blocks by decoder_block.py, other norms by norms.py.

    The model keeps its own code; its Linears of one input become views of one tensor. Floating-point and quantized
    models get the same, so that their times compare.
    """
    with DEVICE_LOCK:  # products of merged Linears may be measured
        share_products(model)  # for the prompts to come, where loading could not do it
        blocks = token_blocks(model)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the kernels read weights before their predecessors on the stream have ended
    forwards: dict[nn.Module, Forward] = {block.block: block.forward for block in blocks}
    for module in model.modules():
        norm = None if is_watched(module) else fast_norm(module)
        if norm is not None:
            forwards[module] = norm
    layers = tuple(block.attention.module.layer_idx for block in blocks)
    return TokenModel(twin_of(model, forwards), layers)


def _static_cache(model: Any, needed: int, device: torch.device) -> tuple[Any, int]:
    """A cache of the model for ``needed`` tokens or some more, and for how many.

    Within a sliding window nothing slides, so a layer that has one keeps its tokens like any other. What layers count
    their tokens in stands on the device from the start: moving it there layer by layer, while the prompt runs, would
    wait for the GPU each time.
    """
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

    capacity = -(-needed // _CACHE_STEP) * _CACHE_STEP
    cache = StaticCache(config=model.config, max_cache_len=capacity)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, StaticSlidingWindowLayer):
            window = layer.max_cache_len
            if window < needed:
                raise GenerationError(
                    f"{needed} tokens of prompt and answer exceed the model's sliding window of {window}"
                )
            cache.layers[index] = StaticLayer(max_cache_len=capacity)
    counts = torch.zeros(len(cache.layers), dtype=torch.long, device=device)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, StaticLayer):
            layer.cumulative_length = counts[index]
    return cache, capacity


def _choose(session: Session, logits: Tensor, count: int) -> None:
    session.token.copy_(logits.argmax(-1, keepdim=True) if session.draw is None else session.draw(logits))
    session.position.add_(count)
    session.tokens.index_copy_(1, session.position, session.token)


def next_logits(session: Session) -> Tensor:
    """Logits [B, vocabulary] after the last tokens, whose keys and values are cached on the way."""
    with torch.no_grad():
        logits = _forward(session.decoder.model, session, session.token, session.position)
        counts = [session.cache.layers[index].cumulative_length for index in session.decoder.layers]
        if counts:
            torch._foreach_add_(counts, 1)
    return logits


def step(session: Session) -> None:
    """Append one token. Makes no decision on the host, unless the model does, so it can be captured."""
    logits = next_logits(session)
    with torch.no_grad():
        _choose(session, logits, 1)


def captured_step(session: Session) -> Callable[[], None]:
    """``step`` as a graph replay on a GPU, as itself elsewhere; the session is left as it was found.

    No graph can hold experts that the host calls (runtime/grouped_experts.py).
    """
    if session.token.device.type != "cuda" or run_by_host(session.model):
        return lambda: step(session)
    _ = session.decoder  # made now: its tensors are for every session, not for the stream of this capture
    kept = (
        session.token.clone(),
        session.position.clone(),
        [layer.cumulative_length.clone() for layer in _layers(session)],
    )

    logits: list[Tensor] = []

    def captured() -> None:
        if session.draw is None:
            step(session)
        else:  # drawing stays outside: its generator counts on the host
            logits[:] = [next_logits(session)]

    def captured_and_back() -> None:
        captured()
        _rewind(session, *kept)

    graph = capture([captured], session.token.device, warm_up=[captured_and_back] * _WARM_UP_STEPS)
    _rewind(session, *kept)
    if session.draw is None:
        replay: Callable[[], None] = graph.replay
        return replay

    def replay_and_draw() -> None:
        graph.replay()
        _choose(session, logits[0], 1)

    return replay_and_draw


def _layers(session: Session) -> Iterator[Any]:
    return (layer for layer in session.cache.layers if layer.is_initialized)


def _rewind(session: Session, token: Tensor, position: Tensor, lengths: list[Tensor]) -> None:
    session.token.copy_(token)
    session.position.copy_(position)
    for layer, length in zip(_layers(session), lengths, strict=True):
        layer.cumulative_length.copy_(length)


def new_tokens(session: Session, count: int) -> Iterator[Tensor]:
    """The next ``count`` tokens [B, 1], from the one that ``start`` chose on; each overwrites the one before."""
    yield session.token
    advance = captured_step(session) if count > 1 else None
    for _ in range(count - 1):
        assert advance is not None
        advance()
        yield session.token


def generate(model: Any, ids: Tensor, count: int, *, stop: int | None = None, fast: bool | None = None) -> Tensor:
    """The prompt ids [1, n] and up to ``count`` greedy tokens, ending with ``stop`` where it comes.

    fast: as start takes it, which also says what is raised.
    """
    session = start(model, ids, ids.shape[1] + count, fast=fast)
    for token in new_tokens(session, count):
        if stop is not None and int(token) == stop:
            break
    return session.tokens[0, : int(session.position) + 1]
