"""A model of which one part at a time holds its weights: a decoder block, or all that stands outside the blocks.

The rest is on the meta device: shapes without memory. What a part needs is read from the safetensors files when it is
entered, by transformers' own loader (so names and fused weights are as ``from_pretrained`` makes them), and given back
when it is left. A model that is in memory already is a stream whose parts are always there.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from quantkit.errors import ModelError, refusing
from quantkit.models.experts import fused_again, separate_experts
from quantkit.models.families import decoder_blocks
from quantkit.storage.tensors import TORCH_DTYPES, TensorFile, read_header, read_into

_WEIGHT_NAMES = ("model.safetensors", "pytorch_model.bin")
_READING = 4  # threads that read weights for a GPU
_READ_BYTES = 1 << 24  # of the pinned memory of each


@runtime_checkable
class PackedModule(Protocol):
    """A module that puts its weights into an order of its device's own, and gives them up at once."""

    def prepare_for_device(self) -> None: ...

    def empty(self) -> None: ...


class ModelStream:
    """``model``, and its ``blocks`` by name in order; weights are there inside ``outside()`` and ``block(index)``."""

    def __init__(self, model: Any, device: torch.device, reader: WeightReader | None = None):
        """Fused experts of the model are separated, in place; a reader, which knows them fused, is made before.

        reader: where weights are read from; None for a model that is in memory.
        """
        self.model, self.device, self._reader = model, device, reader
        self._fused = separate_experts(model)
        self.blocks = decoder_blocks(model)
        self._held: set[str | None] = set()
        self._edit: Callable[[str | None], None] | None = None

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Embeddings, norms and head are there while this is entered."""
        with self._resident(None):
            yield

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """The decoder block, with its weights while this is entered. Modules put into it meanwhile stay, empty."""
        prefix, block = self.blocks[index]
        with self._resident(prefix):
            self._read_ahead(index + 1)
            yield block

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """The model with all of its weights while this is entered."""
        with ExitStack() as stack:
            for prefix in (None, *(name for name, _ in self.blocks)):
                stack.enter_context(self._resident(prefix))
            yield self.model

    def parts(self) -> Iterator[str | None]:
        """None for what is outside the blocks, then each block's name; every part is there until the next."""
        for index, prefix in enumerate((None, *(name for name, _ in self.blocks))):
            with self._resident(prefix):
                self._read_ahead(index)
                yield prefix

    def edit_parts(self, edit: Callable[[str | None], None]) -> None:
        """Do this to every part, by its block's name or None, whenever it has been read; in place of what was set."""
        assert self._reader is not None, "a model in memory is never read"
        self._edit = edit

    def owner(self, name: str) -> str | None:
        """The block that a parameter, a buffer or a module is in, by name; None for one outside the blocks."""
        stack, _, _ = self.blocks[0][0].rpartition(".")
        if not name.startswith(f"{stack}."):
            return None
        return f"{stack}.{name.removeprefix(f'{stack}.').split('.')[0]}"

    def part_tensors(self, prefix: str | None) -> dict[str, Tensor]:
        """The state dict's entries of one part."""
        return {name: tensor for name, tensor in self.model.state_dict().items() if self.owner(name) == prefix}

    def _read_ahead(self, index: int) -> None:
        """Begin to read a block, if there is one, for a GPU."""
        if self._reader is not None and self.device.type == "cuda" and index < len(self.blocks):
            self._reader.read_ahead(self._part_keys(self.blocks[index][0]), self.device)

    @contextmanager
    def _resident(self, prefix: str | None) -> Iterator[None]:
        if self._reader is None or prefix in self._held:
            yield
            return
        self._held.add(prefix)
        try:
            fused = {name: module for name, module in self._fused.items() if self.owner(name) == prefix}
            with fused_again(self.model, fused):
                self._reader.load(self.model, self._part_keys(prefix), self.device)
            self._check_loaded(prefix)
            if self._edit is not None:
                self._edit(prefix)
            for module in self._packed(prefix):
                module.prepare_for_device()
            yield
        finally:
            self._held.remove(prefix)
            self._evict(prefix)

    def _packed(self, prefix: str | None) -> list[PackedModule]:
        """The modules of a part that keep their weights in an order of their own."""
        own = (module for name, module in self.model.named_modules() if self.owner(name) == prefix)
        return [module for module in own if isinstance(module, PackedModule)]

    def _part_keys(self, prefix: str | None) -> list[str]:
        assert self._reader is not None
        return [key for key, name in self._reader.targets.items() if self.owner(name) == prefix]

    def _check_loaded(self, prefix: str | None) -> None:
        for name, tensor in self.part_tensors(prefix).items():
            if tensor.device.type == "meta":
                raise ModelError(f"{name}: its file holds no weight for it")

    def _evict(self, prefix: str | None) -> None:
        """Put the part's weights on the meta device; weights that were one stay one."""
        for packed in self._packed(prefix):
            packed.empty()
        made: dict[nn.Parameter, nn.Parameter] = {}  # by identity, as tensors hash
        for name, module in self.model.named_modules():
            if self.owner(name) != prefix:
                continue
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter.device.type != "meta":
                    module._parameters[key] = made.setdefault(parameter, _empty(parameter))
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    module._buffers[key] = torch.empty_like(buffer, device="meta")


