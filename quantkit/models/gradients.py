"""The gradients of a loss with respect to the outputs of Linears, with one block of the model in memory at a time.

The blocks run forwards once and their inputs are kept. Then the gradient of the loss with respect to the hidden states
is led back from the head to the first block; each block computes its outputs again, this time with a graph.

The loss is -log p of one token drawn after every position from the model's own predictions. Its E[g g^T] is the
Fisher information, which is also the Hessian of KL(model || changed model) where nothing is changed yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.models.logits import logits_of
from quantkit.models.stream import ModelStream
from quantkit.models.streaming import BlockInputs, call_block, capture_inputs, run_block
from quantkit.progress import track
from quantkit.ranks import ALONE, Ranks
from quantkit.storage.resume import Workspace

Take = Callable[[str, int, Tensor], None]
"""(name of a Linear, number of the window, gradient of its output [tokens, N]): takes in one window's gradients."""

Taps = tuple[Mapping[str, nn.Module], Take]
"""Linears by name, and what takes in the gradients of their outputs."""

_SEED = 0


@dataclass(frozen=True)
class BackwardPass:
    """One pass forwards and one backwards over windows.

    windows: [n, seq_len] token ids. ahead: how many of a window's first tokens are predicted without being counted.
    work: where hidden states and gradients stand, in files from number ``first`` on. activations: what hidden states
    are stored in. ranks: those that share the windows; each runs its own.
    """

    stream: ModelStream
    windows: Tensor
    work: Workspace
    first: int
    ahead: int = 0
    activations: torch.dtype = torch.float32
    ranks: Ranks = ALONE

    def run_forwards(self, blocks: int) -> list[BlockInputs]:
        """What flows into the first block and, of so many blocks, out of each."""
        room, own = partial(self.work.state, self.first), self.ranks.own(len(self.windows))
        found = [capture_inputs(self.stream, self.windows, room=room, dtype=self.activations, ranks=self.ranks)]
        shape, dtype = tuple(found[0].hidden.shape), found[0].hidden.dtype
        for index in track(range(blocks), "gradients, forwards"):
            following = self.work.state(self.first + index + 1, shape, dtype)
            with self.stream.block(index) as block:
                for number, output in run_block(block, found[index], index, own):
                    following[number] = output[0].to(following.device)
            found.append(found[0].with_hidden(following))
        return found

    def head_gradients(self, inputs: BlockInputs, into: Tensor) -> None:
        """Write the gradient of each own window's loss with respect to the last block's output."""
        with self.stream.outside(), torch.enable_grad(), frozen(self.stream.model):
            for number in self.ranks.own(len(self.windows)):
                window = self.windows[number]
                hidden = inputs.hidden[number][None].to(self.stream.device, inputs.dtype, copy=True)
                logits = logits_of(self.stream, inputs, hidden.requires_grad_(True), window)
                sampled_loss(logits[self.ahead :], number).backward()
                into[number] = _gradient(hidden)

    def block_gradients(
        self,
        index: int,
        inputs: BlockInputs,
        gradients: Tensor,
        into: Tensor,
        taps: Taps,
    ) -> None:
        """Lead the gradients of a block's outputs back to its inputs; those of the Linears' outputs are taken in.

        gradients, into: [n, seq_len, hidden_size], which may be one tensor.
        """
        linears, take = taps
        running = [0]
        with ExitStack() as stack:
            block = stack.enter_context(self.stream.block(index))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(frozen(block))
            for name, module in linears.items():
                stack.callback(module.register_forward_hook(_watch(name, running, take)).remove)
            device = next(block.parameters()).device
            for number in self.ranks.own(len(self.windows)):
                running[0] = number
                hidden = inputs.hidden[number][None].to(device, inputs.dtype, copy=True).requires_grad_(True)
                output = call_block(block, inputs, index, hidden)
                output.backward(gradients[number][None].to(device, output.dtype))
                into[number] = _gradient(hidden)


def sampled_loss(logits: Tensor, window: int) -> Tensor:
    """Summed -log p of one token drawn after every position; logits: [tokens, vocabulary].

    window: its number, which decides the draw: it does not depend on which windows were drawn before.
    """
    logits = logits.float()
    generator = torch.Generator().manual_seed(_SEED + window)
    drawn = torch.multinomial(logits.detach().softmax(dim=-1).cpu(), 1, generator=generator)[:, 0]
    return torch.nn.functional.cross_entropy(logits, drawn.to(logits.device), reduction="sum")


def _gradient(hidden: Tensor) -> Tensor:
    assert hidden.grad is not None
    return hidden.grad[0].cpu()


def _watch(name: str, running: Sequence[int], take: Take) -> Callable[[nn.Module, Any, Tensor], None]:
    def accumulate(gradient: Tensor) -> None:
        take(name, running[0], gradient.reshape(-1, gradient.shape[-1]))

    def watch(_module: nn.Module, _arguments: Any, output: Tensor) -> None:
        output.register_hook(accumulate)

    return watch


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """While entered, no parameter of the module takes a gradient."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in parameters:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
