"""Quantized models as other tools write them, packed here code by code from the formats' definitions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
ONE_BELOW = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True)
class Coded:
    """codes [N, K], scales [N, G] fp16 and zero points [N, G] of one Linear, before any packing."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_size: int = GROUP

    @property
    def weight(self) -> Tensor:
        """scale * (code - zero) in the scales' own dtype, which is what other tools compute."""
        columns = self.codes.shape[1]
        scales = self.scales.repeat_interleave(self.group_size, dim=1)[:, :columns]
        zeros = self.zeros.repeat_interleave(self.group_size, dim=1)[:, :columns]
        return scales * (self.codes - zeros).to(scales.dtype)


def coded(shape: tuple[int, int], bits: int, seed: int, *, symmetric: bool, group_size: int = GROUP) -> Coded:
    """Random codes on random grids; zero points leave room for v1 to store them less 1."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape
    groups = -(-columns // group_size)
    codes = torch.randint(0, 2**bits, shape, generator=generator)
    scales = (torch.rand(rows, groups, generator=generator) * 0.1 / 2**bits + 2e-3).half()
    middle = torch.full((rows, groups), 2 ** (bits - 1))
    zeros = middle if symmetric else torch.randint(1, 2**bits, (rows, groups), generator=generator)
    return Coded(codes, scales, zeros, group_size)


def words_of(codes: list[int], bits: int) -> list[int]:
    """A dense stream of codes as one long integer, cut into int32 words."""
    stream = sum(code << (bits * i) for i, code in enumerate(codes))
    words = ((stream >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(codes) * bits // 32)))
    return [word - 2**32 if word >= 2**31 else word for word in words]


def rows_of_words(codes: Tensor, bits: int) -> Tensor:
    """[R, C] -> [R, W] int32."""
    return torch.tensor([words_of(row, bits) for row in codes.tolist()], dtype=torch.int32)


def gptq_fields(it: Coded, bits: int, version: str = "gptq_v2") -> dict[str, Tensor]:
    """A Linear as GPTQ stores it."""
    columns = it.codes.shape[1]
    return {
        "qweight": rows_of_words(it.codes, bits).t(),
        "qzeros": rows_of_words((it.zeros - ONE_BELOW[version]).t(), bits),
        "scales": it.scales.t(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // it.group_size,
    }


def awq_fields(it: Coded) -> dict[str, Tensor]:
    """A Linear as AWQ's gemm layout stores it: nibble i of a word is row (0, 2, 4, 6, 1, 3, 5, 7)[i] of eight."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(values: Tensor) -> Tensor:  # [N, C] -> [C, N / 8]
        lines = [
            [code for eight in range(0, len(line), 8) for code in (line[eight + i] for i in order)]
            for line in values.t().tolist()
        ]
        return torch.tensor([words_of(line, 4) for line in lines], dtype=torch.int32)

    return {"qweight": words(it.codes), "qzeros": words(it.zeros), "scales": it.scales.t()}


def packed_fields(it: Coded, bits: int, *, symmetric: bool) -> dict[str, Tensor]:
    """A Linear as compressed-tensors' pack-quantized stores it."""
    zeros = {} if symmetric else {"weight_zero_point": rows_of_words(it.zeros.t(), bits).t()}
    return {
        "weight_packed": rows_of_words(it.codes, bits),
        "weight_scale": it.scales,
        "weight_shape": torch.tensor(it.codes.shape),
        **zeros,
    }


def linears_of(folder: Path) -> dict[str, tuple[int, int]]:
    """The Linears of the blocks of a saved tiny model, with their shapes."""
    tensors = load_file(folder / "model.safetensors")
    return {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in tensors.items()
        if tensor.ndim == 2 and ".layers." in name
    }


def write_source(
    model: Path,
    out: Path,
    document: dict[str, Any],
    fields: Callable[[str, tuple[int, int]], dict[str, Tensor]],
) -> Path:
    """The model with the fields of every Linear of its blocks in place of their weights."""
    out.mkdir(parents=True)
    for path in model.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "config.json":
            (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": document}))
    tensors = load_file(model / "model.safetensors")
    for name, shape in linears_of(model).items():
        del tensors[f"{name}.weight"]
        for field, tensor in fields(name, shape).items():
            tensors[f"{name}.{field}"] = tensor.contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def scheme(bits: int, **settings: Any) -> dict[str, Any]:
    """The weights or activations of a config group."""
    return {"num_bits": bits, "type": "int", "dynamic": False, **settings}


def compressed_document(
    weights: dict[str, Any], stated: str = "pack-quantized", inputs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """quantization_config of compressed-tensors with one group for every Linear."""
    return {
        "quant_method": "compressed-tensors",
        "format": stated,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head"],
    }
