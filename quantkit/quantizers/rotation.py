"""Rotation of the residual stream, folded into the weights: nothing is left to do when the model runs.

x' = x R with R orthogonal leaves every RMS norm as it is, so rotating what is written to the residual stream
(embedding, o_proj, down_proj) and un-rotating what is read from it (q, k, v, gate, up, head) leaves the model's
function unchanged, while outlier channels are spread over all channels (QuaRot, Ashkboos et al. 2024, section 3).
Bipolar-INT does not rotate; this is what makes its few-bit activations usable on models with outliers. Weights of
binary coding and round-to-nearest lose their own outliers by it.
Inputs of o_proj and down_proj are not on the residual stream and stay as they are: rotating them would cost work at
run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import RecipeError
from quantkit.models.families import decoder_blocks, family_of, linear_weight, norm_kind
from quantkit.models.family import ResidualBlock
from quantkit.models.structure import submodule, untie_head
from quantkit.quantizers.base import Transformed
from quantkit.stats import LayerStats, magnitude_histogram

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
    """Rotate the residual stream where any planned layer asks for it (``rotate: true``); the function stays the same.

    Parts of the model on the meta device are left for a later call: decoder blocks, and all outside them.
    plans: LayerPlan by module name, the settings having ``rotate``. calibration: the artifact, or None.
    A tied head is untied: it takes the last norm's gain, the embedding does not.
    Returns the rotated statistics of the layers that read the residual stream.
    Raises RecipeError for a model of another family.
    """
    if not any(plan.settings.rotate for plan in plans.values()):
        return Transformed({})
    row, last_norm = _residual_stream(model)
    rotation = rotation_matrix(model.config.hidden_size)  # type: ignore[union-attr, arg-type]
    rotation = rotation.to(next(tensor for tensor in model.parameters() if not tensor.is_meta).device)
    if not last_norm.is_meta:
        _rotate_outside(model, last_norm, rotation)
    stats: dict[str, LayerStats] = {}
    for prefix, block in decoder_blocks(model):
        if next(block.parameters()).is_meta:
            continue
        for norm_name, readers in _readers(row).items():
            gain = block.get_submodule(norm_name).weight
            assert isinstance(gain, Tensor)
            for name in readers:
                _unrotate_input(block.get_submodule(name), gain, rotation)
            if calibration is not None:
                rotated = _rotated_stats(calibration.layers[f"{prefix}.{readers[0]}"], gain, rotation)
                stats |= {f"{prefix}.{name}": rotated for name in readers}
            gain.fill_(1.0)
        for name in (row.attention.output, row.target):
            _rotate_output(block.get_submodule(name), rotation)
    return Transformed({"rotated": model.config.hidden_size, "seed": ROTATION_SEED}, stats=stats)  # type: ignore[union-attr]


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
        f"rotate: true is for models of the Llama family (RMS norms, one residual stream); this is "
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
    """Statistics of the rotated input, from the sample of the input before; ``tokens`` stays the number seen."""
    gain = gain.double().cpu()
    normed = torch.where(gain == 0, 0.0, stats.sample.double() / torch.where(gain == 0, 1.0, gain))
    sample = (normed @ rotation.cpu()).float()
    magnitude = sample.abs()
    return replace(
        stats,
        absmax=magnitude.amax(dim=0),
        mean_abs=magnitude.mean(dim=0),
        mean_square=sample.square().mean(dim=0),
        histogram=magnitude_histogram(sample),
        vocabulary_absmax=None,
        sample=sample,
    )
