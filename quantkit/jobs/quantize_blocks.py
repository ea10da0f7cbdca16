"""Quantizing a model block by block: one block is in memory, what it gave is on the disk before the next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibration.artifact import Calibration
from quantkit.checkpoint.config import CheckpointConfig, StoredLayer
from quantkit.checkpoint.write import stored_tensors
from quantkit.errors import ModelError
from quantkit.formats.base import PackedWeight
from quantkit.formats.shard import join
from quantkit.integrations.transformers import install_layers, install_prefix
from quantkit.jobs.block_work import BlockWork, Done
from quantkit.jobs.prefix_pass import PrefixPass
from quantkit.jobs.solve_layers import quantize_layers
from quantkit.jobs.tune_blocks import QUANTIZED, run_original, tune_quantized
from quantkit.methods import METHODS, LayerPlan, weighs_by_loss
from quantkit.models.experts import expert_linears
from quantkit.models.families import linear_bias, linear_shape, linear_weight
from quantkit.models.hessians import Features, Weighing, block_hessians
from quantkit.models.stream import ModelStream
from quantkit.models.streaming import BlockInputs, fast_products, run_block, state_room, stored_inputs
from quantkit.models.structure import untie_head
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.progress import track
from quantkit.quantizers.base import LayerInput
from quantkit.ranks import Loads
from quantkit.runtime import int8_attention
from quantkit.runtime import prefix as runtime_prefix
from quantkit.runtime.expanded_weights import expanded
from quantkit.stats import LayerStats
from quantkit.storage.commits import Commits
from quantkit.storage.resume import Workspace

ATTENTION_WINDOWS = 8  # enough for the largest magnitudes
HEAD_ROWS = 4096  # of the head, quantized at once: its quantizer holds several copies in fp32


def quantize_blocks(job: BlockWork, work: Workspace) -> Done:
    """Quantize and replace every planned layer; each block, and before them all that is outside, is a piece of work.

    Where a block needs Hessians, they are of the inputs that the blocks before it, already quantized, produce.
    """
    with ExitStack() as stack:
        if job.attention:
            stack.enter_context(int8_attention.observing(job.stream.model))
        if job.prefix is not None:
            stack.enter_context(runtime_prefix.installed(job.stream.model))
        return _quantize_blocks(job, work)


def _quantize_blocks(job: BlockWork, work: Workspace) -> Done:
    done, stream, last, begun = Done(), job.stream, len(job.stream.blocks) - 1, work.finished
    with Commits(work, job.ranks, stream.device) as commits:
        inputs, ahead, outside = _quantize_outside(job, work, commits)
        if not begun:
            done.add(outside.to_json())
        for number in range(begun):
            earlier = Done()
            earlier.add(work.document(number))
            install_layers(
                stream.model, {name: one for name, one in earlier.stored.items() if not _is_packed(stream, name)}
            )
            _install_prefix(job, number - 1)
            done.add(earlier.to_json())
        for index in track(range(max(0, begun - 1), last + 1), "quantizing blocks"):
            part, following = Done(), None
            if inputs is not None and (index < last or job.tunes_blocks):
                hidden = inputs.hidden
                following = state_room(stream.device, work, index + 2, tuple(hidden.shape), hidden.dtype)
            with stream.block(index) as block:
                _quantize_block(job, index, inputs, ahead, following, part)
                following = following if index < last else None
                if inputs is not None:
                    into = None if following is None else inputs.with_hidden(following).of(QUANTIZED).hidden
                    _run_on(job, index, inputs.of(QUANTIZED), into, part)
                block.to("cpu", job.dtype)
                commits.commit(_stored_part(stream, stream.blocks[index][0]), part.to_json(), following)
            done.add(part.to_json())
            if inputs is not None and following is not None:
                inputs = inputs.with_hidden(following)
    if job.attention and not done.attention:
        raise ModelError(f"{type(stream.model).__name__}: no attention module called the attention function")
    return done


def _install_prefix(job: BlockWork, index: int) -> None:
    """Give a block that an earlier run has quantized the shapes of its prefix; index -1 is what stands before them."""
    if job.prefix is None or not 0 <= index < len(job.stream.blocks):
        return
    name, _ = job.stream.blocks[index]
    own = {module: shape for module, shape in job.prefix.modules.items() if module.startswith(f"{name}.")}
    install_prefix(job.stream.model, CheckpointConfig({}, (), {}, prefix=replace(job.prefix, modules=own)))


def _quantize_outside(
    job: BlockWork, work: Workspace, commits: Commits
) -> tuple[BlockInputs | None, PrefixPass | None, Done]:
    """The piece before the blocks: what is outside them, edited by the methods.

    Returns what flows into the next block, of the text and of the prefix, and what was done.

    The methods' edit may change the model's structure (untie its head), so a run that goes on makes it again. A head
    that is quantized has a tensor of its own; where it was tied, the embedding keeps the weight.
    """
    stream, inputs, ahead, part = job.stream, None, None, Done()
    with stream.outside():
        transform_part(job, part)
        if job.artifact is not None and job.streams and work.finished <= len(stream.blocks):
            with fast_products(stream.device):
                windows, stored = job.artifact.windows, job.activations
                inputs = stored_inputs(stream, windows, work, stored, first=1, models=job.models, ranks=job.ranks)
        if job.prefix is not None and work.finished <= len(stream.blocks):
            hidden = work.document(work.finished - 1).get("prefix_hidden") if work.finished else None
            ahead = PrefixPass(stream, job.prefix, hidden)
        head = next((name for name in job.plans if stream.owner(name) is None), None)
        if head is not None:
            untie_head(stream.model)
        if not work.finished:
            packed = {} if head is None else _quantize_head(job, head, part)
            tensors = {name: _stored(tensor, job.dtype, packed) for name, tensor in _stored_part(stream, None).items()}
            commits.commit(tensors, part.to_json(), None if inputs is None else inputs.hidden)
    return inputs, ahead, part


def _quantize_head(job: BlockWork, name: str, part: Done) -> dict[int, Tensor]:
    """Quantize and replace the head, some rows at a time; returns its stored tensors by address."""
    model, plan = job.stream.model, job.plans[name]
    module: Any = model.get_submodule(name)
    weight, method, joined, errors = linear_weight(module).detach(), METHODS[plan.method], [], 0.0
    for rows in track(weight.split(HEAD_ROWS), "quantizing the head"):
        layer = LayerInput(name, rows.float().contiguous())
        packed = method.quantize(layer, plan.settings)
        joined.append(packed.tensors)
        errors += packed.report["weight_error"] * float(layer.weight.square().sum(dtype=torch.float64))
    tensors = join(packed.spec, joined, weight.shape[1])
    assert tensors is not None
    norm = sum(float(rows.float().square().sum(dtype=torch.float64)) for rows in weight.split(HEAD_ROWS))
    report = {"weight_error": errors / norm if norm else 0.0}
    whole = PackedWeight(packed.spec, (weight.shape[0], weight.shape[1]), tensors, report)
    quantized = QuantizedLinear.from_packed(whole, linear_bias(module), module.weight.dtype)
    model.set_submodule(name, quantized)
    part.layers[name] = {"method": plan.method, **report}
    part.stored[name] = StoredLayer(quantized.spec, quantized.shape)
    return {tensor.data_ptr(): tensor for tensor in quantized.held.values()}


def _stored(tensor: Tensor, dtype: torch.dtype, packed: Mapping[int, Tensor]) -> Tensor:
    """What is written of a tensor outside the blocks: the format's own as they are, other floats in ``dtype``."""
    own = tensor.data_ptr() in packed or not tensor.is_floating_point()
    return (tensor if own else tensor.to(dtype)).cpu()  # in one step a GPU's would be converted by the CPU


