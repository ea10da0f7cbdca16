from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.bloom.modeling_bloom import BloomGelu

from quantkit.ops.activations import ACTIVATIONS, activation_name

NAMES = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_fast",
    "gelu_python": None,  # GELU too, but rounded in other places than torch's own
    "quick_gelu": None,
    "relu6": None,
    "mish": None,
}


@pytest.mark.parametrize(("used", "name"), NAMES.items(), ids=NAMES)
def test_functions_are_known_by_their_values(used: str, name: str | None) -> None:
    assert activation_name(ACT2FN[used]) == name


def test_blooms_own_function_is_known() -> None:
    assert activation_name(BloomGelu()) == "gelu_fast"
    assert activation_name(nn.GELU(approximate="tanh")) == "gelu_tanh"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("used", ["relu", "gelu", "gelu_pytorch_tanh", "silu", "gelu_new", "gelu_fast"])
def test_functions_are_the_models_own_in_half_precision(used: str, dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15).short()
    x = bits.view(dtype)
    own = ACT2FN[used](x)
    name = NAMES[used]
    assert name is not None
    torch.testing.assert_close(ACTIVATIONS[name].apply(x), own, rtol=0, atol=0, equal_nan=True)
