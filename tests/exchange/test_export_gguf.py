"""GGUF exports: blocks by hand and by the gguf package, files by transformers' reader, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import quantkit
from quantkit.errors import CheckpointError
from quantkit.exchange.exported import ExportLayer
from quantkit.exchange.gguf_blocks import BLOCK_TYPES, block_codes, block_grid
from quantkit.exchange.gguf_pack import block_fit, packed_blocks
from quantkit.exchange.gguf_vocabulary import read_vocabulary
from quantkit.exchange.grid import Grid
from quantkit.jobs.convert import convert_model
from quantkit.jobs.export import export_model
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.recipe import load_recipe
from tests.cli.calls import refusal, run
from tests.exchange.test_loaders import write_gguf
from tests.pipeline import quantize_tiny
from tests.tiny import POSITIONS, VOCABULARY, sample_text, save_model

gguf = pytest.importorskip("gguf")
Model = Callable[[str], Path]
CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "rope_theta": 5000.0,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose Linears are whole blocks, with a head and a chat template of its own."""
    config = LlamaConfig(**CONFIG, tie_word_embeddings=False)
    return save_model(config, tmp_path_factory.mktemp("llama"), chat_template="{{ messages[0].content }}")


def _grid(bits: int, zero: int | None, seed: int = 0, group_size: int = 32) -> tuple[Grid, torch.Tensor]:
    """A random grid of 3 rows of 128 columns, zeros all the same or minima, and codes."""
    generator = torch.Generator().manual_seed(seed)
    groups = 128 // group_size
    step = (torch.rand(3, groups, generator=generator) * 0.01 + 1e-3).half().double()
    codes = torch.randint(0, 2**bits, (3, 128), generator=generator).to(torch.uint8)
    if zero is None:
        minimum = -torch.rand(3, groups, generator=generator).half().double()
        return Grid(bits, group_size, step, minimum=minimum), codes
    return Grid(bits, group_size, step, zero=torch.full(step.shape, zero, dtype=torch.int32)), codes


TYPES = {  # bits and zero point -> the smallest type that holds every level
    "Q4_0": [(4, 8), (3, 4), (2, 2), (3, 8)],
    "Q4_1": [(4, None), (2, None), (4, 0)],
    "Q5_0": [(5, 16), (4, 7), (4, 15)],
    "Q5_1": [(5, None)],
    "Q8_0": [(8, 128), (7, 3), (6, 60)],
}
CASES = [(kind, bits, zero) for kind, grids in TYPES.items() for bits, zero in grids]


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(("kind", "bits", "zero"), CASES)
def test_the_gguf_package_reads_our_levels(kind: str, bits: int, zero: int | None, group_size: int) -> None:
    grid, codes = _grid(bits, zero, group_size=group_size)
    fit = block_fit(ExportLayer("layer", (3, 128), grid))
    blocks = packed_blocks(codes, fit, grid)
    assert (fit.kind, fit.rounding) == (kind, 0.0)
    found = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
    assert torch.equal(found, grid.levels(codes).float())


def test_q5_0_block_by_hand() -> None:
    """d, the fifth bits of all codes, then byte i with code i below and code i + 16 above."""
    codes = torch.tensor([[*range(16), *[31] * 16]], dtype=torch.uint8)
    grid = Grid(5, 32, torch.tensor([[0.5]], dtype=torch.float64), zero=torch.tensor([[16]], dtype=torch.int32))
    blocks = packed_blocks(codes, block_fit(ExportLayer("layer", (1, 32), grid)), grid)
    assert blocks.tolist() == [[0x00, 0x38, 0x00, 0x00, 0xFF, 0xFF, *(0xF0 + i for i in range(16))]]


