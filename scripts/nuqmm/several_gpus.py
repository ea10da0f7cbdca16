"""nuQmm's Table 5 and Figure 4 with the paper's own numbers beside ours, and vLLM on several GPUs, as Markdown.

python scripts/nuqmm/several_gpus.py FILE ... [--json FILE] [--bcq docs/bcq.md] [--serving docs/serving.md]

The files are what scripts/serve_bench.py and scripts/nuqmm/figure4.py wrote on one machine, each of some settings. OPT
models make Table 5, by their time at batch 1; the others the tables of serving. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.errors import BenchError
from scripts.common import markdown_table, replace_section, run_script, write_document
from scripts.serve_bench import setting_key, tables

PAPER = "opt-"  # the models of the paper
FP16, BATCH = "fp16", "1"
SETTINGS = {FP16: "fp16", "nuqmm-q4-g128": "q = 4", "nuqmm-q3-g128": "q = 3", "nuqmm-q2-g128": "q = 2"}
# model -> {GPUs: {setting: ms per token}}, nuQmm Table 5 (A100 80GB, FasterTransformer)
TABLE_5: dict[str, dict[int, dict[str, float]]] = {
    "opt-30b": {
        1: {FP16: 40.5, "q = 2": 11.5, "q = 3": 14.5, "q = 4": 17.8},
        2: {FP16: 23.5, "q = 2": 9.6, "q = 3": 11.2, "q = 4": 13.2},
    },
    "opt-66b": {
        1: {"q = 2": 20.9, "q = 3": 26.8, "q = 4": 33.5},
        2: {FP16: 48.4, "q = 2": 16.2, "q = 3": 19.3, "q = 4": 23.2},
    },
    "opt-175b": {1: {"q = 2": 47.1, "q = 3": 62.5}, 2: {"q = 2": 32.6, "q = 3": 40.5, "q = 4": 49.5}},
}
# m -> speed-up over cuBLAS on one GPU, nuQmm Table 3; of two GPUs with the share of communication, %
TABLE_3_CUT = {8192: (1.30, 23.73), 12288: (1.60, 11.58)}
TABLE_3 = {(8192, 2): 4.41, (8192, 4): 3.15, (12288, 2): 6.04, (12288, 4): 4.32}
_METHOD_BITS = re.compile(r"nuqmm-q(\d)-")
NOT_MEASURED = "Not measured."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, help="all of them in one file")
    parser.add_argument("--bcq", type=Path, help="Markdown file whose section nuqmm-gpus gets Table 5 and Figure 4")
    parser.add_argument("--serving", type=Path, help="Markdown file whose section serve-gpus gets the other models")
    options = parser.parse_args()
    document = merged([json.loads(path.read_text(encoding="utf-8")) for path in options.files])
    write_document(options.json, document)
    paper, serving = paper_section(document), serving_section(document)
    print(paper, serving, sep="\n\n")
    replace_section(options.bcq, "nuqmm-gpus", paper)
    replace_section(options.serving, "serve-gpus", serving)


def merged(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One document of several, each result with its commit; where settings stand twice, one without an error is kept.

    Raises BenchError where GPUs or packages differ.
    """
    places = [_place(document["environment"]) for document in documents]
    if any(place != places[0] for place in places):
        raise BenchError("these files are of different GPUs or packages; measure again")
    results: dict[str, Any] = {}
    figures: list[dict[str, Any]] = []
    for document in documents:
        commit = {"commit": document["environment"]["commit"]}
        for key, result in document.get("results", {}).items():
            if "error" in results.get(key, {"error": ""}):
                results[key] = commit | result
        figures += [commit | document["figure4"]] if "figure4" in document else []
    widest = max((document["environment"] for document in documents), key=lambda found: len(found["gpus"]))
    commits = dict.fromkeys(found["commit"] for found in (*results.values(), *figures[-1:]))
    commands = [command for document in documents for command in _commands(document)]
    whole = {"commands": commands, "environment": widest | {"commit": ", ".join(commits)}, "results": results}
    return {**whole, "figure4": figures[-1]} if figures else whole


def _place(environment: Mapping[str, Any]) -> Any:
    return set(environment["gpus"]), environment["packages"]


def _commands(document: Mapping[str, Any]) -> Sequence[str]:
    """Of a measured file, or of one merged before."""
    commands: Sequence[str] = document.get("commands") or [document["command"]]
    return commands


def paper_section(document: Mapping[str, Any]) -> str:
    """Table 5 and Figure 4."""
    return "\n\n".join([_machine(document), table_5(document["results"]), figure_4(document.get("figure4"))])


