from __future__ import annotations

import pytest
import torch

from quantkit.bench.methods import method_spec, random_tensors
from quantkit.errors import BenchError
from quantkit.formats.bipolar import BipolarSpec
from quantkit.formats.trellis import TrellisSpec
from quantkit.quantizers.trellis.filters import filter_for


def test_trellis_codes_have_the_filter_that_a_model_of_them_has() -> None:
    spec = method_spec("trellis-w2")
    assert spec == TrellisSpec(2, 6)
    tensors = random_tensors(spec, (64, 40), torch.device("cpu"), equal_steps=True)
    assert torch.equal(tensors["filter"], filter_for(2, 6))
    assert tensors["signs"].shape == (2, 64, 5)


def test_codes_of_groups_stay_within_their_range() -> None:
    spec = method_spec("bipolar-w4a8-g128-s8")
    assert spec == BipolarSpec(4, 8, 128, scale_bits=8)
    assert random_tensors(spec, (64, 1024), torch.device("cpu"))["scales"].max() == 8


def test_impossible_settings_in_a_name_are_refused() -> None:
    with pytest.raises(BenchError, match="method trellis-w5: weight_bits is 5; method trellis has 2, 3, 4"):
        method_spec("trellis-w5")
