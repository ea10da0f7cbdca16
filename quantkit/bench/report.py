"""What stands beside every number: the machine and the versions; and the plots."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import quantkit
from quantkit.assets import asset_folder
from quantkit.errors import BenchError

if TYPE_CHECKING:
    from quantkit.bench.kernels import LinearResult

_CUPY_WHEELS = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_PLOT_DPI = 130


def environment(device: torch.device) -> dict[str, str]:
    """GPU or CPU, driver, CUDA, torch, CuPy, quantkit and its commit ("unknown" outside a checkout)."""
    facts = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "cupy": next((version for name in _CUPY_WHEELS if (version := _version(name))), "not installed"),
        "python": platform.python_version(),
        "quantkit": quantkit.__version__,
        "commit": commit(),
    }
    if device.type == "cuda":
        facts |= {"driver": _driver(), "cuda": str(torch.version.cuda)}
    else:
        facts["threads"] = str(torch.get_num_threads())
    return facts


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str:
    """The commit of the checkout that runs, with "-dirty" where files were changed; "unknown" outside of one."""
    checkout = asset_folder("kernels").parent
    if not (checkout / ".git").exists():
        return "unknown"
    return _output(["git", "-C", str(checkout), "describe", "--always", "--dirty"]) or "unknown"


def _driver() -> str:
    versions = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return versions.splitlines()[0] if versions else "unknown"


def check_plot_path(plot: Path | None) -> None:
    """Raise BenchError now if a plot could not be written later."""
    if plot is None:
        return
    if plot.suffix != ".png":
        raise BenchError(f"`plot` {plot}: the file must end in .png")
    if not plot.absolute().parent.is_dir():
        raise BenchError(f"`plot` {plot}: the folder {plot.absolute().parent} does not exist")
    if _version("matplotlib") is None:
        raise BenchError("`plot` needs matplotlib, which is not installed: pip install 'quantkit[plot]'")


def plot_linear(path: Path, results: Sequence[LinearResult], title: str, peak: float | None) -> None:
    """Three panels: latency against the weight's size, bandwidth against the device's, speed-up over floating point."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 5), layout="constrained")
    FigureCanvasAgg(figure)
    latency, roofline, speed = figure.subplots(1, 3)
    figure.suptitle(title)
    for (method, tokens), group in _by_series(results).items():
        group = sorted(group, key=lambda result: result.out_features * result.in_features)
        sizes = [result.out_features * result.in_features for result in group]
        label = f"{method}, {tokens} tokens"
        latency.loglog(sizes, [result.median_us for result in group], marker="o", label=label)
        moved = [result.bytes / 1e6 for result in group]
        roofline.semilogx(moved, [result.gigabytes_per_second for result in group], marker="o", label=label)
    latency.set(xlabel="weights (N x K)", ylabel="median latency, us")
    latency.legend(fontsize="small")
    roofline.set(xlabel="MB moved per call", ylabel="GB/s", ylim=(0, None))
    if peak is not None:
        roofline.axhline(peak / 1e9, color="black", linestyle="--", linewidth=1)
    names = [f"{r.shape}\n{r.method}, {r.tokens} tokens" for r in results]
    speed.barh(range(len(results)), [result.speed_up for result in results])
    speed.set_yticks(range(len(results)), names, fontsize="x-small")
    speed.axvline(1.0, color="black", linewidth=1)
    speed.invert_yaxis()
    speed.set(xlabel="times faster than floating point")
    figure.savefig(path, dpi=_PLOT_DPI)


def _by_series(results: Sequence[LinearResult]) -> dict[tuple[str, int], list[LinearResult]]:
    series: dict[tuple[str, int], list[LinearResult]] = {}
    for result in results:
        series.setdefault((result.method, result.tokens), []).append(result)
    return series


def to_json(environment_facts: dict[str, str], **parts: Any) -> dict[str, Any]:
    """The JSON document of a benchmark: the environment first, then its parts."""
    return {"environment": environment_facts, **parts}