@given(st.sampled_from(["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_blocks_read_and_written_are_the_same_bytes(kind: str, seed: int) -> None:
    """import(export(x)) == x, for blocks of random codes on grids that need their type."""
    block = BLOCK_TYPES[kind]
    grid, codes = _grid(block.bits, block.zero, seed)
    blocks = packed_blocks(codes, block_fit(ExportLayer("layer", (3, 128), grid)), grid)
    back, again = block_grid(blocks, kind, "layer"), block_codes(blocks, kind)
    assert torch.equal(back.step, grid.step)
    assert torch.equal(back.lowest, grid.lowest)
    assert torch.equal(again, codes)
    assert (packed_blocks(again, block_fit(ExportLayer("layer", (3, 128), back)), back) == blocks).all()


def test_a_minimum_that_fp16_does_not_hold_is_rounded_and_said() -> None:
    step = torch.full((1, 1), 2.0**-10, dtype=torch.float64)
    grid = Grid(4, -1, step, minimum=torch.full((1, 1), -1 - 2.0**-12, dtype=torch.float64))
    fit = block_fit(ExportLayer("layer", (1, 32), grid))
    assert fit.kind == "Q4_1"
    assert fit.rounding == pytest.approx(2**-12, rel=0.01)


def test_a_group_of_zeros_stays_zero() -> None:
    grid, codes = _grid(4, 8)
    assert grid.zero is not None
    grid.step[1], grid.zero[1] = 0, 0  # as uniform_grid finds it
    fit = block_fit(ExportLayer("layer", (3, 128), grid))
    found = gguf.quants.dequantize(packed_blocks(codes, fit, grid), gguf.GGMLQuantizationType.Q4_0)
    assert fit.kind == "Q4_0"
    assert torch.equal(torch.from_numpy(found), grid.levels(codes).float())


WRONG_GRIDS = {
    "bits": (_grid(8, 100)[0], 128, "has 8 bits with an offset"),
    "free bits": (_grid(6, None)[0], 128, "up to 7 bits of zero: integer"),
    "groups": (_grid(4, 8, group_size=16)[0], 128, "groups of 16 columns are no whole blocks of 32"),
    "columns": (_grid(4, 8)[0], 72, "72 columns are no whole blocks of 32"),
    "steps": (Grid(4, -1, torch.full((3, 1), 1e-3, dtype=torch.float64), torch.full((3, 1), 8)), 128, "beyond fp16"),
}


@pytest.mark.parametrize("case", WRONG_GRIDS)
def test_grids_that_no_block_holds_are_refused(case: str) -> None:
    grid, columns, message = WRONG_GRIDS[case]
    with pytest.raises(CheckpointError, match=message):
        block_fit(ExportLayer("layer", (3, columns), grid))


def _assert_same_model(own: Path, exported: Path, rounding: float) -> None:
    """transformers makes our weights of the file, in fp32, and our tokens of a text."""
    other = AutoModelForCausalLM.from_pretrained(exported, gguf_file="model.gguf", dtype=torch.float32)
    found = quantkit.load(str(own), dtype=torch.float32)
    for name, parameter in other.named_parameters():
        module = found.get_submodule(name.rpartition(".")[0])
        expected = module.dequantize() if isinstance(module, QuantizedLinear) else found.get_parameter(name)
        difference = ((parameter - expected).abs().max() / expected.abs().max()).item()
        assert difference <= rounding, name
    text = sample_text(60)
    first, second = AutoTokenizer.from_pretrained(own), AutoTokenizer.from_pretrained(exported, gguf_file="model.gguf")
    assert first(text)["input_ids"] == second(text)["input_ids"]
    assert first.chat_template == second.chat_template
    for name in ("rope_parameters", "head_dim", "num_key_value_heads", "max_position_embeddings", "eos_token_id"):
        assert getattr(other.config, name) == getattr(found.config, name), name


@pytest.mark.parametrize(("bits", "kinds"), [(2, {"Q4_1", "Q4_0"}), (4, {"Q5_0"}), (5, {"Q8_0"}), (7, {"Q8_0"})])
def test_integer_zeros_are_read_exactly_by_transformers(
    llama: Path, tmp_path: Path, bits: int, kinds: set[str]
) -> None:
    quantize_tiny(llama, tmp_path / "rtn", "rtn-w4-g128", "zero=integer", f"weight_bits={bits}", "group_size=64")
    result = export_model(tmp_path / "rtn", tmp_path / "out", to="gguf", exact=True)
    assert (result.layers, result.exact) == (14, 14)
    assert result.bytes == (tmp_path / "out" / "model.gguf").stat().st_size
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    assert {tensor.tensor_type.name for tensor in reader.tensors} - {"F32"} <= kinds
    _assert_same_model(tmp_path / "rtn", tmp_path / "out", 0.0)


def test_free_zeros_are_rounded_and_refused_where_exactness_is_asked_for(llama: Path, tmp_path: Path) -> None:
    quantize_tiny(llama, tmp_path / "rtn", "rtn-w4-g128")
    result = export_model(tmp_path / "rtn", tmp_path / "out", to="gguf")
    assert 0 < result.rounding <= 2**-11
    _assert_same_model(tmp_path / "rtn", tmp_path / "out", 2**-11)
    assert "gguf rounds its offsets" in refusal(
        "export", tmp_path / "rtn", "--to", "gguf", "--exact", "-o", tmp_path / "no"
    )


def test_plans_and_kept_layers_are_tensors_of_their_own_types(llama: Path, tmp_path: Path) -> None:
    """q stays in floating point, and has the rows of llama.cpp there too."""
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(
        "schema: 1\nmethod: rtn\nsettings: {weight_bits: 4, group_size: 32, zero: integer}\n"
        "keep: ['*.0.self_attn.q_proj']\nlayers:\n  - {match: '*.down_proj', weight_bits: 6}\n"
    )
    quantize_model(
        str(llama), load_recipe(str(recipe)), tmp_path / "rtn", calibration=None, options=QuantizeOptions("cpu")
    )
    export_model(tmp_path / "rtn", tmp_path / "out", to="gguf", exact=True)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "out/model.gguf").tensors}
    assert kinds["blk.0.ffn_down.weight"] == "Q8_0"
    assert kinds["blk.0.attn_q.weight"] in ("F16", "F32")
    assert kinds["blk.1.attn_q.weight"] == "Q5_0"
    _assert_same_model(tmp_path / "rtn", tmp_path / "out", 0.0)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0"])
def test_a_converted_file_goes_back_to_the_same_blocks(tmp_path: Path, kind: str) -> None:
    write_gguf(tmp_path / "source.gguf", kind)
    convert_model(tmp_path / "source.gguf", tmp_path / "converted", exact=True)
    export_model(tmp_path / "converted", tmp_path / "out", to="gguf", exact=True)
    before = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "source.gguf").tensors}
    after = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert before.keys() - after.keys() == set()
    blocks = [name for name in before if name.startswith("blk.") and "norm" not in name]
    assert len(blocks) == 14
    assert all((before[name].data == after[name].data).all() for name in blocks)


