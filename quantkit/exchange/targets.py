"""The formats that quantkit exports to: what each can hold, its tensors, and its part of config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.exchange import gguf_writer, gptq
from quantkit.exchange.exported import Exported, ExportLayer
from quantkit.exchange.files import Document, Fields, Layers, write_files
from quantkit.exchange.grid import Grid, rounding_of
from quantkit.exchange.words import WORD_BITS, pack_stream
from quantkit.formats.bcq import group_width

_MLX_BITS, _MLX_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
_INTEGER_ZEROS = "quantize with zero: integer (rtn, also as GPTQ), convert exactly, or export to humming or mlx"


def _any_model(_source: Exported) -> None:
    """Formats of safetensors files hold every model."""


@dataclass(frozen=True)
class Target:
    """One format.

    check: raises CheckpointError for a layer that it cannot hold, and returns by how much it rounds its levels: the
    largest difference over the largest magnitude of a group, 0 where it is exact.
    write: (checkpoint, folder, bytes of a file at most) writes the weights and what describes them.
    check_model: raises CheckpointError for a model that the format cannot hold, before its layers are looked at.
    """

    check: Callable[[ExportLayer], float]
    write: Callable[[Exported, Path, int], None]
    check_model: Callable[[Exported], None] = _any_model


def _integer_zeros(layer: ExportLayer) -> Grid:
    grid = layer.uniform
    if grid.zero is None:
        raise CheckpointError(f"{layer.name}: its offsets are no whole numbers of steps; {_INTEGER_ZEROS}")
    return grid


def _whole_groups(layer: ExportLayer, grid: Grid) -> int:
    """The columns of a group. Raises CheckpointError where the last one is shorter."""
    width = group_width(grid.group_size, layer.shape[1])
    if layer.shape[1] % width:
        raise CheckpointError(f"{layer.name}: groups of {width} do not divide its {layer.shape[1]} columns")
    return width


def _check_compressed(layer: ExportLayer) -> float:
    if layer.grid is not None:
        _whole_groups(layer, _integer_zeros(layer))
        layer.step()
    return 0.0


def _compressed_fields(source: Exported, layer: ExportLayer, _layers: Layers) -> dict[str, Tensor]:
    rows, columns = layer.shape
    if layer.grid is None:
        return {
            "weight": source.field(layer, "codes")[:, :columns].contiguous(),
            "weight_scale": source.field(layer, "weight_scale"),
            "input_scale": source.field(layer, "act_scale"),
        }
    grid = _integer_zeros(layer)
    assert grid.zero is not None
    fields = {
        "weight_packed": pack_stream(source.codes(layer), grid.bits),
        "weight_scale": layer.step(),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not layer.is_symmetric:
        fields["weight_zero_point"] = pack_stream(grid.zero.t(), grid.bits).t().contiguous()
    return fields


def _compressed_group(layer: ExportLayer) -> dict[str, Any]:
    """The config group of a layer, but for its targets."""
    tensor = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "tensor"}
    if layer.grid is None:
        weights = {**tensor, "strategy": "channel"} if layer.row_scales else tensor
        return {"weights": weights, "input_activations": tensor, "output_activations": None, "format": "int-quantized"}
    width = group_width(layer.grid.group_size, layer.shape[1])
    how = {"strategy": "channel"} if width == layer.shape[1] else {"strategy": "group", "group_size": width}
    weights = {**tensor, "num_bits": layer.grid.bits, "symmetric": layer.is_symmetric, **how}
    return {"weights": weights, "input_activations": None, "output_activations": None, "format": "pack-quantized"}


def _compressed_document(layers: Layers, ignore: tuple[str, ...]) -> dict[str, Any]:
    groups: dict[str, list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault(json.dumps(_compressed_group(layer)), []).append(name)
    config_groups = {
        f"group_{index}": {"targets": ["Linear"] if len(groups) == 1 else names, **json.loads(group)}
        for index, (group, names) in enumerate(groups.items())
    }
    formats = {group["format"] for group in config_groups.values()}
    document = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }
    return {"quantization_config": document}


def _check_gptq(layer: ExportLayer) -> float:
    grid = _integer_zeros(layer)
    _whole_groups(layer, grid)
    layer.step()
    gptq.check_writable(layer.name, *layer.shape, grid.bits)
    return 0.0


def _gptq_version(layers: Layers) -> str:
    """v1 for symmetric grids; GPTQModel refuses other zero points in v1 unless it wrote them itself."""
    return gptq.V1 if all(layer.is_symmetric for layer in layers.values()) else gptq.V2


def _gptq_fields(source: Exported, layer: ExportLayer, layers: Layers) -> dict[str, Tensor]:
    return gptq.written(source.codes(layer), _integer_zeros(layer), stated=_gptq_version(layers))


def _gptq_document(layers: Layers, ignore: tuple[str, ...]) -> dict[str, Any]:
    settings = {name: (layer.uniform.bits, layer.uniform.group_size) for name, layer in layers.items()}
    bits, group_size = _commonest(settings)
    dynamic: dict[str, dict[str, int]] = {
        f"+:^{re.escape(name)}$": {"bits": own[0], "group_size": own[1]}
        for name, own in settings.items()
        if own != (bits, group_size)
    }
    dynamic |= {f"-:^{re.escape(name)}$": {} for name in ignore if name != "lm_head"}
    document = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": all(layer.is_symmetric for layer in layers.values()),
        "desc_act": False,
        "lm_head": "lm_head" in layers,
        "checkpoint_format": _gptq_version(layers),
        "pack_dtype": "int32",
        **({"dynamic": dynamic} if dynamic else {}),
    }
    return {"quantization_config": document}


def _commonest(settings: Mapping[str, Any]) -> Any:
    """The value that most layers have, the first of several."""
    values = list(settings.values())
    return max(dict.fromkeys(values), key=values.count)


def _zero_point(grid: Grid) -> Tensor:
    """[N, G] fp16, in steps."""
    return torch.where(grid.step == 0, 0.0, -grid.lowest / grid.step).half()


def _check_humming(layer: ExportLayer) -> float:
    grid = layer.uniform
    _whole_groups(layer, grid)
    layer.step()
    if layer.shape[1] * grid.bits % WORD_BITS or (grid.zero is not None and layer.shape[0] * grid.bits % WORD_BITS):
        raise CheckpointError(
            f"{layer.name}: {layer.shape[0]} x {layer.shape[1]} is not whole words of {grid.bits} bits"
        )
    if grid.zero is not None:
        return 0.0
    if not bool(_zero_point(grid).isfinite().all()):
        raise CheckpointError(f"{layer.name}: its offsets are beyond fp16 when counted in steps")
    return rounding_of(grid, -_zero_point(grid).double() * grid.step)


def _humming_fields(source: Exported, layer: ExportLayer, _layers: Layers) -> dict[str, Tensor]:
    grid = layer.uniform
    fields = {"weight": pack_stream(source.codes(layer), grid.bits), "weight_scale": layer.step()}
    if grid.zero is None:
        fields["zero_point"] = _zero_point(grid)
    elif not layer.is_symmetric:
        fields["zero_point"] = pack_stream(grid.zero.t(), grid.bits).t().contiguous()
    return fields


def _humming_settings(layer: ExportLayer) -> dict[str, Any]:
    grid = layer.uniform
    whole = grid.group_size == -1 or grid.group_size >= layer.shape[1]
    return {
        "b_dtype": f"uint{grid.bits}",
        "weight_scale_group_size": 0 if whole else grid.group_size,
        "has_zero_point": not layer.is_symmetric,
        "is_fp_zero_point": grid.zero is None,
    }


def _humming_document(layers: Layers, ignore: tuple[str, ...]) -> dict[str, Any]:
    settings = {name: _humming_settings(layer) for name, layer in layers.items()}
    common = _commonest({name: tuple(own.items()) for name, own in settings.items()})
    dynamic = {rf"^{re.escape(name)}$": own for name, own in settings.items() if tuple(own.items()) != common}
    document = {"quant_method": "humming", **dict(common), "ignore": list(ignore)}
    return {"quantization_config": {**document, **({"dynamic": dynamic} if dynamic else {})}}


def _check_mlx(layer: ExportLayer) -> float:
    grid = layer.uniform
    width = _whole_groups(layer, grid)
    layer.step()
    if grid.bits not in _MLX_BITS or width not in _MLX_GROUPS:
        raise CheckpointError(
            f"{layer.name}: has {grid.bits} bits in groups of {width}; MLX runs {', '.join(map(str, _MLX_BITS))} bits "
            f"in groups of {', '.join(map(str, _MLX_GROUPS))}"
        )
    return rounding_of(grid, grid.lowest.half().double())


def _mlx_fields(source: Exported, layer: ExportLayer, _layers: Layers) -> dict[str, Tensor]:
    grid = layer.uniform
    words = pack_stream(source.codes(layer), grid.bits).view(torch.uint32)
    return {"weight": words, "scales": layer.step(), "biases": grid.lowest.half()}


def _mlx_document(layers: Layers, _ignore: tuple[str, ...]) -> dict[str, Any]:
    settings = {
        name: (group_width(layer.uniform.group_size, layer.shape[1]), layer.uniform.bits)
        for name, layer in layers.items()
    }
    common = _commonest(settings)
    own = {
        name: {"group_size": width, "bits": bits} for name, (width, bits) in settings.items() if (width, bits) != common
    }
    document = {"group_size": common[0], "bits": common[1], "mode": "affine", **own}
    return {"quantization": document, "quantization_config": document}


def _files(fields: Fields, document: Document, metadata: str = "pt") -> Callable[[Exported, Path, int], None]:
    return partial(write_files, fields=fields, document=document, metadata=metadata)


TARGETS: dict[str, Target] = {
    "compressed-tensors": Target(_check_compressed, _files(_compressed_fields, _compressed_document)),
    "gptq": Target(_check_gptq, _files(_gptq_fields, _gptq_document)),
    "humming": Target(_check_humming, _files(_humming_fields, _humming_document)),
    "mlx": Target(_check_mlx, _files(_mlx_fields, _mlx_document, metadata="mlx")),
    "gguf": Target(gguf_writer.check_layer, gguf_writer.write, gguf_writer.check_model),
}
