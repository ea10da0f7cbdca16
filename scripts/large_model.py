"""Peak memory and time of every command on a random model of a large shape, made file by file.

    python scripts/large_model.py --folder DISK/large --shape llama-2-7b --blocks 2,4 --json docs/results/scale-7b.json

Every command runs as a process of its own; its peak is the largest resident set that the system saw (ru_maxrss), pages
of mapped files included. A model is made once for each number of blocks. Where there are two numbers, the difference
gives the seconds of one block, and the time of the whole model follows by arithmetic, named so. The document is written
after every command, the folder removed at the end. Disk for the model and its results: 0.6 GB a block for llama-2-7b,
2.5 GB for llama-3-70b. --dry-run takes none: its files are holes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from quantkit.bench.shapes import MODELS, shape_config
from quantkit.errors import BenchError
from quantkit.models.families import decoder_blocks
from quantkit.storage.tensors import file_header, in_file_order, write_tensors
from scripts.common import chosen, command_line, environment_of, run_script, write_document

SEED = 0
SPREAD = 0.02  # deviation of random weights, as models are initialized
RECIPE, CALIBRATED_RECIPE = "bcq-w4-g128", "bcq-w4-g128-comp"
COMMANDS = (
    *("quantize", "calibrate", "quantize-weighted", "quantize-calibrated"),
    *("perplexity", "divergence", "compare", "search"),
)
SEARCHED = ["--max-bpw", "4", "--bits", "3,4", "--groups", "128", "--set", "measure=2"]  # few choices: memory counts
WRITTEN = {
    "quantize": "plain/*.safetensors",
    "calibrate": "c.safetensors",
    "quantize-weighted": "weighted/*.safetensors",
    "quantize-calibrated": "calibrated/*.safetensors",
}
"""What commands write, beside the model."""


def make_model(shape: str, blocks: int, folder: Path, device: str | None) -> int:
    """Write a random bf16 model, a file for each decoder block and one for the rest; bytes of its weights.

    device: where the random numbers are drawn, which are other numbers on another kind of device. None: the files have
    their sizes and nothing in them, which takes no disk.
    """
    config = shape_config(MODELS[shape])
    config.num_hidden_layers = blocks
    config.dtype = "bfloat16"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    prefixes = [f"{prefix}." for prefix, _ in decoder_blocks(model)]
    names = list(model.state_dict(keep_vars=True).items())
    generator = torch.Generator(device or "cpu").manual_seed(SEED)
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    total = 0
    for number, prefix in enumerate([None, *prefixes]):
        own = {
            name: tensor if device is None else _random(tuple(tensor.shape), generator)
            for name, tensor in names
            if (prefix is None and not name.startswith(tuple(prefixes))) or (prefix and name.startswith(prefix))
        }
        file = f"model-{number:05}-of-{len(prefixes):05}.safetensors"
        (_write_hole if device is None else write_tensors)(folder / file, own, {"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
        total += sum(tensor.numel() * tensor.itemsize for tensor in own.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    os.sync()  # else the disk would still be writing the model while a command waits for it
    return total


def _write_hole(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    header = file_header(in_file_order(tensors), metadata, {})
    with path.open("xb") as file:
        file.write(header)
        file.truncate(len(header) + sum(tensor.numel() * tensor.itemsize for tensor in tensors.values()))


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(shape) == 1:  # of a norm
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape, generator=generator, device=generator.device) * SPREAD).bfloat16().cpu()


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: a vocabulary that every model has, and no file to fetch."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def measure(arguments: list[str], ranks: int) -> dict[str, Any]:
    """Run one quantkit command, of so many processes; its seconds and peak bytes. It ends this script where it fails.

    The resident set is that of the one process, or of the largest of several.
    """
    print("$ quantkit", *arguments, file=sys.stderr, flush=True)
    start = [sys.executable, "-m"]
    if ranks > 1:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    started = time.perf_counter()
    with GpuPeak() as gpu:
        process = subprocess.Popen([*start, "quantkit", *arguments], stdout=sys.stderr)
        _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise BenchError(f"quantkit {arguments[0]} ended with {os.waitstatus_to_exitcode(status)}")
    processor = usage.ru_utime + usage.ru_stime
    row = {"seconds": seconds, "processor_seconds": processor, "peak_bytes": usage.ru_maxrss * 1024}
    if gpu.bytes is not None:
        row["gpu_peak_bytes"] = gpu.bytes
    gpu_text = "" if gpu.bytes is None else f", {gpu.bytes / 1e9:.2f} GB of the first GPU"
    print(
        f"{row['peak_bytes'] / 1e9:.2f} GB{gpu_text}, {seconds:.1f} s, {processor:.1f} s of processors",
        file=sys.stderr,
        flush=True,
    )
    return row


class GpuPeak:
    """The most memory of the first GPU that other processes took while this was entered; None without a GPU."""

    def __init__(self) -> None:
        self.bytes: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> GpuPeak:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            self._before, _ = torch.cuda.mem_get_info(0)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            free, _ = torch.cuda.mem_get_info(0)
            self.bytes = max(self.bytes or 0, self._before - free)


def command_arguments(command: str, model: Path, work: Path, options: argparse.Namespace) -> list[str]:
    """What quantkit is called with; the results stand in ``work``."""
    artifact, plain = work / "c.safetensors", work / "plain"
    of_text = ["--calibration", str(artifact)]
    device = ["--device", options.device]
    hidden = ["--activations", options.activations]
    text = ["--dataset", "pydoc", "--seq-len", str(options.seq_len)]
    few = ["--max-windows", str(options.evaluated)]
    settings = [part for each in options.set or () for part in ("--set", each)]
    return {
        "quantize": ["quantize", str(model), "--recipe", RECIPE, "-o", str(plain), *settings, *device],
        "calibrate": [
            "calibrate",
            str(model),
            *text,
            "--windows",
            str(options.windows),
            "-o",
            str(artifact),
            *device,
            *hidden,
        ],
        "quantize-weighted": [
            *("quantize", str(model), "--recipe", RECIPE, *of_text),
            *("-o", str(work / "weighted"), *settings, *device, *hidden),
        ],
        "quantize-calibrated": [
            *("quantize", str(model), "--recipe", CALIBRATED_RECIPE, *of_text),
            *("-o", str(work / "calibrated"), *settings, *device, *hidden),
        ],
        "perplexity": ["eval", "perplexity", str(plain), *text, *few, *device, *hidden],
        "divergence": ["eval", "divergence", str(model), str(plain), *text, *few, *device, *hidden],
        "compare": ["compare", str(model), str(plain), "--text", "pydoc", *text[2:], *few, *device, *hidden],
        "search": [
            *("search", str(model), *of_text, "-o", str(work / "plan.yaml"), *SEARCHED, *settings),
            *("--set", f"device={options.device}"),
        ],
    }[command]


def written_digest(written: Iterable[Path]) -> str:
    """One sha256 of the weight files, or the artifact, that a command wrote."""
    digest = hashlib.sha256()
    for path in sorted(written):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def run_shape(blocks: int, commands: list[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Make a model of so many blocks, measure the commands on it, remove it; the numbers after every command."""
    work: Path = options.folder / f"{options.shape}-{blocks}"
    rows: dict[str, dict[str, Any]] = {}
    try:
        size = make_model(options.shape, blocks, work / "model", options.device)
        for command in commands:
            rows[command] = measure(command_arguments(command, work / "model", work, options), options.ranks)
            if options.digests and command in WRITTEN:
                rows[command]["sha256"] = written_digest(work.glob(WRITTEN[command]))
            yield {"blocks": blocks, "model_bytes": size, "commands": rows}
    finally:
        shutil.rmtree(work, ignore_errors=True)


