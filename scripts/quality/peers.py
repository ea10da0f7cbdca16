"""Perplexity of other toolkits' quantizers, measured by quantkit beside its own: only the quantizer differs.

pip install hqq gptqmodel
python scripts/quality/peers.py MODEL --text wiki.test.jsonl --calibration c.safetensors
    --peers hqq:4:128,gptq:4:128,gptq:3:128 --seq-len 2048 --max-windows 8 --json docs/results/quality-peers.json

A peer is NAME:BITS:GROUP. Its weights are dequantized into a copy of the model, which ``quantkit eval perplexity`` then
reads. Calibration windows are those of the quantkit artifact, so that every method has seen the same tokens. Rows
already in the JSON file are kept. GPTQModel needs GPTQMODEL_CPU_WORKERS=2 in the environment on machines of few cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.artifact import load_calibration
from quantkit.errors import EvaluationError
from quantkit.models.families import block_linears, linear_weight
from quantkit.models.loading import load_model, resolve_model
from scripts.common import (
    chosen,
    environment_of,
    markdown_table,
    read_document,
    run_quantkit,
    run_script,
    write_document,
)


@dataclass(frozen=True)
class Setting:
    """One way to call a peer."""

    peer: str
    bits: int
    group_size: int

    @property
    def label(self) -> str:
        """NAME:BITS:GROUP."""
        return f"{self.peer}:{self.bits}:{self.group_size}"


@dataclass(frozen=True)
class Peer:
    """package: on PyPI. quantize: (model folder, windows [n, seq_len], setting, device) -> weights [N, K] by layer.

    group_bits: (bits) -> bits stored per group besides the codes. how: the call, for the record.
    """

    package: str
    quantize: Callable[[str, Tensor, Setting, str], Mapping[str, Tensor]]
    group_bits: Callable[[int], int]
    how: str


def hqq(model: str, _windows: Tensor, setting: Setting, device: str) -> dict[str, Tensor]:
    """HQQ needs no calibration text."""
    from hqq.core.quantize import Quantizer

    loaded, _ = load_model(model, dtype=torch.float32, device=device)
    weights = {}
    for name, module in block_linears(loaded).items():
        codes, meta = Quantizer.quantize(
            linear_weight(module).detach(),
            nbits=setting.bits,
            group_size=setting.group_size,
            axis=1,
            compute_dtype=torch.float16,
            device=device,
        )
        weights[name] = Quantizer.dequantize(codes, meta).float()
    return weights


def gptq(model: str, windows: Tensor, setting: Setting, device: str) -> dict[str, Tensor]:
    """GPTQModel with its defaults (group-aware activation order), but asymmetric grids; read back from its checkpoint.

    The layers in memory right after quantizing hold zeros in the file's convention, one below what dequantizing takes.
    """
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=setting.bits, group_size=setting.group_size, sym=False, offload_to_disk=False)
    peer = GPTQModel.load(resolve_model(model).location, config, dtype=torch.float32, device=device)
    rows = [{"input_ids": row[None].long(), "attention_mask": torch.ones_like(row[None])} for row in windows]
    peer.quantize(rows, batch_size=1)
    with tempfile.TemporaryDirectory() as folder:
        peer.save(folder)
        stored = GPTQModel.load(folder, device=device, dtype=torch.float16, backend=BACKEND.GPTQ_TORCH)
        found = {name: module for name, module in stored.model.named_modules() if hasattr(module, "dequantize_weight")}
        return {name: module.dequantize_weight().detach().t().float() for name, module in found.items()}


PEERS = {
    "hqq": Peer("hqq", hqq, lambda bits: 32, "Quantizer.quantize(weight, nbits, group_size, axis=1)"),
    "gptq": Peer("gptqmodel", gptq, lambda bits: 16 + bits, "QuantizeConfig(bits, group_size, sym=False)"),
}


def check(settings: list[Setting]) -> None:
    """Raise QuantkitError where a peer is unknown or not installed."""
    for setting in settings:
        [name] = chosen("--peers", setting.peer, PEERS)
        package = PEERS[name].package
        if importlib.util.find_spec(package) is None:
            raise EvaluationError(f"--peers {name}: {package} is not installed: pip install {package}")


def bits_per_weight(shapes: Mapping[str, torch.Size], setting: Setting) -> float:
    """Codes, scales and zeros over weights; the last group of a row may be narrower."""
    extra = PEERS[setting.peer].group_bits(setting.bits)
    bits = sum(
        rows * (columns * setting.bits + -(-columns // setting.group_size) * extra) for rows, columns in shapes.values()
    )
    return bits / sum(shape.numel() for shape in shapes.values())


def replaced(model: str, weights: Mapping[str, Tensor], folder: Path) -> dict[str, torch.Size]:
    """Write the model with these weights instead of its own, in fp32; the shapes of the layers."""
    loaded, tokenizer = load_model(model, dtype=torch.float32)
    layers = block_linears(loaded)
    absent = layers.keys() ^ weights.keys()
    if absent:
        raise EvaluationError(f"{min(absent)}: quantized by one of peer and quantkit only; the two cannot be compared")
    for name, module in layers.items():
        target = linear_weight(module)
        target.data.copy_(weights[name].to(target.device))
    loaded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {name: linear_weight(module).shape for name, module in layers.items()}


def measure(options: argparse.Namespace, setting: Setting, work: Path) -> dict[str, Any]:
    """One row: quantize by the peer, then evaluate by quantkit."""
    peer, folder = PEERS[setting.peer], work / setting.label.replace(":", "-")
    windows = load_calibration(options.calibration).windows
    started = time.perf_counter()
    weights = peer.quantize(options.model, windows, setting, options.device)
    seconds = time.perf_counter() - started
    shapes = replaced(options.model, weights, folder)
    text = ["--text", options.text, "--seq-len", str(options.seq_len), "--max-windows", str(options.max_windows)]
    evaluate = ["eval", "perplexity", str(folder), *text, "--device", options.device, "--json", str(work / "e.json")]
    run_quantkit(*evaluate)
    evaluation = json.loads((work / "e.json").read_text())
    del evaluation["model"]  # a folder of this machine
    return {
        "model": options.name,
        "peer": setting.label,
        "call": peer.how,
        "bits_per_weight": bits_per_weight(shapes, setting),
        "seconds": seconds,
        "evaluation": evaluation,
        "environment": environment_of(options.device, peer.package),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = []
    for row in rows:
        value = f"{row['evaluation']['perplexity']:.2f} ± {row['evaluation']['stderr']:.2f}"
        lines.append([row["model"], row["peer"], f"{row['bits_per_weight']:.2f}", value, f"{row['seconds']:.0f}"])
    return markdown_table(("model", "peer", "bits/weight", "perplexity", "quantize s"), lines, left=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder")
    parser.add_argument("--name", help="how the model is called in the results; by default as given")
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration", type=Path, required=True, help="artifact of quantkit calibrate")
    parser.add_argument("--peers", required=True, help="comma-separated NAME:BITS:GROUP")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--max-windows", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    options.name = options.name or options.model
    parts = [entry.split(":") for entry in options.peers.split(",")]
    settings = [Setting(name, int(bits), int(group)) for name, bits, group in parts]
    check(settings)
    document = read_document(options.json, {"rows": []})
    done = {(row["model"], row["peer"]) for row in document["rows"]}
    with tempfile.TemporaryDirectory() as folder:
        for setting in settings:
            if (options.name, setting.label) not in done:
                document["rows"].append(measure(options, setting, Path(folder)))
                write_document(options.json, document)
    print(markdown(document["rows"]))


if __name__ == "__main__":
    run_script(main)
