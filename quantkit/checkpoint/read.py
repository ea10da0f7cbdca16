"""Reading what a checkpoint folder says of itself, and checking its files against it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from quantkit.checkpoint.config import PREFIX_FIELDS, CheckpointConfig, StoredLayer, config_digest, config_from_json
from quantkit.errors import CheckpointError, refusing
from quantkit.formats.table import FORMATS, format_name
from quantkit.storage.checks import Fields, anything, check_document, map_of, nullable, record, text
from quantkit.storage.documents import read_json
from quantkit.storage.tensors import DTYPES, FLOATS, StoredTensor, TensorFile, Verification, read_header

REPORT_FILE = "quantkit.json"
CONFIG_DIGEST = "quantkit.config_sha256"
_COPY = "copy it again or quantize again"
_REPORT: Fields = {
    "layers": map_of(record({}, {"method": text})),
    "files": map_of(nullable(text)),
    "calibration": anything,
}

Found = tuple[TensorFile, StoredTensor]


def read_checkpoint(folder: Path) -> CheckpointConfig:
    """The quantization_config of a checkpoint folder, the headers of its files checked against it.

    Raises CheckpointError for a folder that is no quantkit checkpoint or whose files are damaged.
    """
    config = config_from_json(read_document(folder))
    check_tensors(config, read_headers(weight_files(folder)))
    return config


def read_document(folder: Path) -> dict[str, Any]:
    """quantization_config as it stands in config.json. Raises CheckpointError where there is none."""
    document = read_json(folder / "config.json", f"checkpoint {folder}: config.json", CheckpointError)
    section = document.get("quantization_config") if isinstance(document, dict) else None
    if not isinstance(section, dict):
        raise CheckpointError(f"checkpoint {folder}: config.json has no quantization_config; is it a quantized model?")
    return section


def read_report(folder: Path) -> dict[str, Any]:
    """quantkit.json, what was measured while quantizing; {} where a later save_pretrained left it behind.

    Raises CheckpointError for an unreadable one.
    """
    path, what = folder / REPORT_FILE, f"checkpoint {folder}: {REPORT_FILE}"
    if not path.exists():
        return {}
    report: dict[str, Any] = read_json(path, what, CheckpointError)
    check_document(report, record({}, _REPORT), what, CheckpointError)
    return report


def weight_files(folder: Path) -> list[str]:
    """The safetensors files of a checkpoint folder, those of the index where there is one.

    Raises CheckpointError where there is none, or for an index that names files elsewhere.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        what = f"checkpoint {folder}: {index.name}"
        document = read_json(index, what, CheckpointError)
        check_document(document, record({"weight_map": map_of(text, least=1)}), what, CheckpointError)
        names = sorted(set(document["weight_map"].values()))
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{what}: names {name!r}, which is no file of this folder")
        return [str(folder / name) for name in names]
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"checkpoint {folder}: holds no model.safetensors")
    return [str(folder / "model.safetensors")]


def read_headers(files: Iterable[str]) -> tuple[TensorFile, ...]:
    """The headers of some files. Raises CheckpointError for a missing, truncated or damaged one."""
    return tuple(read_header(Path(file), f"checkpoint file {file}", CheckpointError, _COPY) for file in files)


def start_verifying(files: Sequence[TensorFile], document: Mapping[str, Any]) -> Verification:
    """Begin to compare every tensor with the digest in its file's header; see Verification.

    document: the quantization_config. It and the small files are compared at once, where the headers hold digests.
    Raises CheckpointError for those that were altered.
    """
    verification, digest = Verification(files, CheckpointError), config_digest(document)
    for file in files:
        if file.digests and file.metadata.get(CONFIG_DIGEST) != digest:
            raise CheckpointError(
                f"checkpoint file {file.path}: was written with another quantization_config than config.json holds; "
                "copy the folder again"
            )
    for folder in sorted({file.path.parent for file in files if file.digests}):
        check_small_files(folder)
    return verification


def check_small_files(folder: Path) -> int:
    """Compare config.json, the tokenizer and whatever else quantkit.json lists with its digest there; how many.

    Raises CheckpointError for a file that is missing or was altered.
    """
    listed = read_report(folder).get("files", {})
    digests = {name: digest for name, digest in listed.items() if digest is not None}
    for name, digest in digests.items():
        what = f"checkpoint {folder}: {name}"
        with refusing(f"{what} cannot be read", CheckpointError):
            path = folder / name
            if path.exists() and not path.is_file():
                raise ValueError("it is no regular file")
            found = sha256(path.read_bytes()).hexdigest()
        if found != digest:
            raise CheckpointError(
                f"{what} was altered after quantkit wrote it; copy it again, or, if the change is yours, "
                f"remove its line from {REPORT_FILE}"
            )
    return len(digests)


