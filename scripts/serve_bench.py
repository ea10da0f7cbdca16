"""vLLM's decoding and first tokens for a model's shape: fp16, what vLLM itself quantizes, and quantkit's checkpoints.

python scripts/serve_bench.py --model llama-3-8b
    --settings fp16,fp8,machete,marlin,humming,bcq-w4-g128,bcq-w4-g128-head6,bcq-w3-g128,bcq-w2-g128,flatten-o1
    --batches 1,4,8,16,32,64,128 --first 1x128,1x1024,16x1024 --tensor-parallel 1 --json serving.json

Weights are made up (vLLM's load format "dummy"), so a folder with config.json is all that a setting needs. Those of rtn
are in equal steps, which the kernels for batches take for what they are, and stand in files. Each setting
runs in a process of its own (scripts/serve_measure.py). A step's time is what 96 more tokens take, over 96; every time
is the least of --repeats. Energy is NVML's counter of all GPUs over the same calls, their prompts included.
A setting's name may have -rotated behind it, before -head6: the inputs of all Linears are rotated as the model runs, or
-online: those of down_proj, as the setting ``rotate: online`` of recipes does.
--tensor-parallel N with --profile gives the share of communication in the time of all kernels. --check-graphs also runs
each setting without CUDA graphs and compares the probabilities of its tokens. --no-compile starts in half the time:
CUDA graphs of whole steps, without torch.compile. Settings that are in the JSON file already are kept.

Several of these commands may share GPUs by one --lock FILE: each setting waits there for those before it, to draw its
weights, and once its process has imported vLLM, which takes as long as a small model's start. --limit ends a setting
that hangs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quantkit.bench.flatten_layers import flatten_spec
from quantkit.bench.methods import has_equal_steps, method_spec, random_tensors, with_head
from quantkit.bench.report import commit
from quantkit.bench.shapes import ModelShape, model_shape, shape_config
from quantkit.checkpoint.config import CheckpointConfig, StoredLayer, config_from_json, config_to_json
from quantkit.errors import BenchError
from quantkit.jobs.serve import VLLM_DISTRIBUTIONS, serving_problem
from quantkit.models.families import block_linears, linear_shape
from quantkit.models.structure import output_head, untie_head
from scripts.common import command_line, markdown_table, read_document, replace_section, run_script, write_document
from scripts.serve_measure import Work
from scripts.serve_process import end_by_signal, holding, run_work

DEFAULT = "fp16,fp8,machete,marlin,humming,bcq-w4-g128,bcq-w3-g128,bcq-w2-g128,flatten-o1,bipolar-w4a8"
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 128,
                "dynamic": False,
                "actorder": None,
            },
        }
    },
}

_ROTATED = {"-rotated": re.compile(""), "-online": re.compile(r"\.down_proj$")}
NO_FIRSTS = "none"
WEIGHT_SCALE = 0.02  # of made-up weights in floating point

HUMMING = {"quant_method": "humming", "b_dtype": "uint4", "weight_scale_group_size": 128}


@dataclass(frozen=True)
class Peer:
    """A setting of vLLM's own. section: its quantization_config. options: of LLM(...). environment: variables."""

    section: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


PEERS: dict[str, Peer] = {
    "fp16": Peer(),
    "fp8": Peer(options={"quantization": "fp8"}),
    "machete": Peer(W4A16),
    "humming": Peer(HUMMING),
    "marlin": Peer(W4A16, environment={"VLLM_DISABLED_KERNELS": "MacheteLinearKernel"}),
}


def main() -> None:
    end_by_signal()
    options = _arguments()
    names = options.settings.split(",")
    specs = {name: None if name in PEERS else _spec_maker(options.model, name) for name in names}
    problem = serving_problem()
    if problem is not None and any(specs.values()):
        raise BenchError(problem)
    shape = model_shape(options.model)
    shape = shape if options.layers is None else replace(shape, layers=options.layers)
    document = read_document(options.json, {"command": command_line(), "environment": environment(), "results": {}})
    for name in names:
        key = setting_key(options.model, name, options.tensor_parallel, options.max_num_seqs)
        if key not in document["results"]:
            document["results"][key] = _run(options, shape, name, specs[name])
            write_document(options.json, document)
        _print(key, document["results"][key])
    text = tables(document["results"])
    print(text)
    replace_section(options.document, "serve-bench", text)


