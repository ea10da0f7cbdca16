import pytest
import torch

from quantkit.bench.memory import model_bytes
from quantkit.bench.shapes import MODELS, LinearShape, model_linears, parse_shapes
from quantkit.errors import BenchError

BILLIONS = {
    "opt-6.7b": 6.7,
    "opt-13b": 13,
    "opt-30b": 30,
    "opt-66b": 66,
    "opt-175b": 175,
    "llama-2-7b": 6.7,
    "llama-2-70b": 69,
}
BILLIONS |= {"bloom-7b": 7.07, "llama-3-8b": 8.0, "llama-3-70b": 70.6, "smollm2-135m": 0.135}


@pytest.mark.parametrize("name", MODELS)
def test_named_models_have_their_size(name: str) -> None:
    assert model_bytes(MODELS[name], torch.float16) / 2e9 == pytest.approx(BILLIONS[name], rel=0.03)


def test_shapes_mix_names_and_numbers() -> None:
    shapes = parse_shapes("smollm2-135m, 24x40,nuqmm-table2")
    assert shapes[0] == LinearShape("smollm2-135m q_proj, o_proj", 576, 576)
    assert LinearShape("24x40", 24, 40) in shapes
    assert [shape.out_features for shape in shapes[-3:]] == [4096, 7168, 12288]


def test_grouped_query_attention_has_narrow_keys() -> None:
    assert LinearShape("k_proj, v_proj", 1024, 4096) in model_linears(MODELS["llama-3-8b"])


@pytest.mark.parametrize(
    ("text", "message"),
    [("opt-31b", "did you mean 'opt-30b'"), ("0x4", "must be positive"), (" ,", "at least one shape")],
    ids=["typo", "empty-matrix", "nothing"],
)
def test_bad_shapes_are_one_line(text: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        parse_shapes(text)
