"""Whether this machine's processor survives products in half precision.

A virtual machine may announce AMX and not run it: oneDNN, which multiplies bf16 and fp16 for torch, then ends the
process with "Illegal instruction". Only a process that tries can tell, so a child does, and the answer is kept in the
user's cache. torch is not imported here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from quantkit.assets import cache_folder
from quantkit.errors import DeviceError
from quantkit.storage.checks import check_document, map_of, nullable, text
from quantkit.storage.documents import read_json

LIMIT_VARIABLE, LIMIT = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"  # the widest that does without AMX
ANSWERS = "half-precision.json"
CPU_INFO = Path("/proc/cpuinfo")
# Sizes that reach oneDNN's AMX products, of many rows and of one.
PROBE = """
import torch
for dtype in (torch.bfloat16, torch.float16):
    for rows in (1, 256):
        torch.nn.functional.linear(torch.ones(rows, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype))
"""


def half_precision_failure() -> str | None:
    """How a process that multiplies bf16 and fp16 here ends, such as "SIGILL"; None where it survives."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    if done.returncode < 0:
        return signal.Signals(-done.returncode).name
    return f"exit status {done.returncode}" if done.returncode else None


def failure_advice(failure: str) -> str:
    """What to do about a failure, in one line."""
    return f"half-precision products end the process here ({failure}): set {LIMIT_VARIABLE}={LIMIT}, or use fp32"


def check_half_precision() -> None:
    """Raise DeviceError where a product of bf16 or fp16 on this CPU would end the process.

    Only a virtual machine that announces AMX is asked, once per processor and torch, and not while the variable is set.
    """
    if LIMIT_VARIABLE in os.environ or not _is_suspect():
        return
    path, key = cache_folder() / ANSWERS, f"{_cpu_field('model name')}, torch {version('torch')}"
    answers = _read(path)
    if key not in answers:
        answers[key] = half_precision_failure()
        _write(path, answers)
    failure = answers[key]
    if failure is not None:
        raise DeviceError(failure_advice(failure))


def _is_suspect() -> bool:
    flags = _cpu_field("flags").split()
    return "amx_bf16" in flags and "hypervisor" in flags


def _cpu_field(name: str) -> str:
    """The first value of a field of /proc/cpuinfo; "" where there is none, as on other systems."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")


def _read(path: Path) -> dict[str, str | None]:
    """The answers kept; none where they cannot be read, and the child is asked again."""
    try:
        answers: dict[str, str | None] = read_json(path, f"cache {path}", DeviceError)
        check_document(answers, map_of(nullable(text)), f"cache {path}", DeviceError)
    except DeviceError:
        return {}
    return answers


def _write(path: Path, answers: dict[str, str | None]) -> None:
    """Keep the answers where the cache can be written; elsewhere the child is asked again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