def _is_packed(stream: ModelStream, name: str) -> bool:
    return isinstance(stream.model.get_submodule(name), QuantizedLinear)


def _stored_part(stream: ModelStream, prefix: str | None) -> dict[str, Tensor]:
    return stored_tensors(stream.model, lambda name: stream.owner(name) == prefix)


def transform_part(job: BlockWork, part: Done) -> tuple[dict[str, Tensor], dict[str, LayerStats]]:
    """Run each method's function-preserving edit on the part of the model that is in memory.

    Returns, by layer name, the scales that were folded and the statistics that changed.
    """
    folded: dict[str, Tensor] = {}
    changed: dict[str, LayerStats] = {}
    for name in sorted({plan.method for plan in job.plans.values()}):
        transform = METHODS[name].transform
        if transform is not None:
            own = {layer: plan for layer, plan in job.plans.items() if plan.method == name}
            edited = transform(job.stream.model, own, job.artifact)
            part.transforms[name] = dict(edited.report)
            folded |= edited.folded_scales
            changed |= edited.stats
    return folded, changed


def _quantize_block(
    job: BlockWork,
    index: int,
    inputs: BlockInputs | None,
    ahead: PrefixPass | None,
    following: Tensor | None,
    part: Done,
) -> None:
    """Quantize and replace the planned layers of one block, and tune it where that is asked for."""
    model, (prefix, block) = job.stream.model, job.stream.blocks[index]
    folded, changed = transform_part(job, part)
    if ahead is not None:
        ahead.attach(index)
        part.prefix_hidden = ahead.hidden()
    if job.tunes_blocks and inputs is not None and following is not None:
        run_original(job, index, inputs, following)
    own = {name: plan for name, plan in job.plans.items() if job.stream.owner(name) == prefix}
    known = None if job.artifact is None else replace(job.artifact, layers={**job.artifact.layers, **changed})
    layers: dict[str, LayerInput | None] = {name: _layer_input(model, name, known, folded.get(name)) for name in own}
    originals = _original_weights(job, layers)
    if inputs is not None:
        layers |= _with_hessians(job, block, index, inputs.of(QUANTIZED), own, layers)
    experts = expert_linears(model)
    solved = _solved(job, own, layers)
    for name, plan in own.items():
        packed, module = solved.pop(name), model.get_submodule(name)
        quantized = QuantizedLinear.from_packed(packed, linear_bias(module), linear_weight(module).dtype)
        model.set_submodule(name, quantized)
        part.layers[name] = {"method": plan.method, **packed.report}
        if known is not None and name in experts:
            part.layers[name]["tokens"] = known.layers[name].tokens
        part.stored[name] = StoredLayer(quantized.spec, quantized.shape)
    if own and job.tunes_blocks and inputs is not None and following is not None:
        tune_quantized(job, index, inputs, following, part, originals)


