"""import(export(x)) == x, layer by layer, for random grids; what the damage of a GGUF file does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quantkit.exchange import compressed_tensors, gptq
from quantkit.exchange.grid import Grid
from quantkit.exchange.source import SourceLayer
from quantkit.exchange.words import pack_stream
from quantkit.models import demo
from tests.cli.calls import run
from tests.exchange.test_loaders import write_gguf

ROWS, COLUMNS = 32, 64
GROUPS = st.sampled_from([8, 32, -1])
SEEDS = st.integers(0, 2**32 - 1)


def _random(bits: int, group_size: int, seed: int, least_zero: int = 0) -> tuple[Grid, Tensor]:
    """A grid of fp16 steps with integer zeros, and codes [ROWS, COLUMNS]."""
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if group_size == -1 else COLUMNS // group_size
    step = (torch.rand(ROWS, groups, generator=generator) * 0.02 + 2e-3).half().double()
    zero = torch.randint(least_zero, 2**bits, (ROWS, groups), generator=generator, dtype=torch.int32)
    codes = torch.randint(0, 2**bits, (ROWS, COLUMNS), generator=generator).to(torch.uint8)
    return Grid(bits, group_size, step, zero=zero), codes


def _layer(levels: Grid, fields: dict[str, Tensor]) -> SourceLayer:
    return SourceLayer("layer", (ROWS, COLUMNS), levels.bits, levels.group_size, {name: name for name in fields}, 0)


def _assert_same(found: Grid, levels: Grid) -> None:
    assert found.zero is not None
    assert levels.zero is not None
    assert torch.equal(found.step, levels.step)
    assert torch.equal(found.zero, levels.zero)


@given(bits=st.sampled_from(gptq.BITS), group_size=GROUPS, seed=SEEDS, stated=st.sampled_from([gptq.V1, gptq.V2]))
def test_gptq_words_come_back(bits: int, group_size: int, seed: int, stated: str) -> None:
    levels, codes = _random(bits, group_size, seed, least_zero=1 if stated == gptq.V1 else 0)
    fields = gptq.written(codes, levels, stated=stated)
    layer = _layer(levels, fields)
    _assert_same(gptq.grid(layer, fields.__getitem__, stated=stated), levels)
    assert torch.equal(gptq.codes(layer, fields.__getitem__), codes)


@given(bits=st.integers(2, 8), group_size=GROUPS, seed=SEEDS)
def test_packed_compressed_tensors_come_back(bits: int, group_size: int, seed: int) -> None:
    levels, codes = _random(bits, group_size, seed)
    assert levels.zero is not None
    fields = {
        "weight_packed": pack_stream(codes, bits),
        "weight_scale": levels.step.half(),
        "weight_zero_point": pack_stream(levels.zero.t(), bits).t().contiguous(),
    }
    layer = _layer(levels, fields)
    _assert_same(compressed_tensors.LAYOUT.grid(layer, fields.__getitem__), levels)
    assert torch.equal(compressed_tensors.LAYOUT.codes(layer, fields.__getitem__), codes)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, "Q4_0")
    return path


@pytest.mark.parametrize("seed", range(24))
def test_a_damaged_gguf_file_is_refused_in_one_line_or_harmless(gguf_file: Path, tmp_path: Path, seed: int) -> None:
    """One to four bytes of its header changed, left out or cut off, or the file cut short."""
    rng = random.Random(seed)
    content = bytearray(gguf_file.read_bytes())
    header = content.index(b"output_norm.weight") + 64  # the tensors' names end the header
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(header)
        damage = rng.choice(["change", "drop", "cut", "end"])
        if damage == "change":
            content[place] = rng.randrange(256)
        elif damage == "drop":
            del content[place]
        elif damage == "cut":
            del content[place : place + rng.randint(1, 64)]
        else:
            del content[rng.randrange(len(content)) :]
        header = min(header, len(content))
        if not header:
            break
    source = tmp_path / "model.gguf"
    source.write_bytes(bytes(content))
    result = run("convert", source, "-o", tmp_path / "out")
    if result.exit_code == 0:
        assert run("inspect", tmp_path / "out", "--verify").exit_code == 0
        return
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("quantkit: error: ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_demo_wheels_gguf_is_the_demo_model(tmp_path: Path) -> None:
    """Its Q4_1 blocks, converted exactly, are the weights that transformers dequantizes."""
    pytest.importorskip("gguf")
    from safetensors import safe_open

    import quantkit
    from quantkit.jobs.convert import convert_model
    from quantkit.nn.quantized_linear import QuantizedLinear

    source = demo._unpack(demo._download(tmp_path), tmp_path)
    result = convert_model(source, tmp_path / "out", exact=True)
    assert result.exact == result.layers == 210
    model = quantkit.load(str(tmp_path / "out"), dtype=torch.float32)
    with safe_open(demo.demo_folder() / "model.safetensors", "pt") as expected:
        for name, module in model.named_modules():
            if isinstance(module, QuantizedLinear):
                assert torch.equal(module.dequantize(), expected.get_tensor(f"{name}.weight").float()), name
