"""Running a model block by block: what the inputs of each block are once the blocks before it were quantized."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import ModelError
from quantkit.models.families import linear_weight
from quantkit.models.inputs import InputTap
from quantkit.models.stream import ModelStream
from quantkit.models.structure import model_body
from quantkit.stats import trust
from quantkit.storage.resume import Workspace

Features = Callable[[Tensor], Tensor]
"""x [tokens, K] of a Linear -> [tokens, C], what its quantizer calibrates on instead."""


@dataclass(frozen=True)
class BlockCall:
    """How the model calls one block, besides the hidden states: masks, position embeddings, alibi, ..."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True)
class BlockInputs:
    """What flows into a block.

    hidden: [windows, seq_len, hidden_size] on the CPU; one window is on the device at a time.
    calls: how each block is called, in block order; the same for every window, as all have one length.
    dtype: what the blocks compute in; ``hidden`` may be stored in fewer bits.
    """

    hidden: Tensor
    calls: tuple[BlockCall, ...]
    dtype: torch.dtype

    def with_hidden(self, hidden: Tensor) -> BlockInputs:
        """The same with other hidden states."""
        return replace(self, hidden=hidden)


Room = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""(shape, dtype) -> a tensor on the CPU to hold hidden states, in memory or mapped from a file."""


def in_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Room for hidden states in memory."""
    return torch.empty(shape, dtype=dtype)


class _Captured(Exception):
    """Ends a forward pass once the first block was reached."""


