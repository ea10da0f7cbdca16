"""A quantized model of another tool: which Linears it holds, in which fields, and how each is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from quantkit.checkpoint.read import weight_files
from quantkit.errors import CheckpointError, refusing
from quantkit.exchange.grid import Fitted, Grid, fitted, joined_groups
from quantkit.formats.base import PackedWeight, Shape
from quantkit.storage.documents import read_json
from quantkit.storage.tensors import StoredTensor, read_header

Get = Callable[[str], Tensor]
"""The name of a stored tensor -> the tensor."""
COPY = "copy it again"
OLD_DOCUMENT = "quantize_config.json"  # where AutoGPTQ kept what config.json says today


@dataclass(frozen=True)
class SourceLayer:
    """One quantized Linear of a source.

    name: of the module. shape: (N, K). bits, act_bits: the source's; 16 = not quantized. group_size: -1 for the row.
    fields: what the source calls each of its tensors -> the full name of the stored one. bytes: of them all.
    note: what the conversion leaves out, or "". kind: the type of its blocks, where a source has several.
    """

    name: str
    shape: Shape
    bits: int
    group_size: int
    fields: Mapping[str, str]
    bytes: int
    act_bits: int = 16
    note: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Layout:
    """How the layers of one source format are read.

    grid: (layer, get) -> its levels; reads scales and zero points alone. codes: (layer, get) -> [N, K] uint8.
    packed: (layer, get) -> the stored form, for formats that are no grid of weights alone; grid and codes are then
    not called.
    """

    grid: Callable[[SourceLayer, Get], Grid]
    codes: Callable[[SourceLayer, Get], Tensor]
    packed: Callable[[SourceLayer, Get], PackedWeight | None] = lambda layer, get: None

    def fit(self, layer: SourceLayer, get: Get, *, exact: bool) -> Fitted:
        """The planes of a layer. Raises CheckpointError as ``fitted`` does."""
        grid = joined_groups(self.grid(layer, get), layer.shape[1], layer.name)
        return fitted(grid, layer.name, exact=exact)


@dataclass(frozen=True)
class Source:
    """A model to convert.

    method: what wrote it, such as "gptq v2". config: config.json without its quantization_config. layers: by name.
    others: names of the tensors that are no part of a quantized layer, as the model knows them. matrices: those of them
    with two dimensions. get: any tensor. write_surroundings: writes tokenizer and generation settings into a folder.
    bytes: of all weight files.
    """

    method: str
    config: Mapping[str, Any]
    layers: Mapping[str, SourceLayer]
    layout: Layout
    others: tuple[str, ...]
    matrices: tuple[str, ...]
    get: Get
    write_surroundings: Callable[[Path], None]
    bytes: int


@dataclass(frozen=True)
class Folder:
    """The headers of a folder of safetensors files.

    document: quantization_config. tensors: every stored tensor by name.
    """

    path: Path
    config: Mapping[str, Any]
    document: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    get: Get

    def field(self, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...] | None = None) -> StoredTensor:
        """A stored tensor, checked; None in ``shape`` stands for any size.

        Raises CheckpointError for one that is missing, or of another dtype or shape.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{name}: missing from {self.path}; {COPY}")
        stored = self.tensors[name]
        fits = shape is None or (
            len(shape) == len(stored.shape)
            and all(wanted in (None, size) for wanted, size in zip(shape, stored.shape, strict=True))
        )
        if stored.dtype not in dtypes or not fits:
            wanted = "" if shape is None else str([size if size is not None else "any" for size in shape])
            raise CheckpointError(
                f"{name}: stored as {stored.dtype}{list(stored.shape)}, expected {' or '.join(dtypes)}{wanted}"
            )
        return stored

    def modules_with(self, suffix: str) -> list[str]:
        """The modules that hold a tensor of this name."""
        return [name.removesuffix(f".{suffix}") for name in self.tensors if name.endswith(f".{suffix}")]

    def bytes_of(self, names: Mapping[str, str]) -> int:
        """Bytes of some fields."""
        return sum(self.tensors[name].bytes for name in names.values())


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises CheckpointError for an unreadable one, or one that holds no mapping."""
    files = [] if (folder / "config.json").exists() or not folder.is_dir() else sorted(folder.glob("*.gguf"))
    if files:
        raise CheckpointError(f"source {folder}: has no config.json; to read its GGUF file, name it: {files[0]}")
    what = f"source {folder}: config.json"
    config = read_json(folder / "config.json", what, CheckpointError)
    if not isinstance(config, dict):
        raise CheckpointError(f"{what} holds no mapping")
    return config


@contextmanager
def opened_folder(folder: Path, check: Callable[[Mapping[str, Any]], None]) -> Iterator[Folder]:
    """A source folder of safetensors files, its files open while entered.

    check: raises CheckpointError for a quantization_config of an unknown method, before the files are looked at.
    Raises CheckpointError for what cannot be read, and for a tensor that is stored twice.
    """
    config = read_config(folder)
    document = config.pop("quantization_config", None)
    if document is None and (folder / OLD_DOCUMENT).is_file():
        written = read_json(folder / OLD_DOCUMENT, f"source {folder}: {OLD_DOCUMENT}", CheckpointError)
        document = {"quant_method": "gptq", **written} if isinstance(written, dict) else written
    if not isinstance(document, dict):
        raise CheckpointError(f"source {folder}: config.json has no quantization_config; is it a quantized model?")
    check(document)
    files = [read_header(Path(name), f"source file {name}", CheckpointError, COPY) for name in weight_files(folder)]
    tensors: dict[str, StoredTensor] = {}
    places: dict[str, Any] = {}
    with ExitStack() as stack:
        for file in files:
            with refusing(f"source file {file.path} cannot be read", CheckpointError, COPY):
                handle = stack.enter_context(safe_open(file.path, framework="pt"))
            for name, stored in file.tensors.items():
                if name in tensors:
                    raise CheckpointError(f"{name}: is stored twice in {folder}; {COPY}")
                tensors[name], places[name] = stored, handle
        yield Folder(folder, config, document, tensors, lambda name: places[name].get_tensor(name))


_NOT_COPIED = ("config.json", OLD_DOCUMENT, "quant_config.json", "quantkit.json", "quant_log.csv")
_COPIED = (".json", ".jinja", ".model", ".txt")
_MOST_BYTES = 1 << 28


def copy_surroundings(source: Path, target: Path) -> None:
    """Copy tokenizer and generation settings: small regular files beside the weights. Raises OSError."""
    for path in sorted(source.iterdir()):
        small = path.is_file() and path.stat().st_size <= _MOST_BYTES
        if small and path.suffix in _COPIED and path.name not in _NOT_COPIED and ".safetensors" not in path.name:
            (target / path.name).write_bytes(path.read_bytes())


def check_groups(layer: str, group_size: int, groups: int, columns: int, *, ragged: bool = False) -> int:
    """The group size of a layer with ``groups`` groups, -1 for one that spans the row.

    group_size: what the configuration says; the row where it is no positive number. ragged: the last group may have
    fewer columns, as the source names the group of each. Raises CheckpointError where the stored groups are others.
    """
    width = group_size if 0 < group_size < columns else columns
    if groups != -(-columns // width) or (columns % width and not ragged):
        raise CheckpointError(other_groups(layer, f"is stored in {groups} groups", group_size, columns))
    return group_size if groups > 1 else -1


def other_groups(layer: str, stored: str, group_size: int, columns: int) -> str:
    """The line for a layer whose tensors and configuration disagree."""
    return (
        f"{layer}: {stored}, but quantization_config says group_size {group_size} for its {columns} columns; correct "
        f"the number in config.json, or {COPY}"
    )


def whole_number(document: Mapping[str, Any], name: str, known: tuple[int, ...] | None = None) -> int:
    """An integer of a quantization_config. Raises CheckpointError for anything else, or one not in ``known``."""
    value = document.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or (known is not None and value not in known):
        choices = "" if known is None else f"; quantkit reads {', '.join(map(str, known))}"
        raise CheckpointError(f"quantization_config: {name} is {value!r}{choices}")
    return value
