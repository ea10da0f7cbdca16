"""Tuning each block as soon as it is quantized; the original model's hidden states flow beside the quantized one's.

With several ranks the first one tunes, on the windows of all, and the others take what it found.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quantkit.jobs.block_work import BlockWork, Done
from quantkit.models.gradients import frozen
from quantkit.models.streaming import BlockInputs, fast_products, run_block
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.progress import say
from quantkit.quantizers.rotation import rotate_outside_again
from quantkit.ranks import Ranks
from quantkit.tuning.block import prediction_error, tune_block
from quantkit.tuning.optimize import TuneReport
from quantkit.tuning.steps import Loss

QUANTIZED, ORIGINAL = 0, 1
"""Whose hidden states stand side by side in BlockInputs."""


def run_original(job: BlockWork, index: int, inputs: BlockInputs, following: Tensor) -> None:
    """Write what the block, not quantized yet, gives in the original model.

    Where targets are blended, they are written where the quantized model's hidden states will stand.
    """
    assert job.tuning is not None
    block, own, blend = job.stream.blocks[index][1], job.ranks.own(len(following)), job.tuning.blend
    with fast_products(job.stream.device):
        for number, output in run_block(block, inputs.of(ORIGINAL), index, own):
            following[number, ORIGINAL] = output[0].to(following.device)
        if blend != 1:
            for number, output in run_block(block, inputs.of(QUANTIZED), index, own):
                original = following[number, ORIGINAL].to(output)
                following[number, QUANTIZED] = torch.lerp(output[0], original, blend).to(following.device)


def tune_quantized(
    job: BlockWork,
    index: int,
    inputs: BlockInputs,
    following: Tensor,
    part: Done,
    originals: Mapping[str, Tensor],
) -> None:
    """Tune the block, now quantized, towards what run_original wrote.

    originals: by name of a Linear, its weight [N, K] before quantization; empty where codes stay.
    """
    settings, (name, block) = job.tuning, job.stream.blocks[index]
    assert settings is not None
    own, started = inputs.of(QUANTIZED), time.perf_counter()
    targets = following[:, ORIGINAL if settings.blend == 1 else QUANTIZED]
    _share_windows(own.hidden, job.ranks)
    _share_windows(targets, job.ranks)

    def tuned() -> tuple[TuneReport, dict[str, Tensor]]:
        with fast_products(job.stream.device), _predictions(job, index, own, targets) as loss:
            report = tune_block(
                block,
                index,
                own,
                targets,
                settings,
                dtype=job.dtype,
                original=lambda layer: originals[f"{name}.{layer}"],
                loss=loss,
            )
        return report, {key: value.detach().cpu() for key, value in _tunable_tensors(block).items()}

    report, values = job.ranks.lead(tuned)
    if not job.ranks.leads:
        with torch.no_grad():
            for key, tensor in _tunable_tensors(block).items():
                tensor.copy_(values[key])
    part.tuned_blocks[name] = report.to_json()
    seconds = time.perf_counter() - started
    what = "divergence" if _tunes_predictions(job, index) else "error"
    say(f"{name}: tuned in {seconds:.1f} s, held-out {what} {report.before:.3g} -> {report.after:.3g}")


def _tunes_predictions(job: BlockWork, index: int) -> bool:
    return job.tuning is not None and job.tuning.logits and index == len(job.stream.blocks) - 1


@contextmanager
def _predictions(job: BlockWork, index: int, inputs: BlockInputs, targets: Tensor) -> Iterator[Loss | None]:
    """The divergence of predictions where it is what the block's passes lower, which takes what is outside the blocks
    into memory; else None."""
    if not _tunes_predictions(job, index):
        yield None
        return
    assert job.artifact is not None
    with job.stream.outside(), frozen(job.stream.model):
        rotate_outside_again(job.stream.model, job.plans)
        yield prediction_error(job.stream, inputs, targets, job.artifact.windows)


def _tunable_tensors(block: nn.Module) -> dict[str, Tensor]:
    """By name in the block: the tensors of its quantized Linears, and its vectors."""
    quantized = {name for name, module in block.named_modules() if isinstance(module, QuantizedLinear)}
    return {
        name: tensor
        for name, tensor in block.named_parameters()
        if tensor.ndim == 1 or name.rpartition(".")[0] in quantized
    }


def _share_windows(hidden: Tensor, ranks: Ranks) -> None:
    """Give every rank all windows of hidden states of which each has its own."""
    if ranks.count == 1:
        return
    for first in range(0, len(hidden), ranks.count):
        mine = min(first + ranks.number, len(hidden) - 1)
        for number, window in enumerate(ranks.collect(hidden[mine].cpu().clone()), first):
            if number < len(hidden):
                hidden[number] = window.to(hidden.device)
