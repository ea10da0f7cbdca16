"""How far slices reach beyond what the calibration text did."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantkit.errors import RecipeError
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.flatten.quantizer import plan_layout
from quantkit.quantizers.flatten.settings import FlattenSettings
from tests.quantizers.flatten.layers import PLAIN, layer_of


def test_slices_reach_as_far_as_the_vocabulary_and_the_headroom_ask() -> None:
    layer = layer_of()
    assert layer.stats is not None
    far = layer.stats.absmax * torch.linspace(1, 30, len(layer.stats.absmax))
    layer = replace(layer, stats=replace(layer.stats, vocabulary_absmax=far))
    for settings, reach in (
        (PLAIN, layer.stats.absmax),
        (replace(PLAIN, headroom=1.5), 1.5 * layer.stats.absmax),
        (replace(PLAIN, cover_vocabulary=True, headroom=1.5), 1.5 * far),
    ):
        layout = plan_layout(layer, settings)
        assert (layout.acts.capacity() >= reach - layout.acts.scale).all()
        # The paper's threshold follows the text alone, however far slices reach.
        assert layout.acts.threshold == pytest.approx(plan_layout(layer, PLAIN).acts.threshold)


def _of_a_longer_text(layer: LayerInput) -> LayerInput:
    """The sample is a quarter of the text, which reached twice as far; four times the text should, once more."""
    assert layer.stats is not None
    return replace(layer, stats=replace(layer.stats, absmax=2 * layer.stats.absmax, tokens=4 * layer.stats.tokens))


def test_a_channel_has_one_slice_more_where_a_longer_text_would_reach_beyond_its_last() -> None:
    layer, settings = _of_a_longer_text(layer_of()), replace(PLAIN, threshold_multiplier=2.0)
    plain, longer = (plan_layout(layer, replace(settings, longer_text=factor)) for factor in (1.0, 4.0))
    beyond = 2 * plain.operands.act_absmax > plain.acts.capacity()
    assert 0 < beyond.sum() < len(beyond)
    assert torch.equal(longer.acts.slices, plain.acts.slices + beyond.long())


def test_rotated_inputs_have_no_slices_for_a_longer_text() -> None:
    layer, settings = _of_a_longer_text(layer_of(channels=64)), replace(PLAIN, rotate_inputs=True)
    plain, longer = (plan_layout(layer, replace(settings, longer_text=factor)) for factor in (1.0, 4.0))
    assert torch.equal(longer.acts.slices, plain.acts.slices)


@pytest.mark.parametrize(
    "bad", [{"headroom": 0.9}, {"longer_text": 0.5}, {"column_price": -1.0}], ids=lambda bad: next(iter(bad))
)
def test_impossible_room_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(RecipeError, match="choose"):
        FlattenSettings(**bad)  # type: ignore[arg-type]
