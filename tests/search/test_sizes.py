"""Predicted file sizes against files that were written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.checkpoint.read import CONFIG_DIGEST, read_checkpoint
from quantkit.checkpoint.write import folder_bytes, stored_tensors
from quantkit.errors import RecipeError
from quantkit.models.loading import load_model, stored_dtype
from quantkit.search.sizes import fixed_bytes, offset_digits, parse_bytes, quantized_bytes
from quantkit.storage.tensors import write_tensors
from tests.pipeline import FAMILIES, quantize_tiny

# Offsets counted with the most digits they can have, and padding: the header may be predicted this much too long.
SPARE_PER_TENSOR, SPARE_PER_FILE = 12, 8


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "recipe",
    [("bcq-w3-g128",), ("nuqmm-q3-g128",), ("bcq-w3-g64-s8",), ("nuqmm-q3-g128", "scale_bits=8")],
    ids=["offset", "no-offset", "coded-scales", "coded-scales-no-offset"],
)
def test_written_files_are_never_larger_and_hardly_smaller(
    family: str, recipe: tuple[str, ...], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_model(family)
    quantize_tiny(folder, tmp_path / "out", *recipe)
    layers = read_checkpoint(tmp_path / "out").layers
    model, _ = load_model(str(folder))
    digits = offset_digits(model, float("inf"))
    predicted = fixed_bytes(model, layers, stored_dtype(str(folder)), digits)
    predicted += sum(quantized_bytes(name, layer.spec, layer.shape, digits) for name, layer in layers.items())
    written = folder_bytes(tmp_path / "out")
    tensors = len(model.state_dict()) + 3 * len(layers)
    assert 0 <= predicted - written <= SPARE_PER_TENSOR * tensors + SPARE_PER_FILE


def test_a_half_precision_model_is_counted_in_half_precision(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model, _ = load_model(str(tiny_model("llama")))
    model.to(torch.float16).save_pretrained(tmp_path / "half")
    weights = tmp_path / "half" / "model.safetensors"
    weights.unlink()
    write_tensors(weights, stored_tensors(model), {"format": "pt", CONFIG_DIGEST: "0" * 64})
    digits = offset_digits(model, float("inf"))
    predicted = fixed_bytes(model, {}, stored_dtype(str(tmp_path / "half")), digits)
    written = folder_bytes(tmp_path / "half")
    assert 0 <= predicted - written <= SPARE_PER_TENSOR * len(model.state_dict()) + SPARE_PER_FILE


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90MB", 90_000_000), ("1.5GiB", 3 * 2**29), ("12345", 12345), ("2 kb", 2000)],
    ids=["decimal", "binary", "plain", "small-letters"],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["90 apples", "-5MB", "", "MB", "9" * 400])
def test_other_text_is_no_size(text: str) -> None:
    with pytest.raises(RecipeError, match="expected a size such as 90MB"):
        parse_bytes(text)
