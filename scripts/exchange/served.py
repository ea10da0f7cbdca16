"""Perplexity of exports in vLLM's CPU build beside ours: the same windows, every target inside a window.

python scripts/exchange/served.py --python .venv/vllm/bin/python --text wiki.test.jsonl --dtypes float32,float16
    --json docs/results/exchange-served.json original:NAME=FOLDER export:FORMAT:NAME=FOLDER ...

``export:FORMAT:NAME=FOLDER`` exports a quantkit checkpoint. ``original:NAME=FOLDER`` gives vLLM the model as it is;
that shows how far the two are apart without quantization. --python: of an environment with vLLM, as made by ``make
test-vllm``. --dtypes: in which both compute. Rows already in the JSON file are kept. What vLLM refuses stands there
with its error.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from quantkit.data.corpora import Corpus, load_text
from quantkit.data.windows import sequential_windows, tokenize
from quantkit.errors import EvaluationError
from quantkit.evaluation.perplexity import perplexity
from quantkit.jobs.export import export_model
from quantkit.models.loading import load_model
from scripts.common import (
    chosen,
    environment_of,
    markdown_table,
    read_document,
    run_script,
    write_document,
)

_DTYPES = ("float32", "float16", "bfloat16")
_AFTERWARDS = "Engine core initialization failed"  # follows every error of the engine's process
_ENGINE = "engine"  # the first argument of the process that holds vLLM's engine


def engine(folder: str, windows: str, dtype: str, out: str) -> None:
    """Write the mean negative log-likelihood of each window's tokens but the first, in a process of its own."""
    from vllm import LLM, SamplingParams

    ids = json.loads(Path(windows).read_text())
    llm = LLM(folder, dtype=dtype, enforce_eager=True, max_model_len=len(ids[0]) + 1, max_num_seqs=1)
    answers = llm.generate([{"prompt_token_ids": row} for row in ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    means = []
    for row, answer in zip(ids, answers, strict=True):
        given = answer.prompt_logprobs[1:]
        means.append(-sum(own[token].logprob for own, token in zip(given, row[1:], strict=True)) / len(given))
    Path(out).write_text(json.dumps(means))


def served(folder: Path, ids: torch.Tensor, dtype: str, python: str, work: Path) -> dict[str, Any]:
    """vLLM's perplexity on windows [W, L], or why it has none."""
    windows, out = work / "windows.json", work / "means.json"
    windows.write_text(json.dumps(ids.tolist()))
    command = [python, __file__, _ENGINE, str(folder), str(windows), dtype, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not out.is_file():
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
        errors = [line for line in lines if ("Error: " in line or "Value error, " in line) and _AFTERWARDS not in line]
        return {"refused": "; ".join(errors[:2]) if errors else done.stderr[-400:]}
    means = json.loads(out.read_text())
    return {"perplexity": math.exp(sum(means) / len(means))}


def _version(python: str) -> str:
    code = "import importlib.metadata as m; print(m.version('vllm'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def measure(case: str, dtype: str, corpus: Corpus, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """One row."""
    what, _, path = case.partition("=")
    kind, *names = what.split(":")
    folder = Path(path)
    if kind == "export" and len(names) == 2:
        folder = work / "out"
        export_model(Path(path), folder, to=names[0])
    elif kind != "original" or len(names) != 1:
        raise EvaluationError(f"{case}: write export:FORMAT:NAME=FOLDER or original:NAME=FOLDER")
    model, tokenizer = load_model(path, dtype=getattr(torch, dtype))
    here = perplexity(model, tokenizer, corpus, seq_len=options.seq_len, max_windows=options.max_windows)
    ids = tokenize(tokenizer, corpus.text, name=corpus.name)
    windows = sequential_windows(ids, options.seq_len, options.max_windows, name=corpus.name)
    del model
    return {
        "case": what,
        "dtype": dtype,
        "here": asdict(here),
        "there": served(folder, windows, dtype, options.python, work),
        "environment": {**environment_of("cpu"), "vllm": _version(options.python)},
    }


def main() -> None:
    if sys.argv[1:2] == [_ENGINE]:
        engine(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--python", required=True)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--max-windows", type=int, default=4)
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--json", required=True, type=Path)
    options = parser.parse_args()
    document = read_document(options.json, {"command": "python scripts/exchange/served.py CASES", "rows": []})
    done = {(row["case"], row["dtype"]) for row in document["rows"]}
    corpus = load_text(None, options.text, split="test")
    for case, dtype in product(options.cases, chosen("--dtypes", options.dtypes, _DTYPES)):
        if (case.partition("=")[0], dtype) in done:
            continue
        with tempfile.TemporaryDirectory() as work:
            document["rows"].append(measure(case, dtype, corpus, options, Path(work)))
        write_document(options.json, document)
    rows = [
        [
            row["case"],
            row["dtype"],
            f"{row['here']['perplexity']:.4f}",
            str(row["there"].get("perplexity", row["there"].get("refused"))),
        ]
        for row in document["rows"]
    ]
    print(markdown_table(("case", "computed in", "quantkit", "vLLM"), rows, left=2))


if __name__ == "__main__":
    run_script(main)
