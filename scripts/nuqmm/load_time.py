"""How long a checkpoint of a model's shape takes to load onto a GPU, kernels' order included, beyond reading its bytes.

python scripts/nuqmm/load_time.py [--shape llama-2-7b] [--method bcq-w4-g128] [--json FILE]

The weights are random. Files are in the page cache both times, so the difference is what loading itself costs.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from quantkit.bench.decode import shaped_model
from quantkit.bench.methods import method_spec
from quantkit.bench.report import environment
from quantkit.bench.shapes import model_shape
from quantkit.checkpoint.config import CheckpointConfig, StoredLayer, config_to_json
from quantkit.cli.common import check_json_path
from quantkit.integrations.transformers import attach_config, load_checkpoint
from quantkit.nn.quantized_linear import QuantizedLinear
from scripts.common import command_line, needed_gpu, run_script, write_document

_READ_BYTES = 1 << 24


def write_model(shape: str, method: str, folder: Path, device: torch.device) -> int:
    """Write a random model of the shape; returns the bytes of its weight files."""
    model: Any = shaped_model(model_shape(shape), device, method_spec(method))
    packed = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    layers = {name: StoredLayer(m.spec, m.shape) for name, m in packed.items()}
    attach_config(model, config_to_json(CheckpointConfig(layers, ("lm_head",), {})))
    model.save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def read_seconds(folder: Path) -> float:
    """Time of reading every weight file once."""
    began = time.perf_counter()
    room = bytearray(_READ_BYTES)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(room):
                pass
    return time.perf_counter() - began


def load_seconds(folder: Path, device: torch.device) -> float:
    """Time until the model of the folder is on the device, ready to run."""
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    load_checkpoint(str(folder), device=str(device), dtype=None)
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def measure(shape: str, method: str, device: torch.device) -> dict[str, Any]:
    """Reading and loading times of one shape. Raises BenchError for an unknown shape or method."""
    with tempfile.TemporaryDirectory() as folder:
        size = write_model(shape, method, Path(folder), device)
        gc.collect()
        torch.cuda.empty_cache()
        read_seconds(Path(folder))
        read, load = read_seconds(Path(folder)), load_seconds(Path(folder), device)
    return {
        "shape": shape,
        "method": method,
        "bytes": size,
        "read_seconds": round(read, 2),
        "load_seconds": round(load, 2),
        "beyond_reading_seconds": round(load - read, 2),
    }


def main() -> None:
    """Measure, print, and write the JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-2-7b")
    parser.add_argument("--method", default="bcq-w4-g128")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    check_json_path(options.json)
    device = needed_gpu()
    result = measure(options.shape, options.method, device)
    document = {"command": command_line(), "environment": environment(device), "results": [result]}
    write_document(options.json, document)
    print(*(f"{key} {value}" for key, value in result.items()), sep="\n")


if __name__ == "__main__":
    run_script(main)
