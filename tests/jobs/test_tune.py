"""The tune section of a recipe: a further piece of the work, refused where it cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calibration.artifact import load_calibration
from quantkit.checkpoint.read import read_report
from quantkit.errors import KernelError, RecipeError
from quantkit.evaluation.divergence import score_logits
from quantkit.formats.bcq import BcqSpec
from quantkit.jobs.search import search_settings
from quantkit.models.families import decoder_blocks
from quantkit.models.loading import load_model
from quantkit.models.logits import log_probabilities
from quantkit.models.streaming import BlockInputs, run_block
from quantkit.models.structure import embedding_matrices
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.tuning.block import tune_block
from quantkit.tuning.optimize import split_windows
from quantkit.tuning.settings import TuneSettings
from quantkit.tuning.whole_model import divergence_loss
from tests.cli.calls import refusal, run
from tests.jobs.test_resume import blocks_read, cut_short, folder_content, interrupt

Folders = Callable[[str], Path]
LOSS_RTOL = 1e-3  # fp32 products of other shapes; the held-out loss is a mean of small differences
TUNE = "tune={epochs: 3, batch: 2, rate: 0.01, codes: true}"
TUNED = ("--set", "group_size=32", "--set", "weight_bits=2", "--set", TUNE)


def command(family: str, tiny_model: Folders, calibrated: Folders, *more: str, recipe: str = "bcq-w4-g128") -> list:
    quick = ("--set", "rounds=2") if recipe.startswith("bcq") else ()  # tuning makes up for what is left over
    arguments = ["quantize", tiny_model(family), "--recipe", recipe, "--calibration", calibrated(family)]
    return [*arguments, *quick, *TUNED, *more]


def losses(report: dict[str, float]) -> str:
    return "{before:.4g} -> {after:.4g} ({seen:.4g} on windows tuned on)".format_map(report)


@pytest.mark.parametrize("family", ["llama", "opt", "mixtral", "gpt_oss"])
def test_a_tuned_checkpoint_has_the_same_form_and_the_loss_that_it_reports(
    family: str, tiny_model: Folders, calibrated: Folders, tmp_path: Path
) -> None:
    arguments = command(family, tiny_model, calibrated)
    result = run(*arguments, "-o", tmp_path / "tuned", "--json", tmp_path / "tuned.json")
    assert run(*arguments, "--set", "tune=null", "-o", tmp_path / "plain").exit_code == 0
    report = read_report(tmp_path / "tuned")["tuning"]
    assert f"held-out loss {losses(report)}, pass {report['kept']} of " in result.stdout
    assert json.loads((tmp_path / "tuned.json").read_text())["tuning"] == report
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


def test_tuning_that_gains_nothing_says_so(tiny_model: Folders, calibrated: Folders, tmp_path: Path) -> None:
    result = run(*command("llama", tiny_model, calibrated, "--set", "tune.rate=100"), "-o", tmp_path / "out")
    report = read_report(tmp_path / "out")["tuning"]
    assert report["after"] == report["before"]
    assert f"held-out loss {losses(report)}, no pass kept" in result.stdout


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"], ids=["tied", "apart"])
def test_tuned_embeddings_are_those_of_the_checkpoint(
    family: str, tiny_model: Folders, calibrated: Folders, tmp_path: Path
) -> None:
    """Read back, the model has the loss that the report tells, which is that of embeddings in the model's own dtype."""
    arguments = command(family, tiny_model, calibrated, "--set", "tune.embeddings=true")
    assert run(*arguments, "-o", tmp_path / "tuned").exit_code == 0
    report = read_report(tmp_path / "tuned")["tuning"]
    original, _ = load_model(str(tiny_model(family)), dtype=torch.float32)
    tuned, _ = load_model(str(tmp_path / "tuned"), dtype=torch.float32)
    before, after = (embedding_matrices(model) for model in (original, tuned))
    assert list(before) == list(after)
    for name, matrix in after.items():
        assert not torch.equal(matrix, before[name]), name
    windows = load_calibration(calibrated(family)).windows
    held_out = windows[split_windows(len(windows), TuneSettings().held_out)[1]]
    with torch.no_grad():
        loss = divergence_loss(log_probabilities(original, held_out), tuned, held_out).item()
    assert loss == pytest.approx(report["after"], rel=LOSS_RTOL)


