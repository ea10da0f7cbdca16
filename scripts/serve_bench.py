"""vLLM's decoding and first tokens for a model's shape: fp16, what vLLM itself quantizes, and quantkit's checkpoints.

python scripts/serve_bench.py --model llama-3-8b
    --settings fp16,fp8,machete,marlin,bcq-w4-g128,bcq-w3-g128,bcq-w2-g128,flatten-o1,bipolar-w4a8
    --batches 1,4,8,16,32,64,128 --first 1x128,1x1024,16x1024 --tensor-parallel 1 --json serving.json

Weights are made up (vLLM's load format "dummy"), so a folder with config.json is all that a setting needs. Each setting
runs in a process of its own. A step's time is what 96 more tokens take, over 96; every time is the least of --repeats.
--check-graphs also runs each setting without CUDA graphs and compares the probabilities of its tokens. Settings that
are in the JSON file already are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from quantkit.bench.flatten_layers import flatten_spec
from quantkit.bench.methods import method_spec
from quantkit.bench.shapes import ModelShape, model_shape, shape_config
from quantkit.checkpoint.config import CheckpointConfig, StoredLayer, config_to_json
from quantkit.errors import BenchError
from quantkit.jobs.serve import VLLM_DISTRIBUTIONS, serving_problem
from quantkit.models.families import block_linears, linear_shape
from scripts.common import command_line, markdown_table, read_document, run_script, write_document

PROMPT, WARM_UP_TOKENS, CHECKED_TOKENS = 32, 9, 8
DEFAULT = "fp16,fp8,machete,marlin,bcq-w4-g128,bcq-w3-g128,bcq-w2-g128,flatten-o1,bipolar-w4a8"
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
    "marlin": Peer(W4A16, environment={"VLLM_DISABLED_KERNELS": "MacheteLinearKernel"}),
}


@dataclass(frozen=True)
class Work:
    """What one process measures. firsts: (sequences, tokens of each) of first tokens."""

    folder: str
    options: Mapping[str, Any]
    batches: tuple[int, ...]
    firsts: tuple[tuple[int, int], ...]
    steps: int
    repeats: int


def main() -> None:
    options = _arguments()
    if options.child is not None:
        _measure(Work(**json.loads(options.child.read_text())), options.child)
        return
    names = options.settings.split(",")
    specs = {name: None if name in PEERS else _spec_maker(options.model, name) for name in names}
    problem = serving_problem()
    if problem is not None and any(specs.values()):
        raise BenchError(problem)
    shape = model_shape(options.model)
    shape = shape if options.layers is None else replace(shape, layers=options.layers)
    document = read_document(options.json, {"command": command_line(), "environment": _environment(), "results": {}})
    for name in names:
        key = f"{options.model} {name} tp{options.tensor_parallel}"
        if key not in document["results"]:
            document["results"][key] = _run(options, shape, name, specs[name])
            write_document(options.json, document)
        _print(key, document["results"][key])
    print(_table(document["results"]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--settings", default=DEFAULT)
    parser.add_argument("--batches", default="1,4,8,16,32,64,128")
    parser.add_argument("--first", default="1x128,1x1024,16x1024")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--memory", type=float, default=0.6, help="share of the GPU's memory that vLLM may take")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--layers", type=int, help="of the model, fewer than it has: for trying this out")
    parser.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    parser.add_argument("--check-graphs", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _spec_maker(model: str, name: str) -> Callable[[int, int], Any]:
    """(number of a Linear, its K) -> its spec. Raises BenchError for an unknown name."""
    if name in ("smoothquant", "flatten-o1", "flatten-o3"):
        return lambda index, in_features: flatten_spec(model, name, index, in_features)
    spec = method_spec(name)
    return lambda _index, _in_features: spec


def _environment() -> dict[str, Any]:
    versions = {}
    for package in ("torch", "transformers", "quantkit", *VLLM_DISTRIBUTIONS):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"gpus": gpus, "python": sys.version.split()[0], "packages": versions}


def _run(options: argparse.Namespace, shape: ModelShape, name: str, spec: Callable[[int, int], Any] | None) -> Any:
    """The measurements of one setting; {"error": ...} where its process fails, as that says something, too."""
    peer, batches = PEERS.get(name, Peer()), tuple(int(count) for count in options.batches.split(","))
    firsts = tuple((int(n), int(length)) for n, _, length in (item.partition("x") for item in options.first.split(",")))
    with tempfile.TemporaryDirectory(prefix="serve-bench-") as root:
        folder = Path(root) / "model"
        _write_folder(folder, shape, peer.section, spec, options.dtype)
        engine: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": options.dtype,
            "skip_tokenizer_init": True,
            "max_model_len": 2048,
            "max_num_seqs": max(batches),
            "max_num_batched_tokens": max(2048, *(n * length for n, length in firsts)),
            "gpu_memory_utilization": options.memory,
            "enable_prefix_caching": False,
            "tensor_parallel_size": options.tensor_parallel,
            **peer.options,
        }
        compilation = {"cudagraph_capture_sizes": sorted(batches)}
        engine |= {"enforce_eager": True} if options.eager else {"compilation_config": compilation}
        work = Work(str(folder), engine, batches, firsts, options.steps, options.repeats)
        result = _child(work, peer, Path(root) / "graphs.json")
        if options.check_graphs and "error" not in result:
            engine["compilation_config"] = {**compilation, "cudagraph_mode": "NONE"}
            plain = _child(replace(work, options=engine, batches=(), firsts=()), peer, Path(root) / "plain.json")
            result["same_without_graphs"] = plain.get("checked") == result["checked"]
        return result


def _write_folder(
    folder: Path,
    shape: ModelShape,
    section: Mapping[str, Any] | None,
    spec: Callable[[int, int], Any] | None,
    dtype: str,
) -> None:
    from transformers import AutoModelForCausalLM

    config = shape_config(shape)
    config.num_hidden_layers, config.dtype = shape.layers, dtype
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    if spec is not None:
        linears = {name: linear_shape(module) for name, module in block_linears(model).items()}
        layers = {name: StoredLayer(spec(i, size[1]), size) for i, (name, size) in enumerate(linears.items())}
        meta = {"recipe": "made up for a benchmark", "calibration": None}
        section = config_to_json(CheckpointConfig(layers, ("lm_head",), meta))
    if section is not None:
        config.quantization_config = dict(section)
    config.save_pretrained(folder)


def _child(work: Work, peer: Peer, path: Path) -> Any:
    path.write_text(json.dumps(asdict(work)))
    alone = work.options["tensor_parallel_size"] == 1
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The engine in its own process of one GPU: without the time of messages. Workers take functions to run.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if alone else "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        **peer.environment,
    }
    command = [sys.executable, __file__, "--child", str(path)]
    done = subprocess.run(command, env={**os.environ, **variables}, stdout=sys.stderr, check=False)
    answer = json.loads(path.read_text())
    return {"error": f"exit status {done.returncode}"} if done.returncode or "ms_per_step" not in answer else answer


def _measure(work: Work, out: Path) -> None:
    """In a process of its own: time the engine, and write what was found in the place of the work."""
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    engine = LLM(work.folder, **work.options)
    ready = time.perf_counter() - began

    def prompts(count: int, length: int) -> list[Any]:
        return [{"prompt_token_ids": [5 + (7 * n + i) % 1000 for i in range(length)]} for n in range(count)]

    def settings(tokens: int, **more: Any) -> Any:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)

    def seconds(count: int, length: int, tokens: int) -> float:
        start = time.perf_counter()
        engine.generate(prompts(count, length), settings(tokens), use_tqdm=False)
        return time.perf_counter() - start

    def least(*call: int) -> float:
        return min(seconds(*call) for _ in range(work.repeats))

    steps, firsts = {}, {}
    for batch in work.batches:
        seconds(batch, PROMPT, WARM_UP_TOKENS)
        more, few = (least(batch, PROMPT, WARM_UP_TOKENS + extra) for extra in (work.steps, 0))
        steps[str(batch)] = 1e3 * (more - few) / work.steps
    for count, length in work.firsts:
        seconds(count, length, 1)
        firsts[f"{count}x{length}"] = 1e3 * least(count, length, 1)
    (answer,) = engine.generate(prompts(1, PROMPT), settings(CHECKED_TOKENS, logprobs=1), use_tqdm=False)
    checked = [{str(token): entry.logprob for token, entry in row.items()} for row in answer.outputs[0].logprobs or ()]
    result = {
        "ms_per_step": steps,
        "first_token_ms": firsts,
        "start_seconds": ready,
        "model_bytes": engine.collective_rpc(_model_bytes),
        "checked": checked,
    }
    out.write_text(json.dumps(result))


def _model_bytes(worker: Any) -> int:
    """Bytes that the weights of one worker take."""
    return sum(tensor.nbytes for tensor in worker.get_model().parameters())


def _print(key: str, result: Any) -> None:
    print(key, json.dumps({name: value for name, value in result.items() if name != "checked"}), flush=True)


def _table(results: Mapping[str, Any]) -> str:
    """ms per step by batch, ms to the first token, GB of weights per GPU."""
    good = {key: result for key, result in results.items() if "error" not in result}
    batches = list(dict.fromkeys(batch for result in good.values() for batch in result["ms_per_step"]))
    firsts = list(dict.fromkeys(first for result in good.values() for first in result["first_token_ms"]))
    rows = []
    for key, result in good.items():
        times = [result["ms_per_step"].get(batch) for batch in batches]
        times += [result["first_token_ms"].get(first) for first in firsts]
        gigabytes = max(result["model_bytes"]) / 1e9
        rows.append([key, *("-" if ms is None else f"{ms:.2f}" for ms in times), f"{gigabytes:.2f}"])
    columns = ["setting", *(f"batch {batch}" for batch in batches), *(f"first of {first}" for first in firsts), "GB"]
    return markdown_table(columns, rows, left=1)


if __name__ == "__main__":
    run_script(main)
