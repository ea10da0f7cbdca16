"""How much each token's output errors cost the model's predictions: what weighs a Hessian by the end loss.

An error dy of a Linear's output y at one token costs 1/2 (g^T dy)^2 in KL (models/gradients.py), g the gradient there.
Per token and group of output channels the mean of g^2 is kept, so that E[g^2 x x^T] of a group can be taken of
whatever the inputs x are by then. Source: Kim et al. 2025 (GuidedQuant), section 3. Deviation: GuidedQuant takes the
gradient of the loss on the text itself; ours is of tokens drawn from the model's predictions, whose E[g g^T] is the
curvature of the KL to the model that the quantized one is to equal, also where the model is wrong about the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from quantkit.errors import ModelError, StatsError
from quantkit.models.experts import expert_linears
from quantkit.models.families import block_linears, linear_shape
from quantkit.models.gradients import BackwardPass
from quantkit.models.stream import ModelStream
from quantkit.models.streaming import fast_products
from quantkit.progress import track
from quantkit.ranks import Ranks
from quantkit.storage.commits import Commits
from quantkit.storage.resume import Workspace

DTYPE = torch.bfloat16  # the range of fp32: gradients are small, and of very different sizes


@dataclass(frozen=True)
class SaliencyPass:
    """What is to be done. text: [n, ahead + seq_len], the first ``ahead`` tokens uncounted. groups: of each output.

    activations: what hidden states are stored in between blocks. work: pieces of it stand already, one per block.
    """

    stream: ModelStream
    text: Tensor
    ahead: int
    groups: int
    activations: torch.dtype
    work: Workspace
    ranks: Ranks


def check_takes_saliency(model: Any, groups: int) -> None:
    """Raise ModelError for a model of experts, and where a Linear has fewer output channels than groups.

    Which tokens an expert is given changes as blocks are quantized, so those of the original have no place there.
    """
    if expert_linears(model):
        raise ModelError(
            f"{type(model).__name__}: has experts, whose tokens change as blocks are quantized; leave `saliency` out"
        )
    for name, module in block_linears(model).items():
        if linear_shape(module)[0] < groups:
            raise ModelError(f"{name}: has {linear_shape(module)[0]} output channels, fewer than `saliency` {groups}")


def collect_saliency(job: SaliencyPass) -> dict[str, Tensor] | None:
    """E[g^2] over each group of output channels, [n * seq_len, groups] bf16, of every Linear of the decoder blocks.

    Each block is a further piece of the work, the last block first. None is for ranks but the first.
    Raises StatsError, naming the layer, for NaN or Inf.
    """
    stream, work, blocks = job.stream, job.work, len(job.stream.blocks)
    begun = work.finished - blocks  # of the blocks, from the last on
    linears = block_linears(stream.model)
    with fast_products(stream.device), Commits(work, job.ranks, stream.device) as commits:
        if begun < blocks:
            run = BackwardPass(
                stream, job.text, work, 2 * blocks + 1, ahead=job.ahead, activations=job.activations, ranks=job.ranks
            )
            inputs = run.run_forwards(blocks if not begun else blocks - begun - 1)
            shape, dtype = tuple(inputs[0].hidden.shape), inputs[0].dtype
            gradients = work.state(blocks + begun, shape, dtype)
            if begun:
                job.ranks.lead(lambda: work.check_state(gradients))
            else:
                run.head_gradients(inputs.pop(), gradients)
        for index in track(reversed(range(blocks - begun)), "gradients, backwards", total=blocks - begun):
            prefix, _ = stream.blocks[index]
            own = {name: module for name, module in linears.items() if stream.owner(name) == prefix}
            following = work.state(2 * blocks - index, shape, dtype)
            kept = _Kept(job)
            run.block_gradients(index, inputs.pop(), gradients, following, (own, kept.take))
            commits.commit(kept.joined(own), {}, following if index else None)
            work.discard(2 * blocks + 1 + index + 1)
            gradients = following
    return _read_back(work, list(linears)) if job.ranks.leads else None


class _Kept:
    """What one block's Linears gave so far, of this rank's windows."""

    def __init__(self, job: SaliencyPass):
        self._job = job
        self._found: dict[tuple[str, int], Tensor] = {}

    def take(self, name: str, window: int, gradient: Tensor) -> None:
        parts = gradient[self._job.ahead :].float().square().tensor_split(self._job.groups, dim=1)
        means = torch.stack([part.mean(dim=1) for part in parts], dim=1).to("cpu", DTYPE)
        if not bool(means.isfinite().all()):
            raise StatsError(f"{name}: the gradient of its output holds NaN or Inf; the model overflows on this text")
        self._found[name, window] = means

    def joined(self, names: Mapping[str, Any]) -> dict[str, Tensor]:
        """By name, all windows in order, of all ranks."""
        found = {key: means for each in self._job.ranks.collect(self._found) for key, means in each.items()}
        windows = range(len(self._job.text))
        absent = next((name for name in names if (name, 0) not in found), None)
        if absent is not None:
            raise StatsError(f"{absent}: the model never runs it, so it has no gradient")
        return {name: torch.cat([found[name, number] for number in windows]) for name in names}


def _read_back(work: Workspace, names: list[str]) -> dict[str, Tensor]:
    """By name, what the pieces hold; statistics have other names."""
    found = {name: tensor for number in range(work.finished) for name, tensor in load_file(work.piece(number)).items()}
    return {name: found[name] for name in names}
