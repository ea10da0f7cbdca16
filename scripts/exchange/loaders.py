"""Perplexity of checkpoints here and, exported, through another tool's loader; of sources there and, converted, here.

pip install compressed-tensors gptqmodel optimum
python scripts/exchange/loaders.py --text wiki.test.jsonl --seq-len 512 --max-windows 4
    --json docs/results/exchange-loaders.json export:gptq:rtn4=FOLDER convert:NAME=SOURCE

``export:FORMAT:NAME=FOLDER`` exports a quantkit checkpoint; ``convert:NAME=SOURCE`` converts a source. Both are read by
transformers with the package that the format belongs to, in fp32 on the CPU. Rows already in the JSON file are kept.
``--draws N`` also scores both N times with the embeddings disturbed, for models with INT8 activations.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit.data.corpora import Corpus, load_text
from quantkit.errors import EvaluationError
from quantkit.evaluation.perplexity import perplexity
from quantkit.exchange.gguf_writer import FILE
from quantkit.exchange.source import read_config
from quantkit.jobs.convert import convert_model
from quantkit.jobs.export import export_model
from quantkit.models.loading import load_model
from quantkit.nn.quantized_linear import QuantizedLinear
from scripts.common import (
    environment_of,
    markdown_table,
    read_document,
    run_script,
    write_document,
)
from scripts.exchange.disturbance import DISTURBANCE, disturbed

_LAYERS_OF_THEIR_OWN = ("gptq", "awq")  # whose loaders keep weights quantized
_PACKAGES = {"compressed-tensors": ("compressed-tensors",), "gptq": ("gptqmodel", "optimum"), "awq": ("gptqmodel",)}


def load_elsewhere(path: Path) -> tuple[Any, Any, str]:
    """(model, tokenizer, format) of a source, by transformers."""
    options: dict[str, Any] = {"dtype": torch.float32}
    place, method = path, "gguf"
    if path.suffix == ".gguf":
        place, options["gguf_file"] = path.parent, path.name
    else:
        method = read_config(path)["quantization_config"]["quant_method"]
    if method == "compressed-tensors":
        from transformers import CompressedTensorsConfig

        # Without it, transformers gives packed zero points the wrong shape.
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    if method == "gptq":
        from transformers import GPTQConfig

        bits = read_config(path)["quantization_config"]["bits"]
        options["quantization_config"] = GPTQConfig(bits=bits, backend="torch")
    model = AutoModelForCausalLM.from_pretrained(place, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(place, **{k: v for k, v in options.items() if k == "gguf_file"})
    return model, tokenizer, method


def score(model: Any, tokenizer: Any, corpus: Corpus, options: argparse.Namespace) -> dict[str, Any]:
    """Perplexity with what it was measured on."""
    found = perplexity(model, tokenizer, corpus, seq_len=options.seq_len, max_windows=options.max_windows)
    return {
        "perplexity": found.perplexity,
        "tokens": found.tokens,
        "text": found.text,
        "text_sha256": found.text_sha256,
        "seq_len": found.seq_len,
        "recipe": found.recipe,
    }


def draws(model: Any, tokenizer: Any, corpus: Corpus, options: argparse.Namespace) -> list[float]:
    """Perplexities with the embeddings disturbed at random, a seed each."""
    found = []
    for seed in range(options.draws):
        with disturbed(model, seed):
            found.append(score(model, tokenizer, corpus, options)["perplexity"])
    return found


def same_weights(here: Any, there: Any, method: str) -> int:
    """The layers whose weights are the other loader's to the bit, both in the type in which it computes them."""
    dtype = torch.float32 if method == "gguf" else torch.float16
    same = 0
    for name, module in here.named_modules():
        if isinstance(module, QuantizedLinear):
            other = there.get_submodule(name)
            weight = other.dequantize_weight().t() if method in _LAYERS_OF_THEIR_OWN else other.weight
            same += torch.equal(module.dequantize().to(dtype), weight.to(dtype))
    return same


def measure(case: str, corpus: Corpus, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """One row."""
    what, _, path = case.partition("=")
    kind, *names = what.split(":")
    if kind == "export" and len(names) == 2:
        ours, theirs = Path(path), work / "out"
        numbers: dict[str, Any] = {}
        result: Any = export_model(ours, theirs, to=names[0])
        theirs = theirs / FILE if names[0] == "gguf" else theirs
    elif kind == "convert" and len(names) == 1:
        ours, theirs = work / "out", Path(path)
        result = convert_model(theirs, ours, exact=options.exact)
        numbers = {"bits_per_weight": result.bits_per_weight, "exact_planes": options.exact}
    else:
        raise EvaluationError(f"{case}: write export:FORMAT:NAME=FOLDER or convert:NAME=SOURCE")
    own, own_tokenizer = load_model(str(ours), dtype=torch.float32)
    model, tokenizer, method = load_elsewhere(theirs)
    same = same_weights(own, model, method)
    here, there = score(own, own_tokenizer, corpus, options), score(model, tokenizer, corpus, options)
    if options.draws:
        numbers["disturbance"] = DISTURBANCE
        numbers["disturbed_here"] = draws(own, own_tokenizer, corpus, options)
        numbers["disturbed_there"] = draws(model, tokenizer, corpus, options)
    return {
        "case": what,
        "format": method,
        "layers": result.layers,
        "exact_layers": result.exact,
        "same_weights": same,
        "rounding": result.rounding,
        **numbers,
        "here": here,
        "there": there,
        "environment": environment_of("cpu", *_PACKAGES.get(method, ("gguf",))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--max-windows", type=int, default=8)
    parser.add_argument("--exact", action="store_true", help="convert with --exact")
    parser.add_argument("--draws", type=int, default=0, help="disturbed embeddings to score as well")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    empty: dict[str, Any] = {"command": "python scripts/exchange/loaders.py CASES --text test.jsonl", "rows": []}
    document = read_document(options.json, empty) if options.json else empty
    done = {row["case"] for row in document["rows"]}
    corpus = load_text(None, options.text, split="test")
    for case in options.cases:
        if case.partition("=")[0] in done:
            continue
        with tempfile.TemporaryDirectory() as work:
            document["rows"].append(measure(case, corpus, options, Path(work)))
        write_document(options.json, document)
    rows = [
        [row["case"], f"{row['here']['perplexity']:.4f}", f"{row['there']['perplexity']:.4f}", f"{row['rounding']:.1e}"]
        for row in document["rows"]
    ]
    print(markdown_table(("case", "quantkit", "other loader", "rounding"), rows, left=1))


if __name__ == "__main__":
    run_script(main)
