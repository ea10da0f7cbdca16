"""How much the model's predictions depend on each Linear's output: what makes errors of different layers comparable.

For a small change dy of a Linear's output y, KL(model || changed model) is 1/2 dy^T F dy with F the Fisher information
E[g g^T] of the output; g is the gradient of -log p(token) for tokens drawn from the model's own predictions. F is
taken as diagonal and independent of the input, as in K-FAC (Martens and Grosse 2015). With dy = dW x this gives
KL ~ 1/2 sum_n E[g_n^2] (dW H dW^T)_nn, H = E[x x^T]: an error in nats per token whatever the layer.
Tokens are taken as independent. Attention averages values over tokens, where errors that tokens share do not cancel:
value projections of models that attend widely are underestimated, which measuring layers (measure.py) corrects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import StatsError
from quantkit.models.logits import logits_of
from quantkit.models.stream import ModelStream
from quantkit.models.streaming import BlockInputs, advance, call_block, capture_inputs
from quantkit.progress import track
from quantkit.storage.resume import passing_workspace

_TOKENS = 8192  # gradients are averaged over all channels' tokens: more text hardly moves them
_SEED = 0


def output_sensitivity(stream: ModelStream, linears: Mapping[str, nn.Module], windows: Tensor) -> dict[str, Tensor]:
    """E[g_n^2] [N] fp64 on the CPU of every given Linear's output channels, per token.

    One block is in memory at a time: forwards, its inputs kept in a file, and backwards again.
    windows: [n, seq_len] token ids; the first ones, up to 8192 tokens, are used. Deterministic.
    Raises StatsError where the gradients hold NaN or Inf.
    """
    sums = {name: torch.zeros((), dtype=torch.float64) for name in linears}
    used = windows[: max(1, _TOKENS // windows.shape[1])]
    last = len(stream.blocks) - 1
    with passing_workspace({}) as work:
        inputs = [capture_inputs(stream, used, room=partial(work.state, 0))]
        shape, dtype = tuple(inputs[0].hidden.shape), inputs[0].hidden.dtype
        for index in track(range(last + 1), "sensitivity, forwards"):
            with stream.block(index) as block:
                inputs.append(advance(block, inputs[index], index, work.state(index + 1, shape, dtype)))
        gradients = work.state(last + 2, shape, dtype)
        with stream.outside():
            _head_gradients(stream, inputs.pop(), used, gradients)
        for index in track(reversed(range(last + 1)), "sensitivity, backwards", total=last + 1):
            with stream.block(index) as block:
                own = {
                    name: module for name, module in linears.items() if stream.owner(name) == stream.blocks[index][0]
                }
                _block_gradients(block, inputs.pop(), index, gradients, own, sums)
    for name, total in sums.items():
        if total.ndim != 1 or not bool(total.isfinite().all()):
            raise StatsError(f"{name}: the gradient of its output is not finite; its sensitivity is undefined")
    return {name: total / used.numel() for name, total in sums.items()}


def _head_gradients(stream: ModelStream, inputs: BlockInputs, windows: Tensor, gradients: Tensor) -> None:
    """Write the gradient of each window's loss with respect to the last block's output."""
    generator = torch.Generator().manual_seed(_SEED)
    with _frozen(stream.model):
        for number, window in enumerate(windows):
            hidden = inputs.hidden[number][None].to(stream.device, inputs.dtype, copy=True).requires_grad_(True)
            _sampled_loss(logits_of(stream, inputs, hidden, window), generator).backward()
            gradients[number] = _gradient(hidden)


def _block_gradients(
    block: nn.Module,
    inputs: BlockInputs,
    index: int,
    gradients: Tensor,
    linears: Mapping[str, nn.Module],
    sums: dict[str, Tensor],
) -> None:
    """Lead the gradients of the block's outputs back to its inputs, in place, and sum those of the Linears' outputs."""
    with ExitStack() as hooks:
        hooks.enter_context(_frozen(block))
        for name, module in linears.items():
            hooks.callback(module.register_forward_hook(_watch(name, sums)).remove)
        for number, kept in enumerate(inputs.hidden.split(1)):
            device = next(block.parameters()).device
            hidden = kept.to(device, inputs.dtype, copy=True).requires_grad_(True)
            call_block(block, inputs, index, hidden).backward(gradients[number][None].to(device))
            gradients[number] = _gradient(hidden)


def _gradient(hidden: Tensor) -> Tensor:
    assert hidden.grad is not None
    return hidden.grad[0].cpu()


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """While entered, no parameter of the module takes a gradient."""
    frozen = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def quadratic_error(difference: Tensor, hessian: Tensor) -> Tensor:
    """Mean squared output error per channel, (dW H dW^T)_nn [N] fp64; difference: [N, K], hessian: [K, K]."""
    return ((difference @ hessian) * difference).sum(dim=-1, dtype=torch.float64).clamp_min(0)


def _sampled_loss(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Summed -log p of one token drawn after every position of a window; logits: [seq_len, vocabulary]."""
    logits = logits.float()
    drawn = torch.multinomial(logits.detach().softmax(dim=-1).cpu(), 1, generator=generator)[:, 0]
    return torch.nn.functional.cross_entropy(logits, drawn.to(logits.device), reduction="sum")


def _watch(name: str, sums: dict[str, Tensor]) -> Callable[[nn.Module, Any, Tensor], None]:
    def accumulate(gradient: Tensor) -> None:
        rows = gradient.reshape(-1, gradient.shape[-1])
        sums[name] = sums[name] + rows.square().sum(dim=0, dtype=torch.float64).cpu()

    def watch(_module: nn.Module, _arguments: Any, output: Tensor) -> None:
        output.register_hook(accumulate)

    return watch
