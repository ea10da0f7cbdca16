"""What a checkpoint calls the modules of a model: transformers renames some of them on the way to the hub's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantkit.checkpoint.config import CheckpointConfig

_FIELD = ".weight"  # renamings are said of weights


def stored_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """Module name -> its name in the files that save_checkpoint writes."""
    # Here and below: transformers imports this module while it is only half imported itself.
    from transformers.core_model_loading import revert_weight_conversion

    markers: dict[str, Tensor] = {f"{name}{_FIELD}": torch.empty(0) for name in names}
    owners = {id(marker): name.removesuffix(_FIELD) for name, marker in markers.items()}
    reverted: Mapping[str, Tensor] = revert_weight_conversion(model, markers)
    return {owners[id(marker)]: name.removesuffix(_FIELD) for name, marker in reverted.items()}


def module_names(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """Inverse of stored_names, for a model that is about to be loaded; a base model lacks the head model's prefix."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    prefix = getattr(model, "base_model_prefix", "")
    names = {name: _renamed(f"{name}{_FIELD}", renamings).removesuffix(_FIELD) for name in stored}
    if prefix and hasattr(model, prefix):
        return names
    return {name: own.removeprefix(f"{prefix}.") for name, own in names.items()}


def _renamed(name: str, renamings: Iterable[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def with_stored_names(config: CheckpointConfig, names: Mapping[str, str]) -> CheckpointConfig:
    """The config of a model's modules under the names of its files."""
    layers = {names[name]: layer for name, layer in config.layers.items()}
    prefix = config.prefix
    if prefix is not None:
        prefix = replace(prefix, modules={names[name]: shape for name, shape in prefix.modules.items()})
    return replace(config, layers=layers, ignore=tuple(names[name] for name in config.ignore), prefix=prefix)
