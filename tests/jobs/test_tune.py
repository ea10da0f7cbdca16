"""The tune section of a recipe: a further piece of the work, refused where it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.checkpoint.read import read_report
from quantkit.errors import RecipeError
from quantkit.formats.bcq import BcqSpec
from quantkit.jobs.search import search_settings
from quantkit.models.loading import load_model
from quantkit.nn.quantized_linear import QuantizedLinear
from tests.cli.calls import refusal, run
from tests.jobs.test_resume import blocks_read, cut_short, folder_content, interrupt

Folders = Callable[[str], Path]
TUNED = (
    "--set",
    "group_size=32",
    "--set",
    "weight_bits=2",
    "--set",
    "tune={epochs: 3, batch: 2, rate: 0.01, codes: true}",
)


def command(family: str, tiny_model: Folders, calibrated: Folders, *more: str, recipe: str = "bcq-w4-g128") -> list:
    return ["quantize", tiny_model(family), "--recipe", recipe, "--calibration", calibrated(family), *TUNED, *more]


@pytest.mark.parametrize("family", ["llama", "opt", "mixtral", "gpt_oss"])
def test_a_tuned_checkpoint_has_the_same_form_and_the_loss_that_it_reports(
    family: str, tiny_model: Folders, calibrated: Folders, tmp_path: Path
) -> None:
    arguments = command(family, tiny_model, calibrated)
    assert run(*arguments, "-o", tmp_path / "tuned").exit_code == 0
    assert run(*arguments, "--set", "tune=null", "-o", tmp_path / "plain").exit_code == 0
    report = read_report(tmp_path / "tuned")["tuning"]
    assert report["kept"] > 0
    assert report["after"] == min(report["passes"]) < report["before"]
    assert "tuning" not in read_report(tmp_path / "plain")
    plain, tuned = (load_model(str(tmp_path / name), dtype=torch.float32)[0] for name in ("plain", "tuned"))
    linears = {name for name, module in plain.named_modules() if isinstance(module, QuantizedLinear)}
    others = plain.state_dict()
    changed = {name for name, tensor in tuned.state_dict().items() if not torch.equal(tensor, others[name])}
    assert linears & {name.rpartition(".")[0] for name in changed}
    embeddings = {name for name, tensor in others.items() if "embed" in name and tensor.ndim == 2}
    assert embeddings
    assert not embeddings & changed


@pytest.mark.parametrize("pieces", [2, 4], ids=["blocks", "tuned"])
def test_tuning_is_gone_on_with_to_the_same_bytes(
    pieces: int, tiny_model: Folders, calibrated: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = command("opt", tiny_model, calibrated)
    assert run(*arguments, "-o", tmp_path / "whole").exit_code == 0
    with monkeypatch.context() as patch:
        cut_short(patch, pieces, interrupt)
        run(*arguments, "-o", tmp_path / "parts")
    quantized = blocks_read(monkeypatch)
    again = run(*arguments, "-o", tmp_path / "parts")
    assert again.exit_code == 0, again.stderr
    assert len(quantized) == max(0, 3 - pieces)
    assert folder_content(tmp_path / "parts") == folder_content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("recipe", "more", "message"),
    [
        ("bipolar-w4a8", (), "tune is for methods that store the bcq format"),
        ("rtn-w4-g128", ("--set", "zero=integer"), "tune leaves no uniform grid"),
        ("rtn-w4-g128", ("--set", "attention_bits=8"), "tune does not go with attention_bits"),
        ("rtn-w4-g128", ("--set", "tune.epoch=3"), "tune has no setting 'epoch'"),
        ("rtn-w4-g128", ("--set", "tune=3"), "tune is 3; it is a mapping"),
    ],
    ids=["format", "grid", "attention", "setting", "no-mapping"],
)
def test_tuning_that_cannot_be_is_refused_before_the_work(
    recipe: str, more: tuple[str, ...], message: str, tiny_model: Folders, calibrated: Folders, tmp_path: Path
) -> None:
    sizes = ("--set", "group_size=-1") if recipe.startswith("bipolar") else ()
    arguments = command("llama", tiny_model, calibrated, *sizes, *more, recipe=recipe)
    assert message in refusal(*arguments, "-o", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_tuning_needs_calibration_text(tiny_model: Folders, tmp_path: Path) -> None:
    arguments = ["quantize", tiny_model("llama"), "--recipe", "rtn-w4-g128", "--set", "tune={}"]
    assert "tune needs a calibration artifact" in refusal(*arguments, "-o", tmp_path / "out")


def test_a_rotated_model_is_tuned_against_the_rotated_original(
    tiny_model: Folders, calibrated: Folders, tmp_path: Path
) -> None:
    """Codes start from the rotated weights: those of the original model would make the first pass worse."""
    arguments = command("llama", tiny_model, calibrated, "--set", "rotate=true", "--set", "weight_bits=4")
    assert run(*arguments, "-o", tmp_path / "out").exit_code == 0
    report = read_report(tmp_path / "out")
    assert report["transforms"]["bcq"]["rotated"] == 72
    assert report["tuning"]["after"] < report["tuning"]["before"]


def test_too_little_memory_for_tuning_is_refused(
    tiny_model: Folders, calibrated: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Little:
        available = 1000

    monkeypatch.setattr("quantkit.jobs.estimate.psutil.virtual_memory", Little)
    message = refusal(*command("llama", tiny_model, calibrated), "-o", tmp_path / "out")
    assert "leave tune.codes or all of tune out" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("setting", ["tune={}", "rotate=true"])
def test_the_search_refuses_what_it_would_not_carry_out(setting: str) -> None:
    with pytest.raises(RecipeError, match=f"`settings` {setting.split('=')[0]}"):
        search_settings([setting])


def test_tuning_keeps_the_spec(tiny_model: Folders, calibrated: Folders, tmp_path: Path) -> None:
    run(*command("opt", tiny_model, calibrated, "--set", "scale_bits=8"), "-o", tmp_path / "out")
    model, _ = load_model(str(tmp_path / "out"), dtype=torch.float32)
    specs = {module.spec for module in model.modules() if isinstance(module, QuantizedLinear)}
    assert specs == {BcqSpec(2, 32, True, 8)}
