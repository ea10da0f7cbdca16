"""What ``inspect`` shows of sources, and how bad ones are refused: one line, exit code 2, nothing written."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.calls import refusal, run
from tests.exchange.sources import (
    Coded,
    awq_fields,
    coded,
    compressed_document,
    gptq_fields,
    packed_fields,
    scheme,
    write_source,
)

Model = Callable[[str], Path]
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2", "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
COMPRESSED = compressed_document(scheme(4, symmetric=True, strategy="group", group_size=32))
LAYER = "model.decoder.layers.1.fc1"
Edit = Callable[[dict[str, Any]], None]
TensorEdit = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture(scope="module")
def folders(tiny_model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A source of each method; treat them as read-only."""
    root = tmp_path_factory.mktemp("sources")

    def write(name: str, document: dict[str, Any], fields: Callable[[Coded], dict[str, torch.Tensor]]) -> Path:
        def of(_name: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
            return fields(coded(shape, 4, seed=0, symmetric=True))

        return write_source(tiny_model("opt"), root / name, document, of)

    return {
        "gptq": write("gptq", GPTQ, lambda it: gptq_fields(it, 4)),
        "awq": write("awq", AWQ, awq_fields),
        "compressed": write("compressed", COMPRESSED, lambda it: packed_fields(it, 4, symmetric=True)),
    }


@pytest.fixture
def gguf_folder(tmp_path: Path) -> Path:
    """A folder with nothing but a GGUF file; what is in it is not read."""
    folder = tmp_path / "gguf"
    folder.mkdir()
    (folder / "some.gguf").write_bytes(b"GGUF")
    return folder


def _copy(source: Path, out: Path) -> Path:
    out.mkdir()
    for path in source.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    return out


def _with_config(source: Path, out: Path, edit: Edit) -> Path:
    copy = _copy(source, out)
    config = json.loads((copy / "config.json").read_text())
    edit(config["quantization_config"])
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def _with_tensors(source: Path, out: Path, edit: TensorEdit) -> Path:
    copy = _copy(source, out)
    tensors = load_file(copy / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize(
    ("name", "method"), [("gptq", "gptq v2"), ("awq", "awq gemm"), ("compressed", "pack-quantized")]
)
def test_every_format_is_shown_without_converting(folders: dict[str, Path], name: str, method: str) -> None:
    result = run("inspect", folders[name])
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if "layers.1.fc1" in line)
    assert all(part in line for part in (method, "W4A16", "32", "128 x 64"))
    assert "over 12 quantized layers" in result.stdout
    assert "lm_head" in result.stdout or "embed_tokens" in result.stdout


def test_digests_of_a_source_cannot_be_compared(folders: dict[str, Path]) -> None:
    assert "holds no digests" in refusal("inspect", folders["gptq"], "--verify")


def test_conversion_prints_what_it_did(folders: dict[str, Path], tmp_path: Path) -> None:
    result = run("convert", folders["gptq"], "-o", tmp_path / "out", "--json", tmp_path / "numbers.json")
    assert result.exit_code == 0, result.output
    assert "12, 12 exact" in result.stdout
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert (numbers["layers"], numbers["exact_layers"], numbers["rounding"]) == (12, 12, 0)
    shown = run("inspect", tmp_path / "out", "--verify")
    assert shown.exit_code == 0
    assert "gptq v2" in shown.stdout


def test_an_earlier_result_is_replaced_only_when_asked(folders: dict[str, Path], tmp_path: Path) -> None:
    assert run("convert", folders["awq"], "-o", tmp_path / "out").exit_code == 0
    assert "--overwrite" in refusal("convert", folders["awq"], "-o", tmp_path / "out")
    assert run("convert", folders["awq"], "-o", tmp_path / "out", "--overwrite").exit_code == 0


CONFIGS: dict[str, tuple[str, Edit, str]] = {
    "another method": ("gptq", lambda c: c.update(quant_method="hqq"), "quant_method is 'hqq'; quantkit converts awq"),
    "no method": ("gptq", lambda c: c.pop("quant_method"), "quant_method is None"),
    "format": ("gptq", lambda c: c.update(checkpoint_format="marlin"), "checkpoint_format is 'marlin'; known: gptq"),
    "words": ("gptq", lambda c: c.update(pack_dtype="int64"), "pack_dtype is 'int64'"),
    "bits": ("gptq", lambda c: c.update(bits=5), "bits is 5; quantkit reads 2, 3, 4, 8"),
    "bits as text": ("gptq", lambda c: c.update(bits="4"), "bits is '4'"),
    "group size": ("gptq", lambda c: c.update(group_size=None), "group_size is None"),
    "gemv": ("awq", lambda c: c.update(version="gemv"), "version is 'gemv'"),
    "awq bits": ("awq", lambda c: c.update(bits=3), "bits is 3; AWQ's gemm layout has 4"),
    "fp8": ("compressed", lambda c: c.update(format="float-quantized"), "format is 'float-quantized'; known: pack"),
    "no groups": ("compressed", lambda c: c.update(config_groups={}), "quantization_config is malformed"),
    "targets": (
        "compressed",
        lambda c: c["config_groups"]["group_0"].update(targets=["re:.*q_proj"]),
        "no config group targets it",
    ),
    "regex": ("compressed", lambda c: c["config_groups"]["group_0"].update(targets=["re:("]), "the target 're:(' is"),
    "float weights": (
        "compressed",
        lambda c: c["config_groups"]["group_0"]["weights"].update(type="float"),
        "weights are 'float' of 4 bits",
    ),
    "other bits": (
        "compressed",
        lambda c: c["config_groups"]["group_0"]["weights"].update(num_bits=8),
        "hold no 64 codes of 8 bits",
    ),
    "actorder": (
        "compressed",
        lambda c: c["config_groups"]["group_0"]["weights"].update(actorder="group"),
        "takes the columns of a group apart",
    ),
    "input bits": (
        "compressed",
        lambda c: c["config_groups"]["group_0"].update(input_activations={"num_bits": "8"}),
        "input_activations have num_bits '8'",
    ),
    "cache": ("compressed", lambda c: c.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is set"),
    "sparse": ("compressed", lambda c: c.update(sparsity_config={"format": "x"}), "sparsity_config is set"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations_that_are_not_known_are_refused(folders: dict[str, Path], tmp_path: Path, case: str) -> None:
    name, edit, message = CONFIGS[case]
    source = _with_config(folders[name], tmp_path / "source", edit)
    assert message in refusal("convert", source, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_source_is_told_what_to_name(
    folders: dict[str, Path], gguf_folder: Path, tmp_path: Path
) -> None:
    assert run("convert", folders["gptq"], "-o", tmp_path / "ours").exit_code == 0
    assert "is a quantkit checkpoint already" in refusal("convert", tmp_path / "ours", "-o", tmp_path / "out")
    for command in (("inspect", gguf_folder), ("convert", gguf_folder, "-o", tmp_path / "out")):
        assert f"name it: {gguf_folder / 'some.gguf'}" in refusal(*command)
    arguments = ("export", tmp_path / "none", "--to", "mlx", "-o", tmp_path / "out")
    assert refusal(*arguments).strip().endswith("none: no such folder")
    assert not (tmp_path / "out").exists()


def _replace(field: str, change: Callable[[torch.Tensor], torch.Tensor]) -> TensorEdit:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.{field}"] = change(tensors[f"{LAYER}.{field}"])

    return edit


TENSORS: dict[str, tuple[str, TensorEdit, str]] = {
    "no scales": ("gptq", lambda t: t.pop(f"{LAYER}.scales"), f"{LAYER}.scales: missing"),
    "no zeros": ("awq", lambda t: t.pop(f"{LAYER}.qzeros"), f"{LAYER}.qzeros: missing"),
    "no scale": ("compressed", lambda t: t.pop(f"{LAYER}.weight_scale"), f"{LAYER}.weight_scale: missing"),
    "no shape": ("compressed", lambda t: t.pop(f"{LAYER}.weight_shape"), f"{LAYER}.weight_shape: missing"),
    "short codes": ("gptq", _replace("qweight", lambda t: t[:-1]), "words a column hold no 64 codes"),
    "dtype": ("gptq", _replace("qweight", lambda t: t.long()), "stored as I64"),
    "groups": ("gptq", _replace("scales", lambda t: t[:1].repeat(3, 1)), "qzeros: stored as I32[2, 16], expected"),
    "NaN": ("awq", _replace("scales", lambda t: t * float("nan")), "holds NaN or Inf"),
    "infinite": ("compressed", _replace("weight_scale", lambda t: t / 0), "holds NaN or Inf"),
    "huge": ("gptq", _replace("scales", lambda t: t.float() * 1e9), "beyond fp16"),
    "index": ("gptq", _replace("g_idx", lambda t: t + 7), "names a group outside 0 to 1"),
    "shape": ("compressed", _replace("weight_shape", lambda t: t * 0 - 1), "weight_packed: stored as"),
    "stranger": ("gptq", lambda t: t.update(stranger=torch.zeros(2)), "unexpected keys such as stranger"),
    "no embedding": ("gptq", lambda t: t.pop("model.decoder.embed_tokens.weight"), "missing keys such as"),
    "no codes": ("compressed", lambda t: t.pop(f"{LAYER}.weight_packed"), "is not stored as pack-quantized"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused(folders: dict[str, Path], tmp_path: Path, case: str) -> None:
    name, edit, message = TENSORS[case]
    source = _with_tensors(folders[name], tmp_path / "source", edit)
    assert message in refusal("convert", source, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_process_refuses_a_missing_tensor_in_one_line_and_writes_nothing(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    name, edit, message = TENSORS["no scales"]
    source = _with_tensors(folders[name], tmp_path / "source", edit)
    command = [sys.executable, "-m", "quantkit", "convert", str(source), "-o", str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("group_size", [24, 40])  # as many groups as are stored, of 40 and 24 columns, are others too
@pytest.mark.parametrize("name", ["gptq", "awq", "compressed"])
def test_a_group_size_that_is_not_the_stored_one_is_refused(
    folders: dict[str, Path], tmp_path: Path, name: str, group_size: int
) -> None:
    def edit(document: dict[str, Any]) -> None:
        for group in document.get("config_groups", {"": {"weights": document}}).values():
            group["weights"]["group_size"] = group_size

    said = refusal("convert", _with_config(folders[name], tmp_path / "source", edit), "-o", tmp_path / "out")
    stored = "has groups of 32 columns" if (name, group_size) == ("gptq", 40) else "is stored in 2 groups"
    assert f"{stored}, but quantization_config says group_size {group_size} for its 64 columns" in said
    assert not (tmp_path / "out").exists()


def test_dynamic_changes_what_the_configuration_says_of_a_layer(folders: dict[str, Path], tmp_path: Path) -> None:
    def edit(document: dict[str, Any]) -> None:
        document["dynamic"] = {"-:.*lm_head": {}, "+:.*decoder.*": {"group_size": document["group_size"]}}
        document["group_size"] = 24

    result = run("convert", _with_config(folders["gptq"], tmp_path / "source", edit), "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [({"(": {}}, "the pattern '(' is wrong"), ({"+:x": 8}, "says 8 of '+:x'"), ([1], "dynamic is [1]")],
    ids=["pattern", "value", "list"],
)
def test_a_dynamic_that_cannot_be_read_is_refused(
    folders: dict[str, Path], tmp_path: Path, dynamic: Any, message: str
) -> None:
    source = _with_config(folders["gptq"], tmp_path / "source", lambda document: document.update(dynamic=dynamic))
    assert message in refusal("convert", source, "-o", tmp_path / "out")


def test_groups_that_do_not_divide_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for field in ("scales", "qzeros"):
            tensors[f"{LAYER}.{field}"] = tensors[f"{LAYER}.{field}"][:1].repeat(3, 1)

    source = _with_tensors(folders["awq"], tmp_path / "source", edit)
    assert "is stored in 3 groups, but quantization_config says group_size 32" in refusal(
        "convert", source, "-o", tmp_path / "out"
    )


def test_the_method_is_looked_at_before_the_files(folders: dict[str, Path], tmp_path: Path) -> None:
    """An MLX folder names no method and holds types that nothing here reads; copying it again would not help."""
    source = shutil.copytree(folders["gptq"], tmp_path / "mlx")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"group_size": 64, "bits": 4, "mode": "affine"}
    (source / "config.json").write_text(json.dumps(config))
    save_file({"model.weight": torch.zeros(2, 2, dtype=torch.uint32)}, source / "model.safetensors")
    message = refusal("convert", str(source), "-o", str(tmp_path / "out"))
    assert "quant_method is None; quantkit converts awq" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["nothing", "folder", "model", "gguf", "gguf text", "no weights"])
def test_what_is_no_source_is_refused(tiny_model: Model, folders: dict[str, Path], tmp_path: Path, what: str) -> None:
    source = tmp_path / ("source.gguf" if what.startswith("gguf") else "source")
    if what == "folder":
        source.mkdir()
    elif what == "model":
        source = tiny_model("opt")
    elif what == "gguf text":
        source.write_text("GGUF, or so it says")
    elif what == "no weights":
        _copy(folders["gptq"], source)
        (source / "model.safetensors").unlink()
    refusal("convert", source, "-o", tmp_path / "out")
    refusal("inspect", source)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("seed", range(24))
def test_random_damage_is_refused_in_one_line_or_harmless(folders: dict[str, Path], tmp_path: Path, seed: int) -> None:
    """One to four bytes of config.json or of the header of the weights, changed, left out or cut off."""
    rng = random.Random(seed)
    source = _copy(folders[rng.choice(sorted(folders))], tmp_path / "source")
    path = source / rng.choice(["config.json", "model.safetensors"])
    content = bytearray(path.read_bytes())
    end = len(content) if path.suffix == ".json" else 8 + int.from_bytes(content[:8], "little")
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(end)
        damage = rng.choice(["change", "drop", "cut"])
        if damage == "change":
            content[place] = rng.randrange(256)
        elif damage == "drop":
            del content[place]
        else:
            del content[place : place + rng.randint(1, 64)]
        end = min(end, len(content))
    path.write_bytes(bytes(content))
    result = run("convert", source, "-o", tmp_path / "out")
    if result.exit_code == 0:
        assert run("inspect", tmp_path / "out", "--verify").exit_code == 0
        return
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("quantkit: error: ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
