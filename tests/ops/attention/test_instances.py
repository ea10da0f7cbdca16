import pytest

from quantkit.ops.attention.instances import (
    HEAD_DIMS,
    WARP,
    WARPGROUP,
    AttentionForm,
    attention_form,
    attention_units,
)

BLOCK_BYTES = {(8, 0): 166_912, (8, 6): 101_376, (9, 0): 232_448}
STATIC_BYTES = 1024  # barriers


@pytest.mark.parametrize(
    ("capability", "head_dim", "masked", "expected"),
    [
        ((9, 0), 128, False, WARPGROUP),
        ((9, 0), 64, False, WARPGROUP),
        ((9, 0), 96, False, WARP),
        ((9, 0), 256, False, WARP),
        ((9, 0), 128, True, WARP),
        ((8, 0), 128, False, WARP),
        ((8, 9), 64, False, WARP),
        ((10, 0), 128, False, WARP),
    ],
)
def test_form_by_gpu_and_problem(
    capability: tuple[int, int], head_dim: int, masked: bool, expected: AttentionForm
) -> None:
    assert attention_form(capability, head_dim, masked) is expected


@pytest.mark.parametrize("capability", list(BLOCK_BYTES), ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
def test_every_form_that_is_taken_is_compiled_and_fits(capability: tuple[int, int]) -> None:
    compiled = set(attention_units(*capability))
    for head_dim in HEAD_DIMS:
        for masked in (False, True):
            form = attention_form(capability, head_dim, masked)
            assert {form.unit(head_dim), form.quantize_unit(head_dim)} <= compiled
            assert form.shared_bytes(head_dim) + STATIC_BYTES <= BLOCK_BYTES[capability]