def setting_key(model: str, name: str, gpus: int, sequences: int | None = None) -> str:
    """Under which a setting's measurements stand. sequences: max_num_seqs, where it was given."""
    return f"{model} {name} tp{gpus}" + (f" seqs{sequences}" if sequences is not None else "")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--settings", default=DEFAULT)
    parser.add_argument("--batches", default="1,4,8,16,32,64,128")
    parser.add_argument("--first", default="1x128,1x1024,16x1024", help="prompts x tokens of each; none: not measured")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--memory", type=float, default=0.6, help="share of the GPU's memory that vLLM may take")
    parser.add_argument(
        "--max-num-seqs", type=int, help="of vLLM, the largest of --batches by default; up to 4: the order for latency"
    )
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--layers", type=int, help="of the model, fewer than it has: for trying this out")
    parser.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    parser.add_argument("--check-graphs", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-compile", action="store_true", help="CUDA graphs without torch.compile: starts sooner")
    parser.add_argument(
        "--profile", action="store_true", help="also the share of communication, and the longest kernels"
    )
    parser.add_argument("--lock", type=Path, help="file that is held while a setting has the GPUs")
    parser.add_argument("--limit", type=float, help="seconds after which a setting that has the GPUs is given up")
    parser.add_argument("--document", type=Path, help="Markdown file whose section serve-bench gets the tables")
    return parser.parse_args()


def _spec_maker(model: str, name: str) -> Callable[[int, str, int], Any]:
    """(number of a Linear, its name, its K) -> its spec. Raises BenchError for an unknown name."""
    method, rotated = _rotation(with_head(name)[0])
    flattened = method in ("smoothquant", "flatten-o1", "flatten-o3")
    same = None if flattened else method_spec(method)

    def spec(index: int, linear: str, in_features: int) -> Any:
        own = flatten_spec(model, method, index, in_features) if same is None else same
        return replace(own, rotate_inputs=True) if rotated is not None and rotated.search(linear) else own

    return spec


def _rotation(method: str) -> tuple[str, re.Pattern[str] | None]:
    """A method without its suffix, and which Linears' names it rotates the inputs of."""
    for suffix, names in _ROTATED.items():
        if method.endswith(suffix):
            return method.removesuffix(suffix), names
    return method, None


def environment() -> dict[str, Any]:
    """The GPUs, the commit and the versions that times depend on."""
    versions = {}
    for package in ("torch", "transformers", "quantkit", *VLLM_DISTRIBUTIONS):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"gpus": gpus, "python": sys.version.split()[0], "commit": commit(), "packages": versions}


def _run(options: argparse.Namespace, shape: ModelShape, name: str, spec: Callable[[int, str, int], Any] | None) -> Any:
    """The measurements of one setting; {"error": ...} where its process fails, as that says something, too."""
    peer, batches, firsts = PEERS.get(name, Peer()), _batches(options.batches), _firsts(options.first)
    run = partial(run_work, environment=peer.environment, lock=options.lock, limit=options.limit)
    with tempfile.TemporaryDirectory(prefix="serve-bench-") as root:
        folder = Path(root) / "model"
        model = _write_folder(folder, shape, peer.section, spec, with_head(name)[1], options.dtype)
        in_files = spec is not None and has_equal_steps(name)
        if in_files:
            with holding(options.lock):  # they are drawn on a GPU
                _write_weights(folder, model, options.dtype)
        engine: dict[str, Any] = {
            "load_format": "auto" if in_files else "dummy",
            "dtype": options.dtype,
            "skip_tokenizer_init": True,
            "max_model_len": 2048,
            "max_num_seqs": options.max_num_seqs or max(batches),
            "max_num_batched_tokens": max([2048, *(n * length for n, length in firsts)]),
            "gpu_memory_utilization": options.memory,
            "enable_prefix_caching": False,
            "tensor_parallel_size": options.tensor_parallel,
            **peer.options,
        }
        compilation: dict[str, Any] = {"cudagraph_capture_sizes": sorted(batches)}
        if options.no_compile:
            compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        engine |= {"enforce_eager": True} if options.eager else {"compilation_config": compilation}
        work = Work(str(folder), engine, batches, firsts, options.steps, options.repeats, options.profile)
        result = run(work, Path(root) / "graphs.json")
        if options.check_graphs and "error" not in result:
            engine["compilation_config"] = {**compilation, "cudagraph_mode": "NONE"}
            unhurried = replace(work, options=engine, batches=(), firsts=(), profile=False)
            plain = run(unhurried, Path(root) / "plain.json")
            result["same_without_graphs"] = plain.get("checked") == result["checked"]
        return result