def check_tensors(config: CheckpointConfig, files: Sequence[TensorFile]) -> None:
    """Check that the files hold every tensor of every quantized layer with its shape and dtype, and no other of them.

    Scales must be finite, codes within their range, and what kernels read memory by must lead inside it.
    Raises CheckpointError naming the first tensor that does not fit.
    """
    found = _all_tensors(files)
    fields: dict[str, set[str]] = {}
    with ExitStack() as stack:
        handles = {file.path: stack.enter_context(_opened(file.path)) for file in files}
        for name, layer in config.layers.items():
            row = FORMATS[format_name(layer.spec)]
            wanted = row.tensors(layer.spec, layer.shape)
            indices = {}
            for field, tensor in wanted.items():
                full, (file, stored) = _stored(found, f"{name}.{field}")
                expected = DTYPES[tensor.dtype], tuple(tensor.shape)
                if (stored.dtype, stored.shape) != expected:
                    raise CheckpointError(
                        f"{name}.{field}: stored as {stored.dtype}{list(stored.shape)}, expected "
                        f"{expected[0]}{list(expected[1])}; the file or quantization_config was altered"
                    )
                if tensor.largest is not None and not tensor.holds(handles[file.path].get_tensor(full)):
                    raise CheckpointError(f"{name}.{field}: holds a code above {tensor.largest}; {_COPY}")
                if field in row.indices:
                    indices[field] = handles[file.path].get_tensor(full)
                elif stored.dtype in FLOATS and not bool(handles[file.path].get_tensor(full).isfinite().all()):
                    raise CheckpointError(f"{name}.{field}: holds NaN or Inf; {_COPY}")
                fields.setdefault(full.rpartition(".")[0], {"bias"}).add(field)
            with refusing(f"{name}: an index is wrong", CheckpointError, _COPY):
                row.check_indices(layer.spec, indices, layer.shape)
    _check_prefix(config, found)
    for full in found:
        owner, _, field = full.rpartition(".")
        if field not in fields.get(owner, {field}):
            raise CheckpointError(f"{full}: is stored, but quantization_config knows no such tensor; {_COPY}")


def _check_prefix(config: CheckpointConfig, found: Mapping[str, Found]) -> None:
    """Check that the prefix is stored as the config says, and none where it says nothing."""
    modules = {} if config.prefix is None else config.prefix.modules
    wanted = {f"{name}.{field}": shape for name, shape in modules.items() for field in PREFIX_FIELDS}
    known = set()
    for name, shape in wanted.items():
        full, (_, stored) = _stored(found, name)
        known.add(full)
        if stored.shape != shape or stored.dtype not in FLOATS:
            raise CheckpointError(
                f"{name}: stored as {stored.dtype}{list(stored.shape)}, expected {list(shape)}; {_COPY}"
            )
    for full in found:
        if full.rpartition(".")[2] in PREFIX_FIELDS and full not in known:
            raise CheckpointError(f"{full}: is stored, but quantization_config knows no such tensor; {_COPY}")


def check_unquantized(model: nn.Module, config: CheckpointConfig, files: Sequence[TensorFile]) -> None:
    """Check shape and kind of the tensors that are stored as they are, against the model that they are for.

    model: on any device, its quantized Linears in place. What the files do not hold is left to the loader.
    Raises CheckpointError naming the first that does not fit.
    """
    found = _all_tensors(files)
    prefix = getattr(model, "base_model_prefix", "")
    quantized = {f"{name}.{field}" for name, layer in config.layers.items() for field in _fields(layer)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        held = found.get(name) or found.get(f"{prefix}.{name}") or found.get(name.removeprefix(f"{prefix}."))
        if held is None or name in quantized or f"{prefix}.{name}" in quantized:
            continue
        stored = held[1]
        if stored.shape != tuple(tensor.shape) or (stored.dtype in FLOATS) != tensor.is_floating_point():
            raise CheckpointError(
                f"{name}: stored as {stored.dtype}{list(stored.shape)}, the model takes {DTYPES[tensor.dtype]}"
                f"{list(tensor.shape)}; {_COPY}"
            )


def _fields(layer: StoredLayer) -> Iterable[str]:
    return FORMATS[format_name(layer.spec)].tensors(layer.spec, layer.shape)


def _all_tensors(files: Sequence[TensorFile]) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for file in files:
        for name, stored in file.tensors.items():
            if name in found:
                raise CheckpointError(f"{name}: is stored twice, in {found[name][0].path} and in {file.path}; {_COPY}")
            found[name] = file, stored
    return found


def _stored(found: Mapping[str, Found], name: str) -> tuple[str, Found]:
    """A tensor with its full name; files written from the base model lack its first component."""
    for full in (name, name.partition(".")[2]):
        if full in found:
            return full, found[full]
    raise CheckpointError(f"{name}: missing from the checkpoint; {_COPY}")


def _opened(path: Path) -> Any:
    with refusing(f"checkpoint file {path} cannot be read", CheckpointError, _COPY):
        return safe_open(path, framework="pt")