def _original_weights(job: BlockWork, layers: Mapping[str, LayerInput | None]) -> dict[str, Tensor]:
    """By layer name, what tuning chooses codes again from; nothing where they stay."""
    if job.tuning is None or not job.tuning.block_codes or not job.ranks.leads:
        return {}
    return {name: layer.weight for name, layer in layers.items() if layer is not None}


def _solved(
    job: BlockWork, plans: Mapping[str, LayerPlan], layers: Mapping[str, LayerInput | None]
) -> dict[str, PackedWeight]:
    """Every layer, quantized by one of the ranks: by that which has its Hessian, where its method asks for one."""
    free = {name: plan for name, plan in plans.items() if not METHODS[plan.method].needs_hessian(plan.settings)}
    costs = {name: float(math.prod(linear_shape(job.stream.model.get_submodule(name)))) for name in free}
    shared = Loads(job.ranks).assign(costs)
    own = {name: layer for name, layer in layers.items() if shared.get(name, job.ranks.number) == job.ranks.number}
    solved = quantize_layers(plans, {name: layer for name, layer in own.items() if layer is not None})
    if job.ranks.count == 1:
        return solved
    device = job.stream.device
    sent = job.ranks.collect({name: packed.to("cpu") for name, packed in solved.items()})
    return {name: packed.to(device) for each in sent for name, packed in each.items()}


def _run_on(job: BlockWork, index: int, inputs: BlockInputs, following: Tensor | None, part: Done) -> None:
    """Run the quantized block: its outputs go to ``following``, the ranges of its attention to ``part``."""
    prefix, block = job.stream.blocks[index]
    int8_attention.take_scales(prefix, block)  # of the block before it was quantized
    own = job.ranks.own(len(inputs.hidden))
    watched = [number for number in own if job.attention and number < ATTENTION_WINDOWS]
    # A GPU has held the block in floating point just before; a CPU's memory is to stay as small as the packed block's.
    once = expanded(block) if job.stream.device.type == "cuda" else nullcontext()
    with fast_products(job.stream.device), once:
        _run_windows(block, inputs, index, watched, following)
        if job.attention:
            for scales in job.ranks.collect(int8_attention.take_scales(prefix, block)):
                part.attention |= {name: one.covering(part.attention.get(name)) for name, one in scales.items()}
        if following is not None:
            _run_windows(block, inputs, index, own[len(watched) :], following)


def _run_windows(
    block: nn.Module, inputs: BlockInputs, index: int, numbers: Sequence[int], following: Tensor | None
) -> None:
    for number, output in run_block(block, inputs, index, numbers):
        if following is not None:
            following[number] = output[0].to(following.device)


def _layer_input(model: nn.Module, name: str, artifact: Calibration | None, folded: Tensor | None) -> LayerInput:
    weight = linear_weight(model.get_submodule(name)).detach().float().contiguous()
    stats = artifact.stats_of(name) if artifact is not None else None
    return LayerInput(name, weight, stats, folded_scale=folded)


def _with_hessians(
    job: BlockWork,
    block: nn.Module,
    index: int,
    inputs: BlockInputs,
    plans: Mapping[str, LayerPlan],
    layers: Mapping[str, LayerInput | None],
) -> dict[str, LayerInput | None]:
    """The layers of one block whose methods ask for a Hessian, each with it; None for one that another rank has."""
    model = job.stream.model
    wanted: dict[str, nn.Module] = {}
    features: dict[str, Features] = {}
    saliency: dict[str, Tensor] = {}
    for name, plan in plans.items():
        method, layer = METHODS[plan.method], layers[name]
        if method.needs_hessian(plan.settings):
            wanted[name] = model.get_submodule(name)
            if method.hessian_features is not None and layer is not None:
                features[name] = method.hessian_features(layer, plan.settings)
            if weighs_by_loss(plan):
                saliency[name] = _saliency(job, name, plan)
    if not wanted:
        return {}
    with fast_products(job.stream.device):
        weighing = Weighing(features, expert_linears(model), saliency)
        hessians = block_hessians(block, inputs, index, wanted, weighing, ranks=job.ranks)
    found: dict[str, LayerInput | None] = dict.fromkeys(wanted)
    for name, hessian in hessians.items():
        layer = layers[name]
        assert layer is not None
        found[name] = replace(layer, hessian=hessian)
    return found


def _saliency(job: BlockWork, name: str, plan: LayerPlan) -> Tensor:
    """[windows, seq_len, groups] of a Linear; one group where a rotation has mixed the channels of its output."""
    assert job.artifact is not None
    weights = job.artifact.saliency[name].view(*job.artifact.windows.shape, -1)
    return weights.float().mean(dim=-1, keepdim=True) if getattr(plan.settings, "rotate", False) else weights