def serving_section(document: Mapping[str, Any]) -> str:
    """The tables of serving, of the models that are not the paper's."""
    own = {key: result for key, result in document["results"].items() if not key.startswith(PAPER)}
    return f"{_machine(document)}\n\n{tables(own)}" if own else NOT_MEASURED


def _machine(document: Mapping[str, Any]) -> str:
    """One line on where the figures come from."""
    found = document["environment"]
    gpus, packages = found["gpus"], found["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("vllm", "torch") if name in packages)
    return f"{len(gpus)} x {gpus[0]}, {versions}, commit {found['commit']}."


def table_5(results: Mapping[str, Any]) -> str:
    """ms, GPU-ms and mJ per token; the time over fp16's on the fewest GPUs that hold it, ours and the paper's."""
    rows = []
    for model, paper in TABLE_5.items():
        ours = {
            (gpus, short): result
            for gpus in paper
            for name, short in SETTINGS.items()
            if "ms_per_step" in (result := results.get(setting_key(model, name, gpus), {}))
        }
        fp16 = _fewest({gpus: _milliseconds(found) for (gpus, short), found in ours.items() if short == SETTINGS[FP16]})
        paper_fp16 = _fewest({gpus: row[FP16] for gpus, row in paper.items() if FP16 in row})
        for (gpus, short), result in ours.items():
            ms, theirs = _milliseconds(result), paper[gpus].get(short)
            energy = result.get("millijoules_per_token", {}).get(BATCH)
            rows.append(
                [
                    *(model, short, str(gpus), f"{max(result['model_bytes']) / 1e9:.1f}", f"{ms:.2f}"),
                    *(f"{gpus * ms:.2f}", _cell(energy, "{:.0f}"), _ratio(ms, fp16)),
                    *(_cell(theirs, "{}"), _cell(theirs and gpus * theirs, "{:.1f}"), _ratio(theirs, paper_fp16)),
                ]
            )
    header = ["model", "weights", "GPUs", "GB per GPU", "ms", "GPU-ms", "mJ", "time over fp16"]
    header += ["paper ms", "paper GPU-ms", "paper time over fp16"]
    title = "#### Table 5: milliseconds per token of whole models"
    return f"{title}\n\n{markdown_table(header, rows, left=2) if rows else NOT_MEASURED}"


def _milliseconds(result: Mapping[str, Any]) -> float:
    return float(result["ms_per_step"][BATCH])


def _fewest(times: Mapping[int, float]) -> float | None:
    """That of the fewest GPUs."""
    return times[min(times)] if times else None


def _ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or base is None else f"{value / base:.2f}"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def figure_4(figure: Mapping[str, Any] | None) -> str:
    """Microseconds and speed-ups over cuBLAS on one GPU."""
    title = "#### Figure 4: microseconds of one product [m, m], fp16 on one and two GPUs, q bits on one"
    if figure is None:
        return f"{title}\n\n{NOT_MEASURED}"
    cut = {row["m"]: row for row in figure["cut"]}
    by_size: dict[int, dict[int, Any]] = {}
    for result in figure["single"]:
        found = _METHOD_BITS.match(result["method"])
        assert found is not None
        by_size.setdefault(result["out_features"], {})[int(found[1])] = result
    rows = [_figure_row(size, results, cut.get(size)) for size, results in by_size.items()]
    header = ["m", "fp16, 1 GPU", "fp16, 2 GPUs", "communication", "q = 4", "q = 2"]
    header += ["paper 2 GPUs", "paper communication", "paper q = 4", "paper q = 2"]
    return f"{title}\n\n{markdown_table(header, rows, left=0)}"


def _figure_row(size: int, results: Mapping[int, Any], cut: Mapping[str, Any] | None) -> list[str]:
    fp16 = next(iter(results.values()))["baseline_us"]
    ours = ["-", "-"]
    if cut is not None:
        ours = [_speed(cut["us"], fp16), f"{max(0.0, 1 - cut['product_us'] / cut['us']):.0%}"]
    few = [_speed(results[bits]["median_us"], results[bits]["baseline_us"]) for bits in (4, 2)]
    paper_speed, paper_share = TABLE_3_CUT.get(size, (None, None))
    paper = [_cell(paper_speed, "x{:.2f}"), _cell(paper_share, "{:.0f}%")]
    paper += [_cell(TABLE_3.get((size, bits)), "x{:.2f}") for bits in (4, 2)]
    return [str(size), f"{fp16:.1f}", *ours, *few, *paper]


def _speed(us: float, base: float) -> str:
    return f"{us:.1f} (x{base / us:.2f})"


if __name__ == "__main__":
    run_script(main)
