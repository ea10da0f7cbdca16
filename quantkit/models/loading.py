"""Loading a model and its tokenizer from a folder, the hub or the demo cache, with every failure in one line."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.cpu import check_half_precision
from quantkit.errors import ModelError, refusing
from quantkit.hub import hub_problem
from quantkit.models.demo import DEMO_MODEL, demo_folder
from quantkit.progress import track
from quantkit.storage.documents import read_json
from quantkit.storage.place import is_stream

if TYPE_CHECKING:  # torch and transformers take seconds; a wrong name must be refused before that
    import torch
    from torch import Tensor, nn

    from quantkit.models.stream import ModelStream

FINGERPRINT_VALUES = 256  # per parameter: about 0.1 MB read for a 7B model, yet any retraining shows
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_OFFLINE_WAYS = f"use a local folder, the offline model {DEMO_MODEL}, or HF_HUB_OFFLINE=1 with a cached download"
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


@dataclass(frozen=True)
class ModelSource:
    """Where a model is, checked as far as that takes no time.

    location: a folder, or a hub id.
    offline: whether only the local hub cache may be asked, and why (a sentence), or None.
    """

    location: str
    offline: str | None = None


def resolve_model(model: str) -> ModelSource:
    """Find a model given as folder, hub id or demo name; imports neither torch nor transformers.

    Raises ModelError for a missing or incomplete folder and for a name that can be no hub id.
    """
    if Path(model).is_dir():
        _check_folder(Path(model))
        return ModelSource(model)
    if model == DEMO_MODEL:
        return ModelSource(str(demo_folder()))
    if not _HUB_ID.fullmatch(model) or model.startswith("."):
        raise ModelError(f"model {model}: no such folder")
    problem = hub_problem()
    if problem is not None and not _is_cached(model):
        raise ModelError(f"model {model}: no such folder, not in the local hub cache, and {problem}; {_OFFLINE_WAYS}")
    return ModelSource(model, offline=problem)


def read_config(model: str) -> dict[str, Any]:
    """config.json of a local model folder (or of the demo model) as a dict; {} for a hub id.

    Raises ModelError for an unreadable one.
    """
    folder = demo_folder() if model == DEMO_MODEL else Path(model)
    if not folder.is_dir():
        return {}
    if not (folder / "config.json").exists():
        raise ModelError(f"model {folder}: no config.json; expected a folder in the Hugging Face layout")
    config = read_json(folder / "config.json", f"model {folder}: config.json", ModelError)
    if not isinstance(config, dict):
        raise ModelError(f"model {folder}: config.json holds no mapping")
    return config


def is_quantized(model: str | nn.Module) -> bool:
    """Whether a local folder, or a loaded model, already carries a quantization_config."""
    if isinstance(model, str):
        return bool(read_config(model).get("quantization_config"))
    return bool(getattr(getattr(model, "config", None), "quantization_config", None))


def first_device() -> str:
    """The first GPU where torch can use one, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(
    model: str,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    before_moving: Callable[[Any], None] | None = None,
) -> tuple[Any, Any]:
    """(model in eval mode on the device, tokenizer) of a folder, a hub id, the demo name or a quantkit checkpoint.

    ``import quantkit`` has told transformers how to read such checkpoints.
    dtype: None keeps the checkpoint's on a GPU and is fp32 on a CPU, where half precision is slow and inexact.
    before_moving: gets the model before it goes to the device.
    Raises ModelError naming the cause: folder, hub, config, tokenizer, missing or damaged weights; DeviceError for a
    device that is not there.
    """
    from quantkit.cuda.device import usable_device

    source, device = resolve_model(model), usable_device(device)
    tokenizer = _load_tokenizer(model, source)
    loaded = _load_weights(model, source, dtype=dtype, device=device).eval()
    if before_moving is not None:
        before_moving(loaded)
    return loaded.to(device), tokenizer


