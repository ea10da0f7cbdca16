"""Writing a checkpoint folder: complete or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError

REPORT_FILE = "quantkit.json"
MAX_SHARD_BYTES = 4 * 10**9


def check_output(out: Path, *, overwrite: bool, source: str) -> None:
    """Check, before the long work, that a checkpoint may be written to ``out``.

    Raises CheckpointError if ``out`` is the model itself, a file, a folder with files in it and no ``overwrite``, or
    (with ``overwrite``) a folder that quantkit did not write: replacing it would lose something else.
    """
    if out.exists() and Path(source).exists() and out.samefile(source):
        raise CheckpointError(f"output {out}: is the model's own folder; choose another")
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"output {out}: is a file; choose a folder")
    if not out.absolute().parent.is_dir():
        raise CheckpointError(f"output {out}: the folder {out.absolute().parent} does not exist")
    if not os.access(out.absolute().parent, os.W_OK):
        raise CheckpointError(f"output {out}: no permission to write in {out.absolute().parent}")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise CheckpointError(f"output {out}: the folder is not empty; pass `overwrite` to replace it")
        if not (out / REPORT_FILE).is_file():
            raise CheckpointError(f"output {out}: holds no quantkit checkpoint, so `overwrite` will not delete it")


def save_checkpoint(model: Any, tokenizer: Any, report: Mapping[str, Any], out: Path) -> None:
    """Write model, tokenizer and report beside ``out``, then move them into place in one step.

    An earlier checkpoint at ``out`` (checked by check_output) is replaced.
    """
    partial = out.absolute().parent / f".{out.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial, max_shard_size=MAX_SHARD_BYTES)
        tokenizer.save_pretrained(partial)
        (partial / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
    except OSError as error:
        raise CheckpointError(f"output {out}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def folder_bytes(folder: Path) -> int:
    """Bytes of the weight files of a checkpoint."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
