"""What serve_measure.py makes of a dummy load's weights."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from scripts.serve_measure import SCALE, WEIGHT_DEVIATION, _draw_weights


def _drawn(**parameters: Tensor) -> dict[str, Tensor]:
    model = nn.Module()
    for name, value in parameters.items():
        model.register_parameter(name, nn.Parameter(value, requires_grad=False))
    places = {name: value.data_ptr() for name, value in model.named_parameters()}
    _draw_weights(SimpleNamespace(get_model=lambda: model))
    assert places == {name: value.data_ptr() for name, value in model.named_parameters()}  # as graphs hold them
    return {name: value.data for name, value in model.named_parameters()}


def test_every_kind_of_weight_is_drawn_like_a_models_in_its_place() -> None:
    half = torch.float16
    drawn = _drawn(
        weight=torch.zeros(64, 128, dtype=half),
        norm_weight=torch.full((64,), 1e-3, dtype=half),
        bias=torch.full((64,), 1e-3, dtype=half),
        weight_packed=torch.zeros(64, 16, dtype=torch.int32),
        weight_scale=torch.full((64, 2), 1e-3, dtype=half),
        part0_scale_tiles=torch.full((4, 2, 8, 3, 2), 1e-2, dtype=half),
        tiles=torch.arange(64, dtype=torch.int32),
    )
    assert abs(float(drawn["weight"].float().std()) / WEIGHT_DEVIATION - 1) < 0.05
    assert bool((drawn["norm_weight"] == 1).all())
    assert not drawn["bias"].any()
    assert len(drawn["weight_packed"].unique()) > 1000
    assert SCALE / 2 <= float(drawn["weight_scale"].min()) < float(drawn["weight_scale"].max()) <= 1.501 * SCALE
    assert len(drawn["part0_scale_tiles"].unique()) == 1  # quantkit's are drawn when they are made up
    assert torch.equal(drawn["tiles"], torch.arange(64, dtype=torch.int32))


def test_the_same_weights_are_drawn_every_time() -> None:
    first, second = (_drawn(weight=torch.zeros(8, 8, dtype=torch.float16)) for _ in range(2))
    assert torch.equal(first["weight"], second["weight"])
