from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.formats.bcq import ROW_WISE, BcqSpec
from quantkit.formats.bipolar import BipolarSpec
from quantkit.jobs.compare import _label, _size
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.recipe import load_recipe


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        (BcqSpec(4, 128, True), "bcq q4 g128"),
        (BcqSpec(3, 64, True, scale_bits=8), "bcq q3 g64 s8"),
        (BcqSpec(2, ROW_WISE, False), "bcq q2 row"),
        (BipolarSpec(2, 4), "bipolar q2 row"),
    ],
    ids=["group", "coded-scales", "row", "bipolar"],
)
def test_label_names_what_tells_two_checkpoints_apart(spec: object, label: str) -> None:
    assert _label(spec) == label


def test_layers_of_one_kind_share_a_label_whatever_their_columns(
    tiny_model: Callable[[str], Path], calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    quantize_model(
        str(tiny_model("opt")),
        load_recipe("flatten-o1"),
        tmp_path / "q",
        calibration=calibrated("opt"),
        options=QuantizeOptions(),
    )
    assert _size(str(tmp_path / "q"))[0] == "flatten q8"
