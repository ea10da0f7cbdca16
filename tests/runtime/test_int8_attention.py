"""INT8 attention: exact arithmetic, calibrated ranges, and whole checkpoints through the real loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

import quantkit
from quantkit.checkpoint.config import AttentionScales
from quantkit.errors import CalibrationError, ModelError, RecipeError
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.models.loading import load_model
from quantkit.ops.attention.op import Int8Attention, int8_attention_reference
from quantkit.recipe import load_recipe
from quantkit.runtime import int8_attention as integration
from quantkit.runtime.int8_attention import calibrate, install, int8_attention

TinyModel = Callable[[str], Path]
PROMPT = torch.tensor([[5, 40, 100, 7, 22, 9, 80, 3]])
WITH_FUNCTION = ("llama", "opt", "gpt2")
# Codes are off by up to half of 1/127 of the largest Q, K and V; random values are a third of it and errors average.
ROUNDING_RTOL = 0.02
FP32_RTOL = 1e-6  # one fp32 rounding of the exact integer result, and of its scale
TINY_LOGITS_RTOL = 0.02  # of the logits' spread, two blocks


def _module(*steps: float) -> nn.Module:
    module = nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    module.quantkit_attention_scales = AttentionScales(*steps)  # type: ignore[assignment]
    return module


def _operands(keys: int, heads: int = 4, shared: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, heads, 5, 16), torch.randn(2, shared, keys, 16), torch.randn(2, shared, keys, 16)


def _steps(*operands: Tensor) -> list[float]:
    return [x.abs().max().item() / 127 for x in operands]


def _by_hand(query: Tensor, key: Tensor, value: Tensor, steps: list[float], scaling: float) -> Tensor:
    """The same in int64 and fp64."""
    repeats = query.shape[1] // key.shape[1]
    q, k, v = ((x / s).round().clamp(-127, 127).long() for x, s in zip((query, key, value), steps, strict=True))
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("bhmd,bhtd->bhmt", q, k).float() * (steps[0] * steps[1] * scaling)
    p = (torch.exp(scores - scores.amax(-1, keepdim=True)) * 127).round().long()
    sums = torch.einsum("bhmt,bhtd->bhmd", p, v).double()
    return (sums * steps[2] / p.sum(-1, keepdim=True)).transpose(1, 2)


@pytest.mark.parametrize("keys", [1, 7, 1024, 3000], ids="T{}".format)
def test_products_are_those_of_integers(keys: int) -> None:
    operands = _operands(keys)
    steps = _steps(*operands)
    output, weights = int8_attention(_module(*steps), *operands, None, scaling=0.25)
    assert weights is None
    expected = _by_hand(*operands, steps, 0.25)
    torch.testing.assert_close(output.double(), expected, rtol=FP32_RTOL, atol=FP32_RTOL * expected.abs().max().item())


def test_largest_codes_sum_exactly_over_many_keys() -> None:
    keys = 5001  # 127 * 127 * 5001 is past 2^24
    ones = torch.ones(1, 1, keys, 16)
    value = torch.ones(1, 1, keys, 16)
    value[..., -1, :] = 126 / 127
    output, _ = int8_attention(_module(1 / 127, 1 / 127, 1 / 127), torch.ones(1, 1, 1, 16), ones, value, None, 1.0)
    assert output.unique().tolist() == pytest.approx([(127 * keys - 1) / (127 * keys)], rel=FP32_RTOL)


def test_attention_close_to_floating_point_under_a_mask() -> None:
    query, key, value = torch.randn(1, 2, 40, 32), torch.randn(1, 2, 40, 32), torch.randn(1, 2, 40, 32)
    mask = torch.full((1, 1, 40, 40), torch.finfo(torch.float32).min).triu(1)
    output, _ = int8_attention(_module(*_steps(query, key, value)), query, key, value, mask)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
    assert (output - expected).std() < ROUNDING_RTOL * expected.std()
    torch.testing.assert_close(output[:, 0], value[:, :, 0], rtol=0, atol=_steps(value)[0])  # sees one token


def test_values_beyond_the_calibrated_range_are_clamped() -> None:
    query, key = torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8)
    output, _ = int8_attention(_module(1, 1, 0.01), query, key, torch.full((1, 1, 1, 8), 5.0), None)
    assert output.unique().item() == pytest.approx(1.27)


def test_nan_reaches_the_output() -> None:
    query, key, value = _operands(4)
    query[0, 0, 0, 0] = float("nan")
    output, _ = int8_attention(_module(*_steps(key, key, value)), query, key, value, None)
    assert output[0, 0, 0].isnan().all()
    assert not output[1].isnan().any()


@pytest.mark.parametrize("option", ["softcap", "s_aux", "position_bias"])
def test_options_that_change_the_scores_are_refused(option: str) -> None:
    with pytest.raises(ModelError, match=option):
        int8_attention(_module(1, 1, 1), *_operands(4), None, **{option: 30.0})  # type: ignore[arg-type]


def _quantize(family: str, tiny_model: TinyModel, calibrated: TinyModel, out: Path) -> Path:
    recipe = load_recipe("rtn-w4-g128", ["weight_bits=8", "group_size=32", "attention_bits=8"])
    quantize_model(str(tiny_model(family)), recipe, out, calibration=calibrated(family), options=QuantizeOptions())
    return out


@pytest.fixture(scope="module")
def checkpoint(
    tiny_model: TinyModel, calibrated: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """family -> its checkpoint with INT8 attention, made once; treat it as read-only."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = _quantize(family, tiny_model, calibrated, tmp_path_factory.mktemp("int8") / family)
        return made[family]

    return folder