@torch.no_grad()
def capture_inputs(
    stream: ModelStream, windows: Tensor, *, room: Room = in_memory, dtype: torch.dtype | None = None, start: int = 0
) -> BlockInputs:
    """Inputs of the first decoder block for every window, and how each block is called.

    windows: [n, seq_len] token ids. room: where the hidden states go. dtype: what they are stored in; by default what
    the model computes in. start: the position of a window's first token; only rotary positions take one below 0.
    Raises ModelError where the blocks are no plain chain (each fed by the one before), or for an unknown structure.
    """
    with stream.outside():
        calls, width, computed = _recorded_calls(stream, windows, start)
        hidden = room((*windows.shape, *width), dtype or computed)
        numbers = iter(range(len(windows)))

        def catch(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            hidden[next(numbers)] = _hidden(arguments, keywords)[0]
            raise _Captured

        body, (_, first) = model_body(stream.model), stream.blocks[0]
        handle = first.register_forward_pre_hook(catch, with_kwargs=True)
        try:
            for window in windows.split(1):
                with suppress(_Captured):
                    body(window.to(stream.device, torch.long), use_cache=False)
        finally:
            handle.remove()
    return BlockInputs(hidden, calls, computed)


def stored_inputs(
    stream: ModelStream, windows: Tensor, work: Workspace, dtype: torch.dtype, *, first: int
) -> BlockInputs:
    """capture_inputs with the hidden states in the work's files: those that its next block starts from.

    first: which piece of the work the first block is. Raises OutputError where an earlier run's are not what it wrote.
    """
    if not work.finished:
        return capture_inputs(stream, windows, room=partial(work.state, first), dtype=dtype)
    with stream.outside(), torch.no_grad():
        calls, width, computed = _recorded_calls(stream, windows)
    hidden = work.state(work.finished, (*windows.shape, *width), dtype)
    work.check_state(hidden)
    return BlockInputs(hidden, calls, computed)


def run_block(block: nn.Module, inputs: BlockInputs, index: int) -> Iterator[tuple[int, Tensor]]:
    """(window number, output [1, seq_len, hidden_size]) of block ``index`` for one window after the other."""
    device = next(block.parameters()).device
    call = inputs.calls[index]
    for number, hidden in enumerate(inputs.hidden.split(1)):
        with torch.no_grad():
            output = block(hidden.to(device, inputs.dtype), *call.arguments, **call.keywords)
        yield number, _first(output)


def advance(block: nn.Module, inputs: BlockInputs, index: int, into: Tensor | None = None) -> BlockInputs:
    """The inputs of block ``index + 1``, written to ``into`` or, window by window, over those of this block."""
    outputs = inputs.hidden if into is None else into
    for number, output in run_block(block, inputs, index):
        outputs[number] = output[0].to(outputs.device)
    return inputs.with_hidden(outputs)


def block_hessians(
    block: nn.Module,
    inputs: BlockInputs,
    index: int,
    linears: Mapping[str, nn.Module],
    features: Mapping[str, Features] | None = None,
    experts: Container[str] = (),
) -> dict[str, Tensor]:
    """E[x x^T] [K, K] fp32, over all tokens of all windows, of each given Linear of block ``index``.

    features: by name of Linear, a function of x to take the matrix of instead: E[f(x) f(x)^T] [C, C].
    experts: names of Linears of experts. Theirs is over the tokens routed to them and, where these are few, nearer to
        the matrix of equal and independent channels (``tempered``), which it is where there are none.
    Linears that share an input share one tensor, unless they have features. Memory: one matrix per distinct input.
    Raises ModelError for a Linear that the block never calls, unless it is an expert's.
    """
    sums: dict[str, Tensor] = {}
    tokens: dict[str, int] = {}

    own = features or {}

    def accumulate(name: str, x: Tensor) -> None:
        x = own[name](x).float() if name in own else x.float()
        total = sums.get(name)
        sums[name] = x.t() @ x if total is None else total.addmm_(x.t(), x)
        tokens[name] = tokens.get(name, 0) + x.shape[0]

    groups = [{name: linears[name]} for name in own]
    groups.append({name: module for name, module in linears.items() if name not in own})
    aliases: dict[str, str] = {}
    with ExitStack() as stack:
        taps = [stack.enter_context(InputTap(group, accumulate)) for group in groups]
        for _ in run_block(block, inputs, index):
            pass
    for tap in taps:
        aliases |= tap.aliases
    for name in linears:
        if name not in aliases and name not in experts:
            raise ModelError(f"{name}: its block never calls it, so there is nothing to calibrate on")
        if name not in aliases:
            none = linear_weight(linears[name])[:0].float()
            width = own[name](none).shape[1] if name in own else none.shape[1]
            sums[name], tokens[name], aliases[name] = none.new_zeros(width, width), 0, name
    for name, total in sums.items():
        total.div_(max(tokens[name], 1))
        if name in experts:
            _temper(total, tokens[name])
    return {name: sums[owner] for name, owner in aliases.items()}


def _temper(hessian: Tensor, tokens: int) -> None:
    """Move E[x x^T] over so many tokens, in place, towards that of independent channels of equal size."""
    equal = hessian.diagonal().mean().item() if tokens else 1.0
    hessian.mul_(trust(tokens))
    hessian.diagonal().add_(equal * (1 - trust(tokens)))


Recorded = tuple[tuple[BlockCall, ...], tuple[int, ...], torch.dtype]
"""How each block is called, the shape of a hidden state behind [n, seq_len], and what the blocks compute in."""


def _recorded_calls(stream: ModelStream, windows: Tensor, start: int = 0) -> Recorded:
    """_record_calls, once it is known that what the blocks are called with does not depend on the text.

    Raises ModelError where it does: the calls of one window would be wrong for another.
    """
    ends = [windows[end][None].to(stream.device, torch.long) for end in ((0, -1) if len(windows) > 1 else (0,))]
    with stream.block(0):
        found = [_record_calls(stream, window, start) for window in ends]
    for index, (first, other) in enumerate(zip(found[0][0], found[-1][0], strict=True)):
        if not _same(first.arguments, other.arguments) or not _same(first.keywords, other.keywords):
            raise ModelError(
                f"{type(stream.model).__name__}: hands block {index} something that depends on the text; models with "
                "such blocks (inputs per layer) cannot be run block by block"
            )
    return found[0]


def _same(first: Any, other: Any) -> bool:
    """Whether two arguments of a block are equal; objects that are neither tensors nor collections are taken so."""
    if isinstance(first, Tensor):
        return isinstance(other, Tensor) and torch.equal(first, other)
    if isinstance(first, dict):
        return isinstance(other, dict) and all(_same(value, other.get(key)) for key, value in first.items())
    if isinstance(first, list | tuple):
        return len(first) == len(other) and all(map(_same, first, other))
    return True


def _record_calls(stream: ModelStream, window: Tensor, start: int) -> Recorded:
    """Arguments of every block in one pass; they differ where layers attend differently (sliding, local rope).

    Only the first block computes: what the model hands to a block depends on the tokens' places alone. The others give
    back what they are given, in the form of the first block's answer.
    """
    name, blocks = type(stream.model).__name__, [block for _, block in stream.blocks]
    calls: list[BlockCall] = []
    outputs: list[Any] = []

    def record(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        hidden = _hidden(arguments, keywords)
        before = _first(outputs[-1]) if outputs else None
        if before is not None and (hidden.shape != before.shape or hidden.data_ptr() != before.data_ptr()):
            raise ModelError(f"{name}: block {len(calls)} is not fed by the block before it")
        keywords = {key: value for key, value in keywords.items() if key != "hidden_states"}
        calls.append(BlockCall(arguments[1:], keywords))
        return hidden

    def pass_on(*arguments: Any, **keywords: Any) -> Any:
        hidden = record(arguments, keywords).clone()
        outputs.append((hidden, *outputs[-1][1:]) if isinstance(outputs[-1], tuple) else hidden)
        return outputs[-1]

    shape: list[torch.Size] = []

    def compute(*arguments: Any, **keywords: Any) -> Any:
        shape.append(record(arguments, keywords).shape)
        outputs.append(forward(*arguments, **keywords))
        return outputs[-1]

    forward = blocks[0].forward
    with stream.block(0), ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.callback(block.__dict__.pop, "forward")
            block.forward = pass_on if number else compute
        model_body(stream.model)(window, use_cache=False, **_positions(window, start))
    if len(calls) != len(blocks):
        raise ModelError(f"{name}: a pass runs {len(calls)} of its {len(blocks)} blocks")
    return tuple(calls), tuple(shape[0][2:]), _first(outputs[0]).dtype


def _positions(window: Tensor, start: int) -> dict[str, Tensor]:
    """What a model is told of the positions of a window that does not begin at 0."""
    if not start:
        return {}
    return {"position_ids": torch.arange(start, start + window.shape[1], device=window.device)[None]}


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _hidden(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
    hidden = arguments[0] if arguments else keywords.get("hidden_states")
    if not isinstance(hidden, Tensor):
        raise ModelError("a decoder block is called without hidden states; its structure is not supported")
    return hidden
