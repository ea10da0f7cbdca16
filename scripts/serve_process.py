"""A process of its own for each setting of scripts/serve_bench.py: it waits for its turn and leaves nothing behind."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scripts.serve_measure import Work

ROOT = Path(__file__).parents[1]
_ENDING_SECONDS, _POLL_SECONDS = 10.0, 0.1
_ZOMBIE = "Z"


@contextmanager
def holding(lock: Path | None) -> Iterator[None]:
    """While entered, no setting has the file that they take turns by, and so the GPUs; None: there is no such file."""
    with Path(os.devnull if lock is None else lock).open("a") as held:
        if lock is not None:
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def run_work(
    work: Work, path: Path, environment: Mapping[str, str], *, lock: Path | None = None, limit: float | None = None
) -> Any:
    """What one process finds; {"error": ...} where it fails, as that says something, too.

    path: of its JSON file. environment: variables beside ours. lock: file that it holds, from when its imports are
    done, until it and all that it started have ended. limit: seconds that it may take once it holds the file.
    """
    alone = work.options["tensor_parallel_size"] == 1
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The engine in its own process of one GPU: without the time of messages. Workers take functions to run.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if alone else "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        **environment,
    }
    command = [sys.executable, "-m", "scripts.serve_measure", str(path)]
    with Path(os.devnull if lock is None else lock).open("a") as held:
        number = held.fileno()
        path.write_text(json.dumps(asdict(replace(work, lock=None if lock is None else number, limit=limit))))
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=sys.stderr,
            start_new_session=True,
            pass_fds=(number,),
        )
        try:
            status = process.wait()
        finally:
            _end_group(process)
    answer = json.loads(path.read_text())
    return {"error": f"exit status {status}"} if status or "ms_per_step" not in answer else answer


def end_by_signal() -> None:
    """Have SIGTERM end this script as an exception does, so that no process of a setting outlives it."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and all that it started, and wait for them: the GPUs' memory is free behind this."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + _ENDING_SECONDS
    while _runs(process.pid) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _runs(group: int) -> bool:
    """Whether a process of the group has not ended; one that only waits to be asked for its status has."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _parent, found, *_ = file.read_text().rpartition(")")[2].split()
            if int(found) == group and state != _ZOMBIE:
                return True
    return False