@pytest.mark.parametrize("family", WITH_FUNCTION)
def test_checkpoint_computes_in_int8_after_loading_and_after_saving_again(
    family: str, tiny_model: TinyModel, checkpoint: TinyModel, tmp_path: Path
) -> None:
    first = quantkit.load(str(checkpoint(family)), device="cpu")
    first.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    original, _ = load_model(str(tiny_model(family)))
    with torch.no_grad():
        logits, exact = first(PROMPT).logits, original(PROMPT).logits
        assert torch.equal(again(PROMPT).logits, logits)
        first.set_attn_implementation("eager")
        floating = first(PROMPT).logits
    assert not torch.equal(floating, logits)
    assert (floating - logits).std() < TINY_LOGITS_RTOL * exact.std()


@pytest.mark.parametrize("family", WITH_FUNCTION)
def test_decoding_with_a_cache_gives_the_tokens_of_full_passes(family: str, checkpoint: TinyModel) -> None:
    model = quantkit.load(str(checkpoint(family)), device="cpu")
    made = [
        model.generate(PROMPT, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0, use_cache=cached)
        for cached in (True, False)
    ]
    assert torch.equal(*made)


@pytest.mark.parametrize("family", WITH_FUNCTION)
def test_padding_in_front_changes_nothing(family: str, tiny_model: TinyModel) -> None:
    model, _ = load_model(str(tiny_model(family)))
    install(model, calibrate(model, torch.arange(64).view(2, 32)))
    padded = torch.nn.functional.pad(PROMPT, (3, 0))
    seen = (torch.arange(padded.shape[1]) >= 3).long()[None]
    positions = (seen.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(PROMPT).logits
        behind = model(padded, attention_mask=seen, position_ids=positions).logits[:, 3:]
    assert (behind - alone).abs().max() < TINY_LOGITS_RTOL * alone.std()


def test_chunks_of_a_prompt_give_the_logits_of_the_whole(tiny_model: TinyModel) -> None:
    model, _ = load_model(str(tiny_model("llama")))
    install(model, calibrate(model, torch.arange(64).view(2, 32)))
    with torch.no_grad():
        first = model(PROMPT[:, :3], use_cache=True)
        rest = model(PROMPT[:, 3:], past_key_values=first.past_key_values)
        whole = model(PROMPT).logits
    logits = torch.cat((first.logits, rest.logits), dim=1)
    assert (logits - whole).abs().max() < TINY_LOGITS_RTOL * whole.std()


def test_no_mask_is_made_where_attention_is_plainly_causal(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks: list[tuple[bool, bool]] = []

    def watched(*given: Any) -> Tensor:
        masks.append((given[3] is not None, given[6]))
        return int8_attention_reference(Int8Attention(*given))

    monkeypatch.setattr(integration, "int8_attention_op", watched)
    model, _ = load_model(str(tiny_model("llama")))
    install(model, calibrate(model, torch.arange(64).view(2, 32)))
    model(PROMPT)
    assert set(masks) == {(False, True)}


@pytest.mark.cuda
@pytest.mark.parametrize("family", WITH_FUNCTION)
def test_a_gpu_computes_what_a_cpu_does(family: str, tiny_model: TinyModel) -> None:
    model, _ = load_model(str(tiny_model(family)))
    scales = calibrate(model, torch.arange(64).view(2, 32))
    other, _ = load_model(str(tiny_model(family)), device=torch.device("cuda"))
    install(model, scales)
    install(other, scales)
    with torch.no_grad():
        expected, got = model(PROMPT).logits, other(PROMPT.to("cuda")).logits.cpu()
    assert (got - expected).abs().max() < TINY_LOGITS_RTOL * expected.std()


def test_base_model_loads_its_scales_too(checkpoint: TinyModel) -> None:
    base = AutoModel.from_pretrained(checkpoint("llama"))
    assert base.layers[0].self_attn.quantkit_attention_scales.value > 0


def test_calibration_finds_the_largest_magnitudes_and_leaves_the_model_as_it_was(tiny_model: TinyModel) -> None:
    model, _ = load_model(str(tiny_model("gpt2")))
    before = model.config._attn_implementation
    seen: list[Tensor] = []
    handle = model.transformer.h[1].attn.c_attn.register_forward_hook(lambda *call: seen.append(call[2]))
    scales = calibrate(model, torch.arange(64).view(2, 32))
    handle.remove()
    assert list(scales) == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert model.config._attn_implementation == before
    peaks = torch.cat(seen).abs().amax(dim=(0, 1)).view(3, -1).amax(dim=1)
    own = scales["transformer.h.1.attn"]
    assert [own.query, own.key, own.value] == pytest.approx((peaks / 127).tolist())


def test_installing_scales_of_another_model_is_refused(tiny_model: TinyModel) -> None:
    model, _ = load_model(str(tiny_model("llama")))
    with pytest.raises(ModelError, match=r"'model\.layers\.7\.self_attn', which this model lacks"):
        install(model, {"model.layers.7.self_attn": AttentionScales(1, 1, 1)})


def test_model_without_attention_function_is_refused_before_the_work(
    tiny_model: TinyModel, calibrated: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="BloomForCausalLM computes its attention in code of its own"):
        _quantize("bloom", tiny_model, calibrated, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_attention_bits_need_calibration(tiny_model: TinyModel, tmp_path: Path) -> None:
    recipe = load_recipe("bcq-w4-g128", ["attention_bits=8"])
    with pytest.raises(CalibrationError, match="attention_bits needs a calibration artifact"):
        quantize_model(str(tiny_model("llama")), recipe, tmp_path / "q", calibration=None, options=QuantizeOptions())


def test_other_attention_bits_are_refused() -> None:
    with pytest.raises(RecipeError, match="attention_bits is 4; choose 8"):
        load_recipe("flatten-o1", ["attention_bits=4"])