class WeightReader:
    """The weight files of a model. targets: key in the files -> name of the (first) parameter that it becomes."""

    def __init__(self, model: Any, folder: Path):
        self._files = _keys_by_file(folder)
        self._ties = _ties(model)
        self._pool = ThreadPoolExecutor(1)  # its thread begins with the first task
        self._ahead: tuple[list[str], Future[dict[str, Tensor]]] | None = None
        names = model.state_dict()
        self.targets: dict[str, str] = {}
        self._mapping: Any = get_model_conversion_mapping(model, hf_quantizer=getattr(model, "hf_quantizer", None))
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        prefix = model.base_model_prefix
        for key in self._files:
            name, _ = rename_source_key(key, renamings, converters, prefix, names)
            if name not in names and key in names:
                name = key
            self.targets[key] = name

    def load(self, model: Any, keys: list[str], device: torch.device) -> None:
        """Give the parameters that the keys become their values, on the device, in the dtypes that the model has."""
        used = model._weight_conversions  # of the whole model: it says how weights are named when they are written
        with ExitStack() as stack:
            files = {key: self._files[key] for key in keys}
            tensors = self._read_on_gpu(files, device) if device.type == "cuda" else _open_tensors(files, stack)
            config = LoadStateDictConfig(
                device_map={"": device}, dtype=model.dtype, weight_mapping=copy.deepcopy(self._mapping)
            )
            convert_and_load_state_dict_in_model(model=model, state_dict=tensors, load_config=config)
        model._weight_conversions = used
        loaded = {self.targets[key] for key in keys}
        for names in self._ties:
            if loaded.intersection(names):
                _tie(model, names)

    def read_ahead(self, keys: list[str], device: torch.device) -> None:
        """Begin to read what the next load will ask for to a GPU, in the files' dtypes."""
        if self._ahead is None or self._ahead[0] != keys:
            files = {key: self._files[key] for key in keys}
            self._ahead = (keys, self._pool.submit(_on_gpu, files, device))

    def _read_on_gpu(self, files: Mapping[str, Path], device: torch.device) -> dict[str, Tensor]:
        """What was read ahead, or is read now. The loader converts it there: from the CPU its copies convert first."""
        if self._ahead is not None and self._ahead[0] == list(files):
            tensors = self._ahead[1].result()
            self._ahead = None
        else:
            tensors = _on_gpu(files, device)
        for tensor in tensors.values():
            tensor.record_stream(torch.cuda.current_stream(device))  # which uses what another stream made
        return tensors


def _on_gpu(files: Mapping[str, Path], device: torch.device) -> dict[str, Tensor]:
    """Each key's tensor on a GPU, in its file's dtype. safetensors files are read: page faults of a map cost more."""
    mapped = {key: path for key, path in files.items() if path.suffix == ".bin"}
    paths = {*files.values()} - {*mapped.values()}
    headers = {path: read_header(path, f"model file {path}", ModelError) for path in paths}
    with ExitStack() as stack, ThreadPoolExecutor(_READING) as pool:
        found = {key: tensor.to(device) for key, tensor in _open_tensors(mapped, stack).items()}
        reading = {key: pool.submit(_read, headers[files[key]], key, device) for key in files if key not in mapped}
        return found | {key: read.result() for key, read in reading.items()}


