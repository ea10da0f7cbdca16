"""Writing a checkpoint folder, and telling whether a folder holds nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from quantkit.checkpoint.config import config_digest
from quantkit.checkpoint.read import CONFIG_DIGEST, REPORT_FILE, read_document, read_report
from quantkit.errors import CheckpointError
from quantkit.progress import track
from quantkit.storage.tensors import DIGEST_LETTERS, TensorFile, copy_tensors, file_header, in_file_order

MAX_SHARD_BYTES = 4 * 10**9
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ".safetensors"
# What versions before quantkit.json listed the files could have written.
_FORMER_FILES = frozenset(
    (
        *("config.json", "generation_config.json", "model.safetensors", _INDEX),
        *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "spiece.model"),
        *("added_tokens.json", "chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt"),
    )
)


def save_surroundings(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write what does not depend on the quantization: before the long work, as it may fail.

    Raises what the libraries raise, as save_checkpoint does: for ``refusing`` to put in one line.
    """
    tokenizer.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def save_checkpoint(model: Any, report: Mapping[str, Any], folder: Path, tensors: Mapping[str, TensorFile]) -> None:
    """Write config.json, the weights with their digests, and the report, which lists every file of the folder.

    model: with its quantization_config attached, in the dtype to store; its tensors say names, order, shapes and
    dtypes. tensors: by stored name, the files that hold their bytes.
    """
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    _write_weights(stored_tensors(model), weights_metadata(read_document(folder)), folder, tensors)
    write_report(report, folder)


def write_report(report: Mapping[str, Any], folder: Path) -> None:
    """quantkit.json of a folder that is complete but for it; it lists every other file. Raises OSError."""
    files = {name: _listed_digest(folder / name) for name in sorted(_files(folder))}
    text = json.dumps({**report, "files": files}, indent=1) + "\n"
    (folder / REPORT_FILE).write_text(text, encoding="utf-8")


def weights_metadata(document: Mapping[str, Any]) -> dict[str, str]:
    """What the headers of the weight files say besides the tensors. document: the quantization_config."""
    return {"format": "pt", CONFIG_DIGEST: config_digest(document)}


def stored_tensors(model: Any, keep: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
    """The tensors of a model by the names that its checkpoint gives them; tied ones once, as save_pretrained does.

    keep: name in the model -> whether it is wanted; by default all are.
    """
    ignored = set(model._keys_to_ignore_on_save or ())
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    if keep is not None:
        state = {name: tensor for name, tensor in state.items() if keep(name)}
    stored: dict[str, Tensor] = revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))
    return stored


def weight_bytes(model: Any, metadata: Mapping[str, str]) -> int:
    """Bytes of all weight files that save_checkpoint will write for the model, to the byte."""
    tensors = stored_tensors(model)
    total = 0
    for names in _split(tensors).filename_to_tensors.values():
        own = in_file_order({name: tensors[name] for name in names})
        header = file_header(own, metadata, dict.fromkeys(own, "0" * DIGEST_LETTERS))
        total += len(header) + sum(tensor.numel() * tensor.itemsize for tensor in own.values())
    return total


def foreign(folder: Path) -> str | None:
    """Why a folder is more, or less, than a checkpoint that quantkit wrote; None where all of it is one."""
    if not (folder / REPORT_FILE).is_file():
        return "holds no quantkit checkpoint"
    try:
        listed = read_report(folder).get("files")
    except CheckpointError:
        return f"holds a {REPORT_FILE} that cannot be read"
    ours = {REPORT_FILE, *(_FORMER_FILES if listed is None else listed)}
    former_shard = listed is None
    for name in sorted(_files(folder)):
        if name not in ours and not (former_shard and name.startswith("model-") and name.endswith(_WEIGHTS)):
            return f"holds {name}, which quantkit did not write there"
    return None


def folder_bytes(folder: Path) -> int:
    """Bytes of the weight files of a checkpoint."""
    return sum(path.stat().st_size for path in folder.glob(f"*{_WEIGHTS}"))


def _split(tensors: Mapping[str, Tensor]) -> Any:
    pattern = f"model{{suffix}}{_WEIGHTS}"
    return split_torch_state_dict_into_shards(dict(tensors), filename_pattern=pattern, max_shard_size=MAX_SHARD_BYTES)


def _write_weights(
    tensors: dict[str, Tensor], metadata: Mapping[str, str], folder: Path, sources: Mapping[str, TensorFile]
) -> None:
    split = _split(tensors)
    for file, names in track(split.filename_to_tensors.items(), "writing the weight files"):
        copy_tensors(folder / file, {name: tensors[name] for name in names}, metadata, sources)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / _INDEX).write_text(text, encoding="utf-8")


def _listed_digest(path: Path) -> str | None:
    """sha256 of a small file; None for weights, whose headers hold their digests."""
    return None if path.suffix == _WEIGHTS else sha256(path.read_bytes()).hexdigest()


def _files(folder: Path) -> Iterator[str]:
    """Every file in a folder and the folders in it, by its path in there; links are files."""
    for root, folders, names in os.walk(folder):
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        yield from (str((Path(root) / name).relative_to(folder)) for name in (*names, *links))
