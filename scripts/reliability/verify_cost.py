"""What comparing every digest costs of loading a checkpoint.

python scripts/reliability/verify_cost.py FOLDER ... [--rounds 20] [--json FILE]

Loads each checkpoint onto the CPU, with and without QUANTKIT_VERIFY=0 in turns, in one process; the first load of each
kind is not counted, so that files are in the page cache. Other work on the machine only adds time: the fastest load of
each kind is compared, and the least processor time, of all threads.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from quantkit.checkpoint.summary import summarize
from quantkit.cli.common import check_json_path
from quantkit.integrations.transformers import load_checkpoint
from quantkit.storage.tensors import VERIFY_VARIABLE
from scripts.common import command_line, environment_of, run_script, write_document

_VERIFYING = {"unverified": "0", "verified": "1"}


def load_seconds(folder: Path, verifying: str) -> tuple[float, float]:
    """(time, processor time of all threads) of one load under a value of QUANTKIT_VERIFY."""
    os.environ[VERIFY_VARIABLE] = verifying
    gc.collect()
    began, used = time.perf_counter(), time.process_time()
    load_checkpoint(str(folder), device="cpu", dtype=None)
    return time.perf_counter() - began, time.process_time() - used


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Both loading times of one checkpoint. Raises CheckpointError for one that is damaged or holds no digests."""
    summary = summarize(folder, verify=True)
    seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _VERIFYING}
    for _ in range(rounds + 1):
        for kind, value in _VERIFYING.items():
            seconds[kind].append(load_seconds(folder, value))
    result: dict[str, Any] = {
        "checkpoint": folder.name,
        "recipe": summary.recipe,
        "bytes": summary.bytes,
        "tensors": summary.digests,
        "rounds": rounds,
    }
    for index, clock in enumerate(("seconds", "processor_seconds")):
        best = {kind: min(times[index] for times in own[1:]) for kind, own in seconds.items()}
        result |= {f"{kind}_{clock}": round(own, 4) for kind, own in best.items()}
        result[f"cost_percent_of_{clock}"] = round(100 * (best["verified"] / best["unverified"] - 1), 1)
    return result


def main() -> None:
    """Measure, print, and write the JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    check_json_path(options.json)
    disable_progress_bar()
    results = [measure(folder, options.rounds) for folder in options.folders]
    write_document(options.json, {"command": command_line(), "environment": environment_of("cpu"), "results": results})
    for result in results:
        print(*(f"{key} {value}" for key, value in result.items()), sep="\n", end="\n\n")


if __name__ == "__main__":
    run_script(main)