def open_stream(
    model: str, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> tuple[ModelStream, Any]:
    """(the model as a stream of its blocks, tokenizer); arguments and errors as of load_model.

    Names, shapes and completeness of all weights are checked; none is in memory yet.
    """
    from quantkit.cuda.device import usable_device
    from quantkit.models.stream import ModelStream, WeightReader, check_ties, restore_buffers

    source, device = resolve_model(model), usable_device(device)
    tokenizer = _load_tokenizer(model, source)
    empty = _load_weights(model, source, dtype=dtype, device=device, device_map="meta").eval()
    restore_buffers(empty, device)
    stream = ModelStream(empty, device, WeightReader(empty, _weights_folder(source)))
    check_ties(stream)
    return stream, tokenizer


def open_evaluated(model: str, *, device: str | torch.device) -> tuple[Any, Any]:
    """(a ModelStream, tokenizer) to evaluate; the model as a whole where another tool quantized it and its loader has
    to make it. dtype and errors as of load_model with its defaults."""
    config = read_config(model).get("quantization_config")
    if isinstance(config, dict) and not is_quantkit(model):
        return load_model(model, device=device)
    return open_stream(model, device=device)


def is_quantkit(model: str) -> bool:
    """Whether a model is a quantkit checkpoint. Raises ModelError where it has no readable config."""
    config = read_config(model).get("quantization_config")
    return isinstance(config, dict) and config.get("quant_method") == "quantkit"


def _load_tokenizer(model: str, source: ModelSource) -> Any:
    from transformers import AutoTokenizer

    offline = source.offline is not None
    with _one_line(f"tokenizer of {model}"):
        return AutoTokenizer.from_pretrained(source.location, local_files_only=offline, trust_remote_code=False)


def _load_weights(
    model: str, source: ModelSource, *, dtype: torch.dtype | None, device: torch.device, device_map: str | None = None
) -> Any:
    """The model as transformers loads it; device_map: None is the CPU, ``meta`` checks everything and reads nothing."""
    import torch

    _silence_loading_bars()
    wanted: Any = dtype or (torch.float32 if device.type == "cpu" else "auto")
    if device.type == "cpu" and wanted in (torch.bfloat16, torch.float16):
        check_half_precision()
    local_only = source.offline is not None
    with _one_line(f"model {model}"):
        answer: Any = auto_class(source.location, local_only=local_only).from_pretrained(
            source.location,
            dtype=wanted,
            device_map=device_map,
            local_files_only=local_only,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # _check_complete refuses them by name; transformers would not name them
            output_loading_info=True,
        )
    loaded, report = answer
    _check_complete(model, report, strangers=not is_quantized(loaded))
    return loaded


def _weights_folder(source: ModelSource) -> Path:
    """The folder that the weight files are in; those of a hub id have been downloaded."""
    from huggingface_hub import try_to_load_from_cache

    if Path(source.location).is_dir():
        return Path(source.location)
    cached = try_to_load_from_cache(source.location, "config.json")
    if not isinstance(cached, str):
        raise ModelError(f"model {source.location}: its files are not in the local hub cache")
    return Path(cached).parent


def auto_class(location: str, *, local_only: bool) -> Any:
    """The class of transformers that loads the model of a folder or hub id.

    AutoModelForCausalLM; or AutoModelForImageTextToText for models with a vision tower that the former does not know.
    Raises what transformers raises for a config that cannot be read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(location, local_files_only=local_only, trust_remote_code=False)
    seeing = type(config) in AutoModelForImageTextToText._model_mapping
    known = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForImageTextToText if seeing and not known else AutoModelForCausalLM


def _silence_loading_bars() -> None:
    """Keep stderr to our own progress; downloads, which take minutes, keep their bars."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # switches the hub's off as well
    enable_progress_bars()


def stored_dtype(model: str) -> torch.dtype:
    """The dtype a model's checkpoint is stored in; fp32 where its config names none."""
    import torch
    from transformers import AutoConfig

    source = resolve_model(model)
    with _one_line(f"config of {model}"):
        offline = source.offline is not None
        config = AutoConfig.from_pretrained(source.location, local_files_only=offline, trust_remote_code=False)
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def fingerprint(model: nn.Module) -> str:
    """sha256 over the architecture and a sample of every parameter: tells models apart, not copies of one.

    Values are compared in bf16, so that loading one checkpoint in fp32, bf16 or fp16 gives one fingerprint.
    """
    samples = {name: fingerprint_sample(parameter) for name, parameter in model.named_parameters()}
    return fingerprint_of(model, samples)


def stream_fingerprint(stream: ModelStream, look: Callable[[str, Tensor], None] | None = None) -> str:
    """``fingerprint`` of a stream, every part of which is read once. look: is shown each parameter on the way."""
    samples = {}
    for prefix in track(stream.parts(), "reading the weights", total=len(stream.blocks) + 1):
        for name, parameter in stream.model.named_parameters():
            if stream.owner(name) == prefix:
                samples[name] = fingerprint_sample(parameter)
                if look is not None:
                    look(name, parameter.detach())
    return fingerprint_of(stream.model, samples)


def fingerprint_sample(parameter: Tensor) -> bytes:
    """What the fingerprint holds of one parameter's values."""
    import torch

    values = parameter.detach().reshape(-1)
    sample = values[:: max(1, values.numel() // FINGERPRINT_VALUES)][:FINGERPRINT_VALUES]
    return sample.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()


def fingerprint_of(model: nn.Module, samples: Mapping[str, bytes]) -> str:
    """The fingerprint of a model whose parameters, wherever they are, gave these samples."""
    digest = hashlib.sha256(str(getattr(getattr(model, "config", None), "model_type", "")).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(samples[name])
    return digest.hexdigest()


def _check_folder(folder: Path) -> None:
    read_config(str(folder))
    odd = next((path for path in sorted(folder.iterdir()) if is_stream(path)), None)
    if odd is not None:  # a library would wait for a pipe to say something
        raise ModelError(f"model {folder}: {odd.name} is no regular file")
    if not any(path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)):
        raise ModelError(f"model {folder}: no weights (*.safetensors) beside config.json")


def _is_cached(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def _check_complete(model: str, report: dict[str, Any], *, strangers: bool) -> None:
    """transformers fills missing weights with random numbers and only warns; a quantizer must not start from those.

    strangers: whether weights that the model does not know are let pass, which many published models carry.
    """
    mismatched = {entry[0] if isinstance(entry, tuple) else entry for entry in report["mismatched_keys"]}
    unknown = set() if strangers else set(report["unexpected_keys"])
    problems = {"missing": set(report["missing_keys"]), "of the wrong shape": mismatched, "unknown": unknown}
    for problem, names in problems.items():
        if names:
            raise ModelError(f"model {model}: {len(names)} weights are {problem}, e.g. {min(names)}")


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn what transformers and safetensors raise, and log besides, for bad input into a one-line ModelError."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with refusing(f"{what} cannot be loaded", ModelError):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
