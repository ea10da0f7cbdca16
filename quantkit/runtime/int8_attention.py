"""Attention whose two batched products, Q K^T and P V, are products of INT8 codes.

Source: FlattenQuant, section 5.1, which replaces the batched matrix multiplications too. It is an attention function of
transformers, so it serves every model that takes one. Codes lie in -127..127:

  Q, K, V   one static scale each per layer, from the largest magnitude on calibration windows; clamped beyond it
  P         exp(s - largest s of the row), which is at most 1, times 127; a row is divided by the sum of its codes
Deviation: the paper does not say how P is scaled. One scale for finished probabilities rounds those below 1/254 to
zero, and with them a row that looks at many tokens alike; scaled before they are divided, such a row keeps them all.

The arithmetic is the op quantkit::int8_attention (ops/attention/op.py): INT8 products on a GPU, elsewhere the same
integers held in fp32. Masks are those of transformers' sdpa function: none at all where a causal one says it all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from quantkit.checkpoint.config import ATTENTION_BITS, AttentionScales
from quantkit.errors import ModelError
from quantkit.ops.attention.instances import MOST_CODE
from quantkit.ops.attention.op import int8_attention as int8_attention_op
from quantkit.progress import track

_NAME, _OBSERVING = "quantkit_int8", "quantkit_observing"
_SCALES, _PEAKS = "quantkit_attention_scales", "quantkit_attention_peaks"
_CHANGE_SCORES = ("softcap", "s_aux", "position_bias")  # logit caps, sinks and learned distances, of a few families


def check_supported(model: Any) -> None:
    """Raise ModelError unless the model takes an attention function; BLOOM, for one, multiplies in its own code."""
    if not getattr(model, "_can_set_attn_implementation", lambda: False)():
        raise ModelError(
            f"{type(model).__name__} computes its attention in code of its own: attention_bits: {ATTENTION_BITS} is "
            "for models that take an attention function, such as llama, mistral, qwen2, opt and gpt2"
        )


@torch.no_grad()
def calibrate(model: Any, windows: Tensor) -> dict[str, AttentionScales]:
    """Scales of every attention module by name, from a pass of the model over windows [n, seq_len] of token ids.

    Raises ModelError as observing does, or where no module of its own calls the attention function.
    """
    device = next(model.parameters()).device
    with observing(model):
        for window in track(windows.split(1), "attention ranges", total=len(windows)):
            model.base_model(window.to(device, torch.long), use_cache=False)
    scales = take_scales("", model)
    if not scales:
        raise ModelError(f"{type(model).__name__}: no attention module called the attention function")
    return scales


@contextmanager
def observing(model: Any) -> Iterator[None]:
    """While entered, attention modules that run remember the largest magnitudes of Q, K and V, for take_scales.

    Q and K are taken as the attention function gets them, positions included. The model keeps the attention function
    it had. Raises ModelError for a model that takes none.
    """
    check_supported(model)
    before = model.config._attn_implementation
    model.set_attn_implementation(_OBSERVING)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def take_scales(prefix: str, block: nn.Module) -> dict[str, AttentionScales]:
    """Scales of every attention module that ran in a block since they were last taken, by its name in the model."""
    scales = {}
    for name, module in block.named_modules(prefix=prefix):
        peaks = module.__dict__.pop(_PEAKS, None)
        if peaks is not None:
            steps = (peaks.clamp(min=torch.finfo(torch.float32).tiny) / MOST_CODE).tolist()
            scales[name] = AttentionScales(*steps)
    return scales


def install(model: Any, scales: Mapping[str, AttentionScales]) -> None:
    """Make the model's attention modules compute in INT8.

    Raises ModelError for a model that takes no attention function or lacks a module.
    """
    check_supported(model)
    prefix = getattr(model, "base_model_prefix", "")
    for name, own in scales.items():
        # AutoModel has no "model." in front of the names that AutoModelForCausalLM wrote.
        found = name if prefix and hasattr(model, prefix) else name.removeprefix(f"{prefix}.")
        try:
            setattr(model.get_submodule(found), _SCALES, own)
        except AttributeError as error:
            raise ModelError(f"the checkpoint has attention scales for {name!r}, which this model lacks") from error
    model.set_attn_implementation(_NAME)


def has_scales(module: nn.Module) -> bool:
    """Whether an attention module computes in INT8."""
    return hasattr(module, _SCALES)


def int8_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [B, H, M, D]; key, value [B, H or fewer, T, D] -> [B, M, H, D].

    attention_mask: [B or 1, 1, M, T], bool or added to the scores. Without one, several queries see the keys up to
    their own where is_causal or else the module says so, as in transformers' sdpa function; keys behind them are of a
    cache that is not yet full. dropout is of training, which quantized checkpoints refuse.
    Raises ModelError for options that change the scores.
    """
    for name in _CHANGE_SCORES:
        if options.get(name) is not None:
            raise ModelError(f"attention_bits: {ATTENTION_BITS} knows no {name}, which this model's attention uses")
    scales: AttentionScales = getattr(module, _SCALES)
    queries = query.shape[2]
    said = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = queries > 1 and attention_mask is None and bool(said)
    if causal and key.shape[2] > queries:
        key, value = key[:, :, :queries], value[:, :, :queries]
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    steps = [scales.query, scales.key, scales.value]
    return int8_attention_op(query, key, value, attention_mask, steps, factor, causal), None


def _observe(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, None]:
    peaks = torch.stack([x.detach().abs().amax().float() for x in (query, key, value)])
    seen = module.__dict__.get(_PEAKS)
    module.__dict__[_PEAKS] = peaks if seen is None else torch.maximum(seen, peaks)
    return sdpa_attention_forward(module, query, key, value, *arguments, **options)


AttentionInterface.register(_NAME, int8_attention)
AttentionInterface.register(_OBSERVING, _observe)
for _name in (_NAME, _OBSERVING):  # a bool mask, or none where attention is plainly causal
    AttentionMaskInterface.register(_name, sdpa_mask)
