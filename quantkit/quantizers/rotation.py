"""Rotation of the residual stream and of the heads' values, folded into the weights.

x' = x R with R orthogonal leaves every RMS norm as it is, so rotating what is written to the residual stream
(embedding, o_proj, down_proj) and un-rotating what is read from it (q, k, v, gate, up, head) leaves the model's
function unchanged, while outlier channels are spread over all channels (QuaRot, Ashkboos et al. 2024, section 3).
Bipolar-INT does not rotate; this is what makes its few-bit activations usable on models with outliers. Weights of
binary coding and round-to-nearest lose their own outliers by it.
Inputs of o_proj and down_proj are not on the residual stream, and stay as they are with ``rotate: true``. With
``rotate: online`` the values of every head are rotated among themselves, which attention's average over tokens leaves
alone: v_proj writes them so, and o_proj reads them so. Nothing can be folded in front of down_proj, as a product of
elements comes before, so its inputs are rotated as the model runs (formats/hadamard.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import RecipeError
from quantkit.formats.hadamard import NARROWEST_BLOCK
from quantkit.models.families import decoder_blocks, family_of, linear_shape, linear_weight, norm_kind
from quantkit.models.family import Attention, ResidualBlock
from quantkit.models.structure import gated_outputs, submodule, untie_head
from quantkit.quantizers.base import AUTO, ONLINE, Transformed
from quantkit.stats import LayerStats, stats_of_sample

ROTATION_SEED = 0


def rotation_matrix(size: int, seed: int = ROTATION_SEED) -> Tensor:
    """An orthogonal matrix [size, size] fp64: random signs, then a Hadamard matrix as far as size allows.

    With size = 2**a * m, m odd, it is diag(signs) (H_{2^a} kron Q_m), Q_m a random orthogonal matrix: every output is
    an even mix of 2**a groups of inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    odd = size // (size & -size)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size // odd:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) / 2**0.5
    mixed, _ = torch.linalg.qr(torch.randn(odd, odd, dtype=torch.float64, generator=generator))
    signs = torch.randint(0, 2, (size, 1), generator=generator) * 2.0 - 1.0
    return signs * torch.kron(matrix, mixed.contiguous())


@torch.no_grad()
def fold_rotation(model: nn.Module, plans: Mapping[str, Any], calibration: Any) -> Transformed:
    """Rotate the residual stream where any planned layer asks for it (``rotate``), and with ``rotate: online`` the
    values of every head; the function stays the same.

    Parts of the model on the meta device are left for a later call: decoder blocks, and all outside them.
    plans: LayerPlan by module name, the settings having ``rotate``. calibration: the artifact, or None.
    A tied head is untied: it takes the last norm's gain, the embedding does not.
    Returns the rotated statistics of the layers that read the residual stream, or the values.
    Raises RecipeError for a model of another family.
    """
    asked = {plan.settings.rotate for plan in plans.values()}
    if not any(asked):
        return Transformed({})
    _, last_norm = _residual_stream(model)
    parts: list[str | None] = [] if last_norm.is_meta else [None]
    parts += [prefix for prefix, block in decoder_blocks(model) if not next(block.parameters()).is_meta]
    stats: dict[str, LayerStats] = {}
    for part in parts:
        stats |= rotate_part(model, part, values=ONLINE in asked, calibration=calibration)
    report: dict[str, Any] = {"rotated": model.config.hidden_size, "seed": ROTATION_SEED}  # type: ignore[union-attr]
    return Transformed(report | ({"values": True} if ONLINE in asked else {}), stats=stats)


@torch.no_grad()
def rotate_part(model: nn.Module, part: str | None, *, values: bool, calibration: Any) -> dict[str, LayerStats]:
    """Rotate a decoder block, by name, or what is outside the blocks (None), which is in memory and not yet rotated.

    values: those of every head too. Returns and raises as fold_rotation does.
    """
    row, last_norm = _residual_stream(model)
    rotation = rotation_matrix(model.config.hidden_size)  # type: ignore[union-attr, arg-type]
    if part is None:
        _rotate_outside(model, last_norm, rotation.to(last_norm.device))
        return {}
    block = model.get_submodule(part)
    rotation = rotation.to(next(block.parameters()).device)
    stats: dict[str, LayerStats] = {}
    for norm_name, readers in _readers(row).items():
        gain = block.get_submodule(norm_name).weight
        assert isinstance(gain, Tensor)
        for name in readers:
            _unrotate_input(block.get_submodule(name), gain, rotation)
        if calibration is not None:
            rotated = _rotated_stats(calibration.layers[f"{part}.{readers[0]}"], gain, rotation)
            stats |= {f"{part}.{name}": rotated for name in readers}
        gain.fill_(1.0)
    if values:
        matrix = _rotate_values(block, row.attention)
        if calibration is not None:
            reader = f"{part}.{row.attention.output}"
            stats[reader] = _behind(matrix, calibration.layers[reader], 1.0)
    for name in (row.attention.output, row.target):
        _rotate_output(block.get_submodule(name), rotation)
    return stats


def rotate_outside_again(model: nn.Module, plans: Mapping[str, Any]) -> None:
    """What fold_rotation does to all that is outside the blocks, which was read anew. plans: as it takes them."""
    if any(getattr(plan.settings, "rotate", False) for plan in plans.values()):
        rotate_part(model, None, values=False, calibration=None)


