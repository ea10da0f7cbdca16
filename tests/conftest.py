"""Fixtures: the device to test on, tiny models of every family, text."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Callable, Generator
from pathlib import Path

# On a virtual machine that announces AMX without running it, torch's products in bf16 end the process. oneDNN reads the
# variable when torch is imported (quantkit/cpu.py).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

from quantkit.calibration.artifact import save_calibration
from quantkit.calibration.runner import calibrate
from quantkit.data.corpora import Corpus
from quantkit.models.loading import open_stream
from tests.tiny import sample_text, save_tiny_model

# Tiny tensors gain nothing from more threads, and many processes with a thread per core wait for each other. The
# variable is for the processes that tests start.
if os.environ.setdefault("OMP_NUM_THREADS", "1") == "1":
    torch.set_num_threads(1)


# The same examples in every run, however long one takes: a failure comes of the change, not of the day or the machine.
# The environments of make test-vllm and of GPU machines have no hypothesis, and run tests that need none.
if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("quantkit", deadline=None, derandomize=True)
    settings.load_profile("quantkit")


def _missing_for_cuda() -> str | None:
    if not torch.cuda.is_available():
        return "no NVIDIA GPU on this machine"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _missing_for_cuda()
    for item in items:
        if reason and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Libraries and tests are many objects that stay: to look through them for garbage takes a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests without the mark, and processes that they start, see no GPU: their default device is the CPU everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("cuda") is None:
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setattr(torch.cuda, "device_count", lambda: 0)
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return (yield)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device present: the same test runs on the reference and on the kernels."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> folder of a tiny random model of that family, made once a session; treat it as read-only."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .txt file of about 6000 words."""
    path = tmp_path_factory.mktemp("text") / "sample.txt"
    path.write_text(sample_text(), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    """The text of ``text_file``, there without the package that reads files."""
    return Corpus("sample.txt", (sample_text(),))


@pytest.fixture(scope="session")
def calibrated(
    tiny_model: Callable[[str], Path], corpus: Corpus, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """family -> calibration artifact of its tiny model on ``corpus``, made once a session."""
    made: dict[str, Path] = {}

    def artifact(family: str) -> Path:
        if family not in made:
            stream, tokenizer = open_stream(str(tiny_model(family)))
            result = calibrate(stream, tokenizer, corpus, name=family, windows=8, seq_len=64, seed=0)
            made[family] = tmp_path_factory.mktemp("calibration") / f"{family}.safetensors"
            save_calibration(result, made[family])
        return made[family]

    return artifact
