"""Generation with a static KV cache; on a GPU every token behind a prompt is one replay of a captured CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.cuda.graph import DEVICE_LOCK, capture
from quantkit.errors import GenerationError
from quantkit.models.families import uses_alibi
from quantkit.ops.decode.choose import can_choose, choose_most_probable
from quantkit.runtime.decoder_block import fused_blocks
from quantkit.runtime.grouped_experts import run_by_host
from quantkit.runtime.norms import fast_norm
from quantkit.runtime.rotary import RotaryTable, rotary_table
from quantkit.runtime.sampling import Draw
from quantkit.runtime.session_cache import SessionCache
from quantkit.runtime.shared_products import share_products
from quantkit.runtime.twin import Forward, is_watched, twin_of

_WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Runner:
    """What runs prompts and tokens. layers: of the cache, whose counts it leaves to whoever calls it.

    rotary: what gives single tokens their angles.
    """

    model: Any
    layers: tuple[int, ...] = ()
    rotary: tuple[RotaryTable, ...] = ()


@dataclass(frozen=True)
class Session:
    """Some prompts being continued at once; all tensors stay where they are, so that a graph can replay on them.

    token: [B, 1] the last token of each. position: [1] its place, equal to the tokens in the cache.
    tokens: [B, capacity]. alibi: whether the model makes its positions from a two-dimensional mask.
    padding, draw: as start takes them.
    """

    runner: Runner
    cache: SessionCache
    token: Tensor
    position: Tensor
    tokens: Tensor
    alibi: bool
    padding: Tensor | None = None
    draw: Draw | None = None


def _mask(session: Session, positions: Tensor) -> Tensor:
    """Which cache entries the tokens at ``positions`` may see."""
    device, padding = session.token.device, session.padding
    capacity = session.cache.capacity
    entries = torch.arange(capacity, device=device)
    if session.alibi:
        every = torch.ones(len(session.token), capacity, dtype=torch.long, device=device)
        return every if padding is None else every * (entries >= padding[:, None])
    seen = (entries[None, :] <= positions[:, None])[None, None]
    if padding is None:
        return seen
    # What stands in for a token sees itself: of nothing at all, attention gives NaN, which would spread.
    own = entries[None, :] == positions[:, None]
    return seen & ((entries >= padding[:, None])[:, None, None] | own)


def _forward(session: Session, ids: Tensor) -> Tensor:
    """Logits [B, vocabulary] after ids [B, count], whose keys and values are cached on the way."""
    count, first = ids.shape[1], session.position
    places = first if count == 1 else first + torch.arange(count, device=ids.device)
    positions = places[None] if session.padding is None else (places[None] - session.padding[:, None]).clamp(min=0)
    output = session.runner.model(
        input_ids=ids,
        attention_mask=_mask(session, places),
        **({} if session.alibi else {"position_ids": positions}),
        past_key_values=session.cache,
        use_cache=True,
        logits_to_keep=1,
    )
    counts = [session.cache.layers[index].cumulative_length for index in session.runner.layers]
    if counts:
        torch._foreach_add_(counts, count)
    logits: Tensor = output.logits[:, -1]
    return logits


def start(
    model: Any,
    ids: Tensor,
    capacity: int,
    *,
    runner: Runner | None = None,
    padding: Tensor | None = None,
    draw: Draw | None = None,
) -> Session:
    """Read prompts, ids [B, count], into a cache for ``capacity`` tokens or some more and choose their next tokens.

    runner: of the model; by default the one that ``runner_for`` makes for the device, which a caller with many prompts
    makes once. padding: [B] how many of each prompt's first ids stand for none.
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
    runner = runner or runner_for(model, device)
    cache = SessionCache(model, capacity, device, padded=padding is not None, together=runner.layers)
    for table in runner.rotary:
        table.reserve(cache.capacity, model.dtype, device)
    session = Session(
        runner,
        cache,
        token=torch.zeros(len(ids), 1, dtype=torch.long, device=device),
        position=torch.zeros(1, dtype=torch.long, device=device),
        tokens=torch.zeros(len(ids), cache.capacity, dtype=torch.long, device=device),
        alibi=uses_alibi(model),
        padding=padding,
        draw=draw,
    )
    session.tokens[:, : ids.shape[1]] = ids
    with torch.no_grad():
        _choose(session, _forward(session, ids), ids.shape[1])
    return session


def runner_for(model: Any, device: torch.device) -> Runner:
    """On a GPU, where there are kernels for it, ``fused_runner``; else the model's own code."""
    return fused_runner(model) if device.type == "cuda" else Runner(model)


def fused_runner(model: Any) -> Runner:
    """A twin of the model that generates: described decoder blocks by decoder_block.py, other norms by norms.py, angles
    of single tokens by rotary.py.

    The model keeps its own code; its Linears of one input become views of one tensor. Floating-point and quantized
    models get the same, so that their times compare.
    """
    with DEVICE_LOCK:  # products of merged Linears may be measured
        share_products(model)  # for blocks that keep their own code, where loading could not do it
        blocks = fused_blocks(model)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the kernels read weights before their predecessors on the stream have ended
    forwards: dict[nn.Module, Forward] = {block.block: block.forward for block in blocks}
    tables = []
    for module in model.modules():
        if is_watched(module):
            continue
        norm, table = fast_norm(module), rotary_table(module)
        if norm is not None:
            forwards[module] = norm
        if table is not None:
            forwards[module] = table
            tables.append(table)
    layers = tuple(block.attention.module.layer_idx for block in blocks)
    return Runner(twin_of(model, forwards), layers, tuple(tables))


def _choose(session: Session, logits: Tensor, count: int) -> None:
    session.position.add_(count)
    if session.draw is None and can_choose(logits):
        choose_most_probable(logits, session.token, session.tokens, session.position)
        return
    session.token.copy_(logits.argmax(-1, keepdim=True) if session.draw is None else session.draw(logits))
    session.tokens.index_copy_(1, session.position, session.token)


def next_logits(session: Session) -> Tensor:
    """Logits [B, vocabulary] after the last tokens, whose keys and values are cached on the way."""
    with torch.no_grad():
        return _forward(session, session.token)


def step(session: Session) -> None:
    """Append one token. Makes no decision on the host, unless the model does, so it can be captured."""
    logits = next_logits(session)
    with torch.no_grad():
        _choose(session, logits, 1)


def captured_step(session: Session) -> Callable[[], None]:
    """``step`` as a graph replay on a GPU, as itself elsewhere; the session is left as it was found.

    No graph can hold experts that the host calls (runtime/grouped_experts.py).
    """
    if session.token.device.type != "cuda" or run_by_host(session.runner.model):
        return lambda: step(session)
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


def generate(model: Any, ids: Tensor, count: int, *, stop: int | None = None, runner: Runner | None = None) -> Tensor:
    """The prompt ids [1, n] and up to ``count`` greedy tokens, ending with ``stop`` where it comes.

    runner: as start takes it, which also says what is raised.
    """
    session = start(model, ids, ids.shape[1] + count, runner=runner)
    for token in new_tokens(session, count):
        if stop is not None and int(token) == stop:
            break
    return session.tokens[0, : int(session.position) + 1]