def _read(file: TensorFile, key: str, device: torch.device) -> Tensor:
    """One tensor, by way of a little pinned memory, beside what else the GPU does."""
    stored = file.tensors[key]
    with torch.cuda.stream(_reading_stream(device)):
        tensor = torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype], device=device)
        content = tensor.view(-1).view(torch.uint8)
        room = torch.empty(min(len(content), _READ_BYTES), dtype=torch.uint8, pin_memory=True)
        with refusing(f"model file {file.path} cannot be read", ModelError):
            for start in range(0, len(content), _READ_BYTES):
                part = content[start : start + _READ_BYTES]
                read_into(room[: len(part)], file, key, start)
                part.copy_(room[: len(part)])
    return tensor


@cache
def _reading_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def structure(model: Any) -> Any:
    """The transformers model of a stream, whose weights may be absent, or of a model in memory, which is itself."""
    return model.model if isinstance(model, ModelStream) else model


def in_memory_stream(model: Any) -> ModelStream:
    """The stream of a model that is in memory as a whole."""
    return ModelStream(model, next(model.parameters()).device)


def restore_buffers(model: Any, device: torch.device) -> None:
    """Compute the buffers that no file holds (rotary frequencies, masks) of a model on the meta device.

    Raises ModelError for one that the model's own initialization does not give.
    """
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        filler = float("nan") if buffer.is_floating_point() else 0
        module._buffers[key] = torch.full_like(buffer, filler, device=device)
    for name, _ in list(model.named_non_persistent_buffers()):
        path = name.split(".")[:-1]
        above = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1)]
        innermost: Any = next(module for module in reversed(above) if hasattr(module, "_init_weights"))
        innermost._init_weights(above[-1])  # a model inside another knows its own modules
    for name, buffer in model.named_non_persistent_buffers():
        if buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise ModelError(f"{name}: a buffer that no file holds and that {type(model).__name__} does not compute")


def check_ties(stream: ModelStream) -> None:
    """Raise ModelError where two parts of the model share a weight: they are never in memory together."""
    for names in _ties(stream.model):
        if len({stream.owner(name) for name in names}) > 1:
            raise ModelError(f"{names[0]} and {names[-1]} are one weight in two decoder blocks; that is not supported")


def _ties(model: Any) -> list[list[str]]:
    """The names of each weight that has several."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _tie(model: Any, names: list[str]) -> None:
    """Make one weight of those by several names, of which the file held one."""
    found = next(parameter for name in names if (parameter := model.get_parameter(name)).device.type != "meta")
    for name in names:
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._parameters[key] = found


def _empty(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)


def _keys_by_file(folder: Path) -> dict[str, Path]:
    """Every key in the weight files of a folder, with the file that holds it."""
    for name in _WEIGHT_NAMES:
        index = folder / f"{name}.index.json"
        if index.exists():
            with refusing(f"model {folder}: {index.name} cannot be read", ModelError):
                mapping: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return {key: folder / Path(file).name for key, file in mapping.items()}
        if (folder / name).exists():
            with refusing(f"model {folder}: {name} cannot be read", ModelError), ExitStack() as stack:
                return dict.fromkeys(_open_file(folder / name, stack)[0], folder / name)
    raise ModelError(f"model {folder}: no weights (*.safetensors) beside config.json")


def _open_tensors(files: Mapping[str, Path], stack: ExitStack) -> dict[str, Any]:
    """Each key's tensor, or what gives it when it is sliced; nothing is read yet."""
    opened = {path: _open_file(path, stack) for path in sorted(set(files.values()))}
    return {key: opened[path][1](key) for key, path in files.items()}


def _open_file(path: Path, stack: ExitStack) -> tuple[list[str], Any]:
    """The keys of a weight file, and what gives a key's tensor."""
    if path.suffix == ".bin":
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return list(tensors), tensors.__getitem__
    handle = stack.enter_context(safe_open(path, framework="pt"))
    return list(handle.keys()), handle.get_slice
