"""Reading what a checkpoint folder says of itself, and checking its files against it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quantkit.checkpoint.config import CheckpointConfig, config_from_json
from quantkit.checkpoint.write import REPORT_FILE
from quantkit.errors import CheckpointError
from quantkit.formats.table import FORMATS, format_name

# safetensors' names of the dtypes that formats store
_DTYPES = {"torch.uint8": "U8", "torch.int8": "I8", "torch.int16": "I16", "torch.int32": "I32"}
_DTYPES |= {"torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float32": "F32"}


@dataclass(frozen=True)
class Header:
    """Shape and safetensors dtype name of one tensor in a file."""

    shape: tuple[int, ...]
    dtype: str


def read_checkpoint(folder: Path) -> CheckpointConfig:
    """The quantization_config of a checkpoint folder, its files checked.

    Raises CheckpointError for a folder that is no quantkit checkpoint or whose files are damaged.
    """
    path = folder / "config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {folder}: config.json cannot be read ({error})") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"checkpoint {folder}: config.json has no quantization_config; is it a quantized model?")
    config = config_from_json(document)
    check_tensors(config, weight_files(folder))
    return config


def read_report(folder: Path) -> dict[str, Any]:
    """quantkit.json, what was measured while quantizing; {} where a later save_pretrained left it behind.

    Raises CheckpointError for an unreadable one.
    """
    path = folder / REPORT_FILE
    if not path.is_file():
        return {}
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder}: {REPORT_FILE} cannot be read ({error})") from error
    return report


def weight_files(folder: Path) -> list[str]:
    """The safetensors files of a checkpoint folder, those of the index where there is one.

    Raises CheckpointError where there is none.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"checkpoint {folder}: {index.name} cannot be read ({error})") from error
        return sorted(str(folder / name) for name in names)
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"checkpoint {folder}: holds no model.safetensors")
    return [str(folder / "model.safetensors")]


def read_headers(files: Iterable[str]) -> dict[str, Header]:
    """Shape and dtype of every tensor, from the files' headers alone.

    Raises CheckpointError for a missing or truncated file.
    """
    headers = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118  (the handle is no mapping)
                    part = handle.get_slice(name)
                    headers[name] = Header(tuple(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"checkpoint file {file}: truncated or damaged ({reason}); copy it again") from error
    return headers


def check_tensors(config: CheckpointConfig, files: Iterable[str]) -> None:
    """Check that every stored tensor of every quantized layer is in the files with its shape and dtype.

    Raises CheckpointError naming the first that is not.
    """
    headers = read_headers(files)
    for name, layer in config.layers.items():
        for field, wanted in FORMATS[format_name(layer.spec)].tensors(layer.spec, layer.shape).items():
            found = _find(headers, f"{name}.{field}")
            expected = Header(tuple(wanted.shape), _DTYPES[str(wanted.dtype)])
            if found is None:
                raise CheckpointError(f"{name}.{field}: missing from the checkpoint; copy it again or quantize again")
            if found != expected:
                raise CheckpointError(
                    f"{name}.{field}: stored as {found.dtype}{list(found.shape)}, expected "
                    f"{expected.dtype}{list(expected.shape)}; the file or quantization_config was altered"
                )


def _find(headers: Mapping[str, Header], name: str) -> Header | None:
    """A tensor by name; files written from the base model lack its first component."""
    return headers.get(name) or headers.get(name.partition(".")[2])
