"""What this machine can run: packages, GPUs, and how each instruction the kernels want is supported."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quantkit.cpu import half_precision_failure
from quantkit.cuda.architectures import ARCHITECTURES, Capability, architecture, capabilities
from quantkit.errors import KernelError
from quantkit.integrations.vllm import TESTED_VERSIONS
from quantkit.jobs.serve import VLLM_DISTRIBUTIONS, serving_problem
from quantkit.ops.bipolar.plan import path_table

# package -> (what it is for, the extra that installs it)
_PACKAGES: dict[str, tuple[str, str]] = {
    "torch": ("everything", ""),
    "transformers": ("models and checkpoints", ""),
    "datasets": ("calibration and evaluation text", ""),
    "accelerate": ("large models over several devices", ""),
    "safetensors": ("checkpoint files", ""),
    "cupy": ("the CUDA kernels", "cuda13"),
    "nvidia-cuda-nvrtc": ("compiling the kernels", "cuda13"),
    "nvidia-cuda-runtime": ("CUDA headers for the kernels", "cuda13"),
    "gguf": ("GGUF models, the demo model among them", "gguf"),
    "lm_eval": ("eval tasks", "eval"),
    "matplotlib": ("plots", "plot"),
    "nvidia-ml-py": ("energy per product", "energy"),
    "vllm": ("serving", "vllm"),
}
# one package, several distributions: by CUDA version
_DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "nvidia-cuda-nvrtc": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "nvidia-cuda-runtime": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    "vllm": VLLM_DISTRIBUTIONS,
}


@dataclass(frozen=True)
class Package:
    """version: None where missing; then pip_line adds it."""

    name: str
    purpose: str
    version: str | None
    pip_line: str


@dataclass(frozen=True)
class Gpu:
    """One GPU with its capability table. bipolar_paths: (widths, kernel, why) for many tokens, every pair of widths.

    verified: how far the kernels are tested on its generation; why there are none, with empty tables, on old ones.
    """

    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    verified: str
    capabilities: tuple[Capability, ...]
    bipolar_paths: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Diagnosis:
    """Everything ``quantkit doctor`` prints. generations: the capability table of every known GPU generation.

    half_precision: how a process that multiplies bf16 and fp16 on the CPU ends, such as "SIGILL"; None: it survives.
    serving: whether vLLM is there and sees quantkit's plugin.
    """

    python: str
    system: str
    torch_cuda: str | None
    packages: tuple[Package, ...]
    gpus: tuple[Gpu, ...]
    generations: dict[str, tuple[Capability, ...]]
    kernels: str
    half_precision: str | None
    serving: str

    def to_json(self) -> Mapping[str, Any]:
        """All of it as a JSON document."""
        return asdict(self)


def diagnose() -> Diagnosis:
    """Look at the installed packages and the GPUs, and try the CPU in a child process; compiles nothing."""
    packages = tuple(_package(name, *about) for name, about in _PACKAGES.items())
    gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count()))
    return Diagnosis(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        torch_cuda=torch.version.cuda,
        packages=packages,
        gpus=gpus,
        generations={row.heading: capabilities(row) for row in ARCHITECTURES.values()},
        kernels=_kernel_verdict(packages, gpus),
        half_precision=half_precision_failure(),
        serving=serving_problem() or f"vLLM sees quantkit's plugin (tested with vLLM {TESTED_VERSIONS})",
    )


def _package(name: str, purpose: str, extra: str) -> Package:
    pip_line = f"pip install 'quantkit[{extra}]'" if extra else "pip install quantkit"
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return Package(name, purpose, importlib.metadata.version(distribution), pip_line)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Package(name, purpose, None, pip_line)


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    about = properties.name, (properties.major, properties.minor), properties.total_memory
    try:
        row = architecture(properties.major, properties.minor)
    except KernelError as error:
        return Gpu(*about, str(error), (), ())
    return Gpu(*about, row.verified, capabilities(row), tuple(path_table(row)))


def _kernel_verdict(packages: tuple[Package, ...], gpus: tuple[Gpu, ...]) -> str:
    if not gpus:
        return "no NVIDIA GPU: models on the CPU run on the PyTorch reference, slowly but exactly"
    missing = next((p for p in packages if p.name == "cupy" and p.version is None), None)
    unsupported = next((gpu for gpu in gpus if not gpu.capabilities), None)
    if unsupported is not None:
        return f"{unsupported.name}: {unsupported.verified}"
    if missing is not None:
        return f"CuPy is missing, so the GPU runs no quantized model: {missing.pip_line} (CUDA 12: quantkit[cuda12])"
    return "kernels are compiled for the GPU on first use"