def test_the_same_checkpoint_gives_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    quantize_tiny(llama, tmp_path / "rtn", "rtn-w4-g128", "zero=integer")
    for name in ("first", "second"):
        result = run("export", tmp_path / "rtn", "--to", "gguf", "-o", tmp_path / name)
        assert result.exit_code == 0, result.output
    first, second = ((tmp_path / name / "model.gguf").read_bytes() for name in ("first", "second"))
    assert first == second


WRONG_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "biases": ({"attention_bias": True}, "attention_bias is True"),
    "rope": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
        "its rotary positions are scaled",
    ),
}


@pytest.mark.parametrize("case", WRONG_CONFIGS)
def test_a_llama_that_gguf_does_not_describe_is_refused(tmp_path: Path, case: str) -> None:
    changed, message = WRONG_CONFIGS[case]
    save_model(LlamaConfig(**{**CONFIG, **changed}), tmp_path / "model")
    quantize_tiny(tmp_path / "model", tmp_path / "rtn", "rtn-w4-g128", "zero=integer")
    assert message in refusal("export", tmp_path / "rtn", "--to", "gguf", "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_architecture_is_refused(tiny_model: Model, tmp_path: Path) -> None:
    quantize_tiny(tiny_model("opt"), tmp_path / "rtn", "rtn-w4-g128", "zero=integer")
    assert "is a 'opt'; quantkit writes llama" in refusal(
        "export", tmp_path / "rtn", "--to", "gguf", "-o", tmp_path / "out"
    )


def _with_tokenizer(llama: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A folder with the tokenizer, changed."""
    folder.mkdir()
    for path in llama.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_bytes((llama / "config.json").read_bytes())
    document = json.loads((folder / "tokenizer.json").read_text())
    change(document)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, Any] = {
    "gpt-2": BYTE_LEVEL,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
    "llama-bpe": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": LLAMA_3}, "behavior": "Isolated", "invert": False},
            {**BYTE_LEVEL, "use_regex": False},
        ],
    },
}


@pytest.mark.parametrize("name", SPLITS)
def test_how_text_is_split_is_named_as_llama_cpp_names_it(llama: Path, tmp_path: Path, name: str) -> None:
    folder = _with_tokenizer(llama, tmp_path / "t", lambda document: document.update(pre_tokenizer=SPLITS[name]))
    assert read_vocabulary(folder, VOCABULARY).splits == name


WRONG_TOKENIZERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "no byte level": lambda document: document.update(pre_tokenizer={"type": "Whitespace"}),
    "prefix space": lambda document: document.update(pre_tokenizer={**BYTE_LEVEL, "add_prefix_space": True}),
    "another split": lambda document: document.update(
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": False}, BYTE_LEVEL],
        }
    ),
    "normalizer": lambda document: document.update(normalizer={"type": "Lowercase"}),
    "byte fallback": lambda document: _with_byte_tokens(document["model"]),
}


def _with_byte_tokens(model: dict[str, Any]) -> None:
    model["byte_fallback"] = True
    model["vocab"] = {**model["vocab"], "<0x41>": len(model["vocab"])}


@pytest.mark.parametrize("case", WRONG_TOKENIZERS)
def test_other_tokenizers_are_refused(llama: Path, tmp_path: Path, case: str) -> None:
    folder = _with_tokenizer(llama, tmp_path / "t", WRONG_TOKENIZERS[case])
    with pytest.raises(CheckpointError, match="is no byte-level BPE of a kind that quantkit writes to GGUF"):
        read_vocabulary(folder, VOCABULARY)


def test_what_changes_nothing_is_taken(llama: Path, tmp_path: Path) -> None:
    """As the oldest transformers that quantkit takes makes the tokenizer of a GGUF file."""

    def written_otherwise(document: dict[str, Any]) -> None:
        document.update(normalizer={"type": "Sequence", "normalizers": []})
        document["model"].update(byte_fallback=True)

    plain, other = (
        _with_tokenizer(llama, tmp_path / name, change)
        for name, change in (("plain", lambda _document: None), ("other", written_otherwise))
    )
    assert read_vocabulary(other, VOCABULARY) == read_vocabulary(plain, VOCABULARY)


def test_tokens_fill_the_rows_of_the_embedding(llama: Path) -> None:
    vocabulary = read_vocabulary(llama, VOCABULARY + 1)
    assert len(vocabulary.tokens) == len(vocabulary.types) == VOCABULARY + 1
    assert (vocabulary.tokens[-1], vocabulary.types[-1]) == (f"[PAD{VOCABULARY}]", 5)
    with pytest.raises(CheckpointError, match=r"the model's embedding 8 rows"):
        read_vocabulary(llama, 8)
