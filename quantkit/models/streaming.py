"""Running a model block by block: what the inputs of each block are once the blocks before it were quantized."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import ModelError
from quantkit.models.families import decoder_blocks, linear_weight, model_body
from quantkit.models.inputs import InputTap
from quantkit.stats import trust

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

    hidden: [windows, seq_len, hidden_size] in the model's dtype, on the CPU; one window is on the device at a time.
    calls: how each block is called, in block order; the same for every window, as all have one length.
    """

    hidden: Tensor
    calls: tuple[BlockCall, ...]


class _Captured(Exception):
    """Ends a forward pass once the first block was reached."""


@torch.no_grad()
def capture_inputs(model: nn.Module, windows: Tensor) -> BlockInputs:
    """Inputs of the first decoder block for every window, and how each block is called.

    windows: [n, seq_len] token ids.
    Raises ModelError where the blocks are no plain chain (each fed by the one before), or for an unknown structure.
    """
    blocks = [block for _, block in decoder_blocks(model)]
    body = model_body(model)
    device = next(model.parameters()).device
    calls = _record_calls(model, blocks, windows[:1].to(device, torch.long))
    hidden: list[Tensor] = []

    def catch(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        hidden.append(_hidden(arguments, keywords).cpu())
        if hidden[-1].ndim != 3:
            shape = list(hidden[-1].shape)
            raise ModelError(
                f"{type(model).__name__}: its blocks take hidden states of shape {shape}, not one of each token; they "
                "cannot run one by one, as methods with compensation need"
            )
        raise _Captured

    handle = blocks[0].register_forward_pre_hook(catch, with_kwargs=True)
    try:
        for window in windows.split(1):
            try:
                body(window.to(device, torch.long), use_cache=False)
            except _Captured:
                continue
    finally:
        handle.remove()
    return BlockInputs(torch.cat(hidden), calls)


def run_block(block: nn.Module, inputs: BlockInputs, index: int) -> Iterator[tuple[int, Tensor]]:
    """(window number, output [1, seq_len, hidden_size]) of block ``index`` for one window after the other."""
    device = next(block.parameters()).device
    call = inputs.calls[index]
    for number, hidden in enumerate(inputs.hidden.split(1)):
        with torch.no_grad():
            output = block(hidden.to(device), *call.arguments, **call.keywords)
        yield number, output[0] if isinstance(output, tuple) else output


def advance(block: nn.Module, inputs: BlockInputs, index: int) -> BlockInputs:
    """The inputs of block ``index + 1``: ``inputs.hidden`` is overwritten window by window, so memory stays flat."""
    for number, output in run_block(block, inputs, index):
        inputs.hidden[number] = output[0].to(inputs.hidden.device)
    return inputs


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


def _record_calls(model: nn.Module, blocks: list[nn.Module], window: Tensor) -> tuple[BlockCall, ...]:
    """Arguments of every block in one full pass; they differ where layers attend differently (sliding, local rope)."""
    calls: list[BlockCall] = []
    previous: list[Tensor] = []

    def before(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        hidden = _hidden(arguments, keywords)
        if previous and (hidden.shape != previous[0].shape or hidden.data_ptr() != previous[0].data_ptr()):
            raise ModelError(f"{type(model).__name__}: block {len(calls)} is not fed by the block before it")
        keywords = {key: value for key, value in keywords.items() if key != "hidden_states"}
        calls.append(BlockCall(arguments[1:], keywords))

    def after(_module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        previous[:] = [output[0] if isinstance(output, tuple) else output]

    handles = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(after) for block in blocks]
    try:
        model_body(model)(window, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    if len(calls) != len(blocks):
        raise ModelError(f"{type(model).__name__}: a pass runs {len(calls)} of its {len(blocks)} blocks")
    return tuple(calls)


def _hidden(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
    hidden = arguments[0] if arguments else keywords.get("hidden_states")
    if not isinstance(hidden, Tensor):
        raise ModelError("a decoder block is called without hidden states; its structure is not supported")
    return hidden