def dry_run(options: argparse.Namespace) -> dict[str, Any]:
    """What ``quantize --dry-run`` says of the whole model: bytes of the files, the disk and the memory."""
    work, layers = options.folder / f"{options.shape}-whole", MODELS[options.shape].layers
    try:
        size = make_model(options.shape, layers, work / "model", None)
        command = command_arguments("quantize", work / "model", work, options)
        measure([*command, "--dry-run", "--json", str(work / "said.json")], ranks=1)
        said = json.loads((work / "said.json").read_text(encoding="utf-8"))
        return {"model_bytes": size, **{key: said[key] for key in ("files", "disk", "memory")}}
    finally:
        shutil.rmtree(work, ignore_errors=True)


def by_arithmetic(runs: list[dict[str, Any]], layers: int) -> dict[str, float]:
    """Seconds of the whole model by command: those of the longer run and of the blocks that it lacks."""
    if len(runs) < 2:
        return {}
    short, long = runs[0], runs[-1]
    more = long["blocks"] - short["blocks"]
    return {
        command: row["seconds"]
        + (layers - long["blocks"]) * (row["seconds"] - short["commands"][command]["seconds"]) / more
        for command, row in long["commands"].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the model and the results are made")
    parser.add_argument("--shape", default="llama-2-7b", help=", ".join(MODELS))
    parser.add_argument("--blocks", default="2,4", help="numbers of decoder blocks, rising, separated by commas")
    parser.add_argument("--commands", default=",".join(COMMANDS[:4]), help=", ".join(COMMANDS))
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--evaluated", type=int, default=4, help="windows of eval")
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", help="recipe setting, such as rounds=1")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--activations", default="fp32", help="what hidden states are stored in: fp32 or bf16")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share calibrate and quantize")
    parser.add_argument("--digests", action="store_true", help="also a sha256 of what calibrate and quantize write")
    parser.add_argument("--dry-run", action="store_true", help="only what quantize --dry-run says of the whole model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    (shape,) = chosen("--shape", options.shape, MODELS)
    commands = chosen("--commands", options.commands, COMMANDS)
    document: dict[str, Any] = {
        "command": command_line(),
        "environment": environment_of(options.device, "safetensors"),
        "shape": shape,
        "windows": options.windows,
        "seq_len": options.seq_len,
        "settings": options.set or [],
        "activations": options.activations,
        "ranks": options.ranks,
        "runs": [],
    }
    if options.dry_run:
        document["dry_run"] = dry_run(options)
        write_document(options.json, document)
        return
    done: list[dict[str, Any]] = []
    for blocks in map(int, options.blocks.split(",")):
        for run in run_shape(blocks, commands, options):
            document["runs"] = [*done, run]
            write_document(options.json, document)
        done.append(run)
    layers = MODELS[shape].layers
    document["seconds_by_arithmetic"] = by_arithmetic(done, layers)
    write_document(options.json, document)
    for command, seconds in document["seconds_by_arithmetic"].items():
        print(f"{shape}, {layers} blocks, {command}: {seconds:.0f} s by arithmetic")


if __name__ == "__main__":
    run_script(main)