@pytest.fixture(scope="module")
def tuned_opt(tiny_model: Folders, calibrated: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``command("opt", ...)`` writes in one go."""
    out = tmp_path_factory.mktemp("tuned") / "opt"
    assert run(*command("opt", tiny_model, calibrated), "-o", out).exit_code == 0
    return out


@pytest.mark.parametrize("pieces", [2, 4], ids=["blocks", "tuned"])
def test_tuning_is_gone_on_with_to_the_same_bytes(
    pieces: int,
    tuned_opt: Path,
    tiny_model: Folders,
    calibrated: Folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = command("opt", tiny_model, calibrated)
    with monkeypatch.context() as patch:
        cut_short(patch, pieces, interrupt)
        run(*arguments, "-o", tmp_path / "parts")
    quantized = blocks_read(monkeypatch)
    again = run(*arguments, "-o", tmp_path / "parts")
    assert again.exit_code == 0, again.stderr
    assert len(quantized) == max(0, 3 - pieces)
    assert folder_content(tmp_path / "parts") == folder_content(tuned_opt)


QUICKLY = ("--set", "compensate=true", "--set", "sweeps=0")
BLOCKS = ("--set", "tune={blocks: 3, epochs: 0, batch: 2, rate: 0.01}")
CODES = ("--set", "tune.block_codes=true")


@pytest.mark.parametrize(
    ("family", "more"),
    [("llama", ()), ("mixtral", ()), ("opt", CODES), ("gpt_oss", CODES)],
    ids=["llama", "mixtral", "opt-codes", "gpt_oss-codes"],
)
def test_blocks_are_tuned_one_by_one(
    family: str, more: tuple[str, ...], tiny_model: Folders, calibrated: Folders, tmp_path: Path
) -> None:
    arguments = command(family, tiny_model, calibrated, *QUICKLY, *BLOCKS, *more)
    assert run(*arguments, "-o", tmp_path / "tuned").exit_code == 0
    report = read_report(tmp_path / "tuned")
    assert "tuning" not in report
    assert len(report["tuned_blocks"]) == 2
    assert all(block["after"] <= block["before"] for block in report["tuned_blocks"].values())
    assert any(block["kept"] > 0 for block in report["tuned_blocks"].values())


@pytest.mark.parametrize(
    ("family", "more"),
    [("llama", ()), ("mixtral", ()), ("llama", ("--set", "rotate=true"))],
    ids=["llama", "mixtral", "llama-rotated"],
)
def test_the_last_block_is_tuned_by_its_predictions_where_that_is_asked_for(
    family: str, more: tuple[str, ...], tiny_model: Folders, calibrated: Folders, tmp_path: Path
) -> None:
    arguments = command(family, tiny_model, calibrated, *QUICKLY, *BLOCKS, *more)
    plain = run(*arguments, "-o", tmp_path / "plain")
    tuned = run(*arguments, "--set", "tune.logits=true", "-o", tmp_path / "tuned")
    assert (plain.exit_code, tuned.exit_code) == (0, 0), tuned.stderr
    assert [line.split(", ")[1].split()[1] for line in tuned.stderr.splitlines() if "tuned in" in line] == [
        "error",
        "divergence",
    ]
    (first, last), (other, by_predictions) = (
        read_report(tmp_path / name)["tuned_blocks"].values() for name in ("plain", "tuned")
    )
    assert first == other
    assert last != by_predictions
    assert by_predictions["after"] <= by_predictions["before"]
    assert by_predictions["kept"] > 0 or more  # rotated, so tiny a model is not improved
    original, loaded = (load_model(str(folder))[0] for folder in (tiny_model(family), tmp_path / "tuned"))
    window = load_calibration(calibrated(family)).windows[0].long()
    with torch.no_grad():
        scores = score_logits(*(model(window[None]).logits[0, :-1] for model in (original, loaded)), window[1:])
    assert float(scores.kl.mean()) < 2 * by_predictions["before"]  # of all windows, and the head is the model's own


@pytest.mark.parametrize(("family", "more"), [("opt", ()), ("mixtral", CODES)], ids=["opt", "mixtral-codes"])
def test_tuning_blocks_is_gone_on_with_to_the_same_bytes(
    family: str,
    more: tuple[str, ...],
    tiny_model: Folders,
    calibrated: Folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second block's targets come from the original's hidden states, which the first run saved."""
    arguments = command(family, tiny_model, calibrated, *QUICKLY, *BLOCKS, "--set", "tune.blocks=1", *more)
    assert run(*arguments, "-o", tmp_path / "whole").exit_code == 0
    with monkeypatch.context() as patch:
        cut_short(patch, 2, interrupt)
        run(*arguments, "-o", tmp_path / "parts")
    quantized = blocks_read(monkeypatch)
    again = run(*arguments, "-o", tmp_path / "parts")
    assert again.exit_code == 0, again.stderr
    assert quantized == [1]
    assert folder_content(tmp_path / "parts") == folder_content(tmp_path / "whole")


@pytest.mark.parametrize("blend", [1.0, 0.25])
def test_the_target_of_a_block_is_what_the_original_model_gives_or_blended_with_what_the_original_block_would(
    blend: float, tiny_model: Folders, calibrated: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share ``blend`` is of the original's hidden states: so a block makes up for those before it."""
    seen: list[tuple[BlockInputs, torch.Tensor]] = []

    def watched(block: Any, index: int, inputs: Any, targets: torch.Tensor, settings: Any, **more: Any) -> Any:
        seen.append((inputs.with_hidden(inputs.hidden.clone()), targets.clone()))
        return tune_block(block, index, inputs, targets, settings, **more)

    monkeypatch.setattr("quantkit.jobs.tune_blocks.tune_block", watched)
    arguments = command("opt", tiny_model, calibrated, *BLOCKS, "--set", f"tune.blend={blend}")
    assert run(*arguments, "-o", tmp_path / "tuned").exit_code == 0
    original, _ = load_model(str(tiny_model("opt")), dtype=torch.float32)
    windows = load_calibration(calibrated("opt")).windows
    found: list[torch.Tensor] = []
    blocks = [block for _, block in decoder_blocks(original)]
    for block in blocks:
        block.register_forward_hook(lambda _block, _arguments, output: found.append(first_of(output)))
    with torch.no_grad():
        original(windows.long(), use_cache=False)
    assert len(seen) == len(found) == 2
    for index, ((inputs, targets), outputs) in enumerate(zip(seen, list(found), strict=True)):
        own = torch.cat([output for _, output in run_block(blocks[index], inputs, index)])
        torch.testing.assert_close(targets, torch.lerp(own, outputs, blend))
        assert index == 0 or not torch.allclose(own, outputs)


def first_of(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def test_blocks_and_then_the_whole_model_are_tuned(tiny_model: Folders, calibrated: Folders, tmp_path: Path) -> None:
    both = ("--set", "tune={blocks: 2, epochs: 2, batch: 2, rate: 0.01}")
    assert run(*command("llama", tiny_model, calibrated, *both), "-o", tmp_path / "out").exit_code == 0
    report = read_report(tmp_path / "out")
    assert len(report["tuned_blocks"]) == 2
    assert report["tuning"]["after"] <= report["tuning"]["before"]


@pytest.mark.parametrize(
    ("recipe", "more", "message"),
    [
        ("bipolar-w4a8", (), "tune is for methods that store the bcq or the trellis format"),
        ("rtn-w4-g128", ("--set", "zero=integer"), "tune leaves no uniform grid"),
        ("rtn-w4-g128", ("--set", "attention_bits=8"), "tune does not go with attention_bits"),
        ("rtn-w4-g128", ("--set", "tune.epoch=3"), "tune has no setting 'epoch'"),
        ("rtn-w4-g128", ("--set", "tune={blocks: -1}"), "blocks is -1"),
        ("rtn-w4-g128", ("--set", "tune={blocks: 1, blend: 1.5}"), "blend is 1.5; choose a share from 0 to 1"),
        ("rtn-w4-g128", ("--set", "tune={blend: 0.5}"), "blend is 0.5, but blocks is 0"),
        ("rtn-w4-g128", ("--set", "tune={epochs: 0}"), "epochs is 0; choose 1 or more, or 0 with blocks"),
        ("rtn-w4-g128", ("--set", "tune={blocks: 1, epochs: 0, codes: true}"), "codes is true, but epochs is 0"),
        ("rtn-w4-g128", ("--set", "tune={block_codes: true}"), "block_codes is true, but blocks is 0"),
        ("bcq-w4-g128-head6", ("--set", "tune={blocks: 1, logits: true}"), "the model's own head, and head_bits"),
        ("rtn-w4-g128", ("--set", "tune=3"), "tune is 3; it is a mapping"),
    ],
    ids=[
        "format",
        "grid",
        "attention",
        "setting",
        "no-blocks",
        "no-share",
        "blend-of-nothing",
        "nothing",
        "codes",
        "codes-of-no-blocks",
        "logits-of-a-head",
        "no-mapping",
    ],
)
def test_tuning_that_cannot_be_is_refused_before_the_work(
    recipe: str, more: tuple[str, ...], message: str, tiny_model: Folders, calibrated: Folders, tmp_path: Path
) -> None:
    sizes = ("--set", "group_size=-1") if recipe.startswith("bipolar") else ()
    arguments = command("llama", tiny_model, calibrated, *sizes, *more, recipe=recipe)
    assert message in refusal(*arguments, "-o", tmp_path / "out")
    assert not list(tmp_path.iterdir())


TRELLIS = "{schema: 1, method: trellis, settings: {weight_bits: 2, taps: 4, sweeps: 0}, keep: [lm_head]}"


def test_a_checkpoint_of_the_trellis_format_is_tuned(tiny_model: Folders, calibrated: Folders, tmp_path: Path) -> None:
    recipe = tmp_path / "trellis.yaml"
    recipe.write_text(TRELLIS, encoding="utf-8")
    arguments = ["quantize", tiny_model("opt"), "--recipe", recipe, "--calibration", calibrated("opt")]
    both = ("--set", "tune={blocks: 2, epochs: 2, batch: 2, rate: 0.01}")
    codes = ("--set", "tune.codes=true")
    refused = refusal(*arguments, *both, *codes, "-o", tmp_path / "out")
    assert "tune leaves codes of method trellis as they are" in refused
    done = run(*arguments, *both, "-o", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    report = read_report(tmp_path / "out")
    assert all(block["after"] <= block["before"] for block in report["tuned_blocks"].values())
    assert report["tuning"]["after"] < report["tuning"]["before"]
    assert load_model(str(tmp_path / "out"), dtype=torch.float32)


def test_kernels_that_tuning_takes_are_asked_for_before_the_work(
    tiny_model: Folders, calibrated: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(device: torch.device) -> None:
        raise KernelError(f"no kernels on {device}")

    monkeypatch.setattr("quantkit.jobs.tune.check_kernels", missing)
    arguments = command("opt", tiny_model, calibrated)
    assert "no kernels on cpu" in refusal(*arguments, "-o", tmp_path / "out")
    assert not list(tmp_path.iterdir())
    assert run(*arguments, "--set", "tune=null", "-o", tmp_path / "out").exit_code == 0


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
    monkeypatch.setattr("quantkit.jobs.estimate.free_bytes", lambda _device: 1000)
    message = refusal(*command("llama", tiny_model, calibrated), "-o", tmp_path / "out")
    assert "leave tune.codes, tune.embeddings or all of tune out" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("setting", ["tune={}", "hessian=end_loss", "head_bits=6"])
def test_the_search_refuses_what_it_would_not_carry_out(setting: str) -> None:
    with pytest.raises(RecipeError, match=f"`settings` {setting.split('=')[0]}"):
        search_settings([setting])


def test_tuning_keeps_the_spec(tiny_model: Folders, calibrated: Folders, tmp_path: Path) -> None:
    run(*command("opt", tiny_model, calibrated, "--set", "scale_bits=8"), "-o", tmp_path / "out")
    model, _ = load_model(str(tmp_path / "out"), dtype=torch.float32)
    specs = {module.spec for module in model.modules() if isinstance(module, QuantizedLinear)}
    assert specs == {BcqSpec(2, 32, True, 8)}