def _batches(text: str) -> tuple[int, ...]:
    return tuple(int(count) for count in text.split(","))


def _firsts(text: str) -> tuple[tuple[int, int], ...]:
    """16x1024,1x128 -> (sequences, tokens of each)."""
    items = [] if text == NO_FIRSTS else [item.partition("x") for item in text.split(",")]
    return tuple((int(count), int(length)) for count, _, length in items)


def _write_folder(
    folder: Path,
    shape: ModelShape,
    section: Mapping[str, Any] | None,
    spec: Callable[[int, str, int], Any] | None,
    head: Any,
    dtype: str,
) -> Any:
    """config.json of a model, which is returned without its weights."""
    from transformers import AutoModelForCausalLM

    config = shape_config(shape)
    config.num_hidden_layers, config.dtype = shape.layers, dtype
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    if spec is not None:
        linears = {name: linear_shape(module) for name, module in block_linears(model).items()}
        layers = {name: StoredLayer(spec(i, name, size[1]), size) for i, (name, size) in enumerate(linears.items())}
        found = output_head(model)
        if head is not None and found is not None:
            untie_head(model)
            layers[found[0]] = StoredLayer(head, linear_shape(found[1]))
        meta = {"recipe": "made up for a benchmark", "calibration": None}
        section = config_to_json(CheckpointConfig(layers, () if head else ("lm_head",), meta))
    if section is not None:
        config.quantization_config = dict(section)
    config.save_pretrained(folder)
    return model


def _write_weights(folder: Path, model: Any, dtype: str) -> None:
    """Files of made-up weights, those of quantized Linears in equal steps; a file a block."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = config_from_json(model.config.quantization_config).layers
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        block = next((part for part in name.split(".") if part.isdigit()), "rest")
        layer, own = name.removesuffix(".weight"), files.setdefault(f"model-{block}.safetensors", {})
        if layer in layers:
            stored = layers[layer]
            made = random_tensors(stored.spec, stored.shape, device, equal_steps=True)
            own.update({f"{layer}.{field}": tensor.cpu() for field, tensor in made.items()})
        else:
            values = torch.randn(parameter.shape, dtype=getattr(torch, dtype), device=device)
            own[name] = (values * WEIGHT_SCALE).cpu()
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _print(key: str, result: Any) -> None:
    print(key, json.dumps({name: value for name, value in result.items() if name != "checked"}), flush=True)


def tables(results: Mapping[str, Any]) -> str:
    """ms per step by batch; then first tokens, weights and energy, and communication where it was measured."""
    good = {key: result for key, result in results.items() if "error" not in result}
    batches = sorted({batch for result in good.values() for batch in result["ms_per_step"]}, key=int)
    steps = [[key, *(_cell(result["ms_per_step"].get(batch)) for batch in batches)] for key, result in good.items()]
    found = [markdown_table(["ms per step", *(f"batch {batch}" for batch in batches)], steps, left=1)]
    firsts = list(dict.fromkeys(first for result in good.values() for first in result["first_token_ms"]))
    names = ["setting", *(f"first of {first}" for first in firsts), "GB per GPU", "mJ per token at batch 1"]
    rows = []
    for key, result in good.items():
        times = [_cell(result["first_token_ms"].get(first)) for first in firsts]
        energy, shares = result.get("millijoules_per_token", {}).get("1"), result.get("communication", {})
        communication = "-" if not shares else ", ".join(f"{share:.0%} at {batch}" for batch, share in shares.items())
        rows.append([key, *times, _cell(max(result["model_bytes"]) / 1e9), _cell(energy), communication])
    found.append(markdown_table([*names, "communication"], rows, left=1))
    failed = [f"{key}: {result['error']}" for key, result in results.items() if "error" in result]
    return "\n\n".join([*found, *failed])


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    run_script(main)
