"""Checkpoints of an earlier version load to the same bits, and the same input still makes the same checkpoints."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quantkit.calibration.artifact import load_calibration
from quantkit.checkpoint.read import read_checkpoint
from quantkit.models.families import block_linears
from quantkit.models.loading import load_model
from tests.golden.write import CALIBRATION, CHECKPOINTS, EXPECTED, ONE_ORDER_OF_SUMS, loaded

FILES = Path(__file__).parent / "files"
LOGIT_RTOL = 1e-5  # fp32 sums of 24 products, in another order on another processor
SCALE_RTOL = 2.0**-22  # two steps of fp32: one was seen between two processors


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """The calibration artifact of the files."""
    path = tmp_path / CALIBRATION
    path.write_bytes(gzip.decompress((FILES / f"{CALIBRATION}.gz").read_bytes()))
    return path


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_an_earlier_checkpoint_loads_to_the_same_weights_and_logits(name: str) -> None:
    expected = load_file(FILES / EXPECTED)
    digest, logits = loaded(FILES / name)
    assert digest == bytes(expected[f"{name}.weights"].tolist()).hex()
    torch.testing.assert_close(logits, expected[f"{name}.logits"], rtol=LOGIT_RTOL, atol=LOGIT_RTOL)


def test_the_files_are_of_as_many_kinds_as_they_say() -> None:
    """Digests of one checkpoint under several names would compare equal above."""
    expected = load_file(FILES / EXPECTED)
    digests = {bytes(expected[f"{name}.weights"].tolist()) for name in CHECKPOINTS}
    assert len(digests) == len(CHECKPOINTS)
    assert read_checkpoint(FILES / "attention").attention
    stored = set(load_file(FILES / "bcq-8-bit-scales" / "model.safetensors"))
    assert any(key.endswith(".scale_factors") for key in stored)


def _same(key: str, after: torch.Tensor, before: torch.Tensor) -> bool:
    """Bit for bit, but for flatten's scales in fp32."""
    if key.endswith(("act_scale", "weight_scale")) and before.dtype == torch.float32:
        return torch.allclose(after, before, rtol=SCALE_RTOL, atol=0)
    return torch.equal(after, before)


def test_the_same_input_makes_the_same_files(tmp_path: Path, artifact: Path) -> None:
    """The model of the files, in the environment that they were written in; one process, so one test."""
    out = tmp_path / "out"
    command = [sys.executable, str(FILES.parent / "write.py"), "checkpoints", "model", str(out)]
    environment = {**os.environ, **ONE_ORDER_OF_SUMS}
    done = subprocess.run(command, cwd=FILES, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pairs = {name: tuple(folder / name / "model.safetensors" for folder in (FILES, out)) for name in CHECKPOINTS}
    for name, files in {**pairs, CALIBRATION: (artifact, out / CALIBRATION)}.items():
        before, after = map(load_file, files)
        added = after.keys() - before.keys()  # calibrations have come to hold the reach of the vocabulary
        assert before.keys() <= after.keys(), name
        assert all(key.endswith(":vocabulary_absmax") for key in added), name
        assert [key for key, tensor in before.items() if not _same(key, after[key], tensor)] == [], name
    for name in CHECKPOINTS:
        old, new = (read_checkpoint(folder / name) for folder in (FILES, out))
        assert (new.layers, new.ignore, new.attention) == (old.layers, old.ignore, old.attention)
    old_meta, new_meta = (load_calibration(path).meta for path in (artifact, out / CALIBRATION))
    assert (new_meta.fingerprint, new_meta.texts) == (old_meta.fingerprint, old_meta.texts)


def test_an_earlier_calibration_holds_what_its_layers_see(artifact: Path) -> None:
    """Every row of the sample was seen: at 24 tokens it is all of them, and the other statistics follow from it."""
    calibration = load_calibration(artifact)
    model, _ = load_model(str(FILES / "model"))
    assert calibration.layers.keys() == block_linears(model).keys()
    for stats in calibration.layers.values():
        assert stats.sample.shape[0] == stats.tokens == 24
        assert torch.equal(stats.absmax, stats.sample.abs().amax(dim=0))
        torch.testing.assert_close(stats.mean_square, stats.sample.square().mean(dim=0))
        assert stats.histogram.sum() == stats.sample.numel()