def placed_rotations(model: nn.Module, plans: Mapping[str, Any]) -> dict[str, Any]:
    """The plans, with ``rotate_inputs`` for the last Linear of each FFN that asks for ``rotate: online``.

    What asks for ``rotate_inputs: auto`` keeps that where a gated FFN ends and its width has a Hadamard block.
    model: may be on the meta device. plans: LayerPlan by module name.
    Raises RecipeError for ``online`` on a model of another family, or an FFN whose width has no Hadamard block.
    """
    placed = _placed_choices(model, plans)
    if not any(_is_online(plan) for plan in plans.values()):
        return placed
    row, _ = _residual_stream(model)
    for prefix, _ in decoder_blocks(model):
        name = f"{prefix}.{row.target}"
        if name in plans and _is_online(plans[name]):
            _, columns = linear_shape(model.get_submodule(name))
            if columns % NARROWEST_BLOCK:
                raise RecipeError(
                    f"rotate: online needs FFNs whose width is a multiple of {NARROWEST_BLOCK}; that of {name} is "
                    f"{columns}; set rotate=true"
                )
            placed[name] = replace(plans[name], settings=replace(plans[name].settings, rotate_inputs=True))
    return placed


def _placed_choices(model: nn.Module, plans: Mapping[str, Any]) -> dict[str, Any]:
    """The plans with ``rotate_inputs: auto`` only where that is a choice to make."""
    placed, chosen = dict(plans), [name for name, plan in plans.items() if _chooses(plan)]
    ends = gated_outputs(model) if chosen else set()
    for name in chosen:
        _, columns = linear_shape(model.get_submodule(name))
        if name not in ends or columns % NARROWEST_BLOCK:
            placed[name] = replace(plans[name], settings=replace(plans[name].settings, rotate_inputs=False))
    return placed


def _chooses(plan: Any) -> bool:
    return getattr(plan.settings, "rotate_inputs", False) == AUTO


def _is_online(plan: Any) -> bool:
    return getattr(plan.settings, "rotate", False) == ONLINE


def _rotate_values(block: nn.Module, attention: Attention) -> Tensor:
    """Rotate every head's values among themselves, in v_proj's rows and o_proj's columns; returns the matrix [D, D]."""
    value, output = (block.get_submodule(name) for name in (attention.inputs[-1], attention.output))
    weight = linear_weight(value)
    head_dim = int(block.get_submodule(attention.module).head_dim)  # type: ignore[arg-type]
    rotation = rotation_matrix(head_dim).to(weight.device)
    _set(weight, (rotation.T @ weight.double().unflatten(0, (-1, head_dim))).flatten(0, 1))
    if isinstance(bias := getattr(value, "bias", None), Tensor):
        _set(bias, (bias.double().unflatten(0, (-1, head_dim)) @ rotation).flatten())
    weight = linear_weight(output)
    _set(weight, (weight.double().unflatten(1, (-1, head_dim)) @ rotation).flatten(1))
    return rotation


def _rotate_outside(model: nn.Module, last_norm: Tensor, rotation: Tensor) -> None:
    head, embedding = _untied_head(model), model.get_input_embeddings()  # type: ignore[operator]
    _set(embedding.weight, embedding.weight.double() @ rotation)
    _unrotate_input(head, last_norm, rotation)
    last_norm.fill_(1.0)


def _residual_stream(model: nn.Module) -> tuple[ResidualBlock, Tensor]:
    """What the decoder blocks compute, and the weight of the norm behind them.

    Raises RecipeError for a model with other norms than RMS norms.
    """
    family = family_of(model)
    last_norm = None if family.last_norm is None else submodule(model, family.last_norm)
    kind = None if last_norm is None else norm_kind(last_norm)
    if family.block is not None and last_norm is not None and kind is not None and not kind.centered:
        return family.block, last_norm.get_parameter("weight")
    raise RecipeError(
        f"rotate is for models of the Llama family (RMS norms, one residual stream); this is "
        f"{type(model).__name__}; set rotate=false"
    )


def _readers(row: ResidualBlock) -> dict[str, tuple[str, ...]]:
    """Per norm of a block, the Linears that read it."""
    return {
        row.norms[0]: row.attention.inputs,
        row.norms[1]: (row.source,) if row.gate is None else (row.gate, row.source),
    }


def _untied_head(model: nn.Module) -> nn.Module:
    """The language-model head with a weight of its own."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    if head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        untie_head(model)
    return head


def _unrotate_input(linear: nn.Module, gain: Tensor, rotation: Tensor) -> None:
    weight = linear_weight(linear)
    _set(weight, (weight.double() * gain.double()) @ rotation)


def _rotate_output(linear: nn.Module, rotation: Tensor) -> None:
    weight = linear_weight(linear)
    _set(weight, rotation.T @ weight.double())
    if isinstance(bias := getattr(linear, "bias", None), Tensor):
        _set(bias, bias.double() @ rotation)


def _set(target: Tensor, value: Tensor) -> None:
    target.copy_(value.to(target.dtype))


def _rotated_stats(stats: LayerStats, gain: Tensor, rotation: Tensor) -> LayerStats:
    """Statistics of the rotated input of a norm's readers, from the sample of the input before."""
    gain = gain.double().cpu()
    return _behind(rotation, stats, torch.where(gain == 0, 0.0, 1.0 / torch.where(gain == 0, 1.0, gain)))


def _behind(rotation: Tensor, stats: LayerStats, scale: Tensor | float) -> LayerStats:
    """Statistics of x scale R, from the sample of x; R [D, D] turns every D columns among themselves."""
    parts = (stats.sample.double() * scale).unflatten(1, (-1, len(rotation)))
    return stats_of_sample(stats, (parts @ rotation.cpu()).flatten(1).float())
