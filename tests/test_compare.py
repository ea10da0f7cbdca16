import pytest

from quantkit.compare import _label
from quantkit.formats.bcq import ROW_WISE, BcqSpec
from quantkit.formats.bipolar import BipolarSpec


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
