"""``quantkit calibrate``."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.common import (
    ActivationsOption,
    DeviceOption,
    JsonOption,
    RestartOption,
    check_json_path,
    chosen_device,
    print_facts,
    write_json,
)
from quantkit.errors import CalibrationError, DataError, DeviceError
from quantkit.ranks import joined, rank_count
from quantkit.storage.output import output_file
from quantkit.storage.place import checked_place

if TYPE_CHECKING:
    from quantkit.calibration.artifact import Calibration


def calibrate(
    out: Annotated[Path, typer.Option("--out", "-o", help="Artifact to write (.safetensors); must not exist.")],
    model: Annotated[str | None, typer.Argument(help="Hub id, folder, or smollm2-135m (the demo model).")] = None,
    dataset: Annotated[str | None, typer.Option(help="wikitext2, c4 or pydoc (needs no network).")] = None,
    text: Annotated[Path | None, typer.Option(help="Local text: .txt, .jsonl or .parquet (column 'text').")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows to draw, without overlap.")] = 128,
    written: Annotated[
        int,
        typer.Option(
            min=0,
            help="Of the windows, so many that the model writes itself, drawn from its own predictions; where it "
            "writes all, no text is needed.",
        ),
    ] = 0,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 2048,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of windows and of the sampled rows.")] = 0,
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Find tokens that take massive channels, for recipes with prefix: auto.")
    ] = False,
    saliency: Annotated[
        int,
        typer.Option(
            min=0,
            help="Groups of output channels per Linear whose gradients are kept, for recipes with hessian: end_loss.",
        ),
    ] = 0,
    merge: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="Merge two artifacts of one model instead.")
    ] = None,
    device: DeviceOption = None,
    activations: ActivationsOption = "fp32",
    restart: RestartOption = False,
    json_path: JsonOption = None,
) -> None:
    """Collect the statistics that quantization methods need, or merge two such artifacts.

    One decoder block is in memory at a time. A run that was cut short goes on where it was.
    """
    if out.suffix != ".safetensors":
        raise CalibrationError(f"--out {out}: the artifact is a .safetensors file; give it that suffix")
    check_json_path(json_path)
    if merge is not None:
        if model is not None or dataset is not None or text is not None or written:
            raise CalibrationError("--merge A B takes no model, no text and no --written; all stand in the artifacts")
        if rank_count() > 1:
            raise DeviceError("--merge runs as one process; start it without torchrun or accelerate launch")
        with output_file(out) as work:
            result = _merged(*merge)
            _write(result, work, out)
        _show(result, out, json_path)
        return
    if model is None:
        raise DataError("name a MODEL to calibrate, or two artifacts with --merge A B")
    with joined(chosen_device(device)) as (ranks, own), ExitStack() as stack:
        work = ranks.lead(lambda: stack.enter_context(output_file(out)))
        from quantkit.data.corpora import check_drawn, load_text
        from quantkit.models.loading import open_stream, resolve_model

        reads = check_drawn(dataset, text, windows=windows, written=written)
        resolve_model(model)
        corpus = load_text(dataset, text, split="train") if reads else None
        import torch

        from quantkit.calibration.runner import calibrate as collect
        from quantkit.models.streaming import activations_dtype
        from quantkit.runtime.writing import written_by
        from quantkit.storage.resume import workspace

        hidden = activations_dtype(activations)
        stream, tokenizer = open_stream(model, dtype=torch.float32, device=own)
        found = collect(
            stream,
            tokenizer,
            corpus,
            name=model,
            windows=windows,
            seq_len=seq_len,
            seed=seed,
            written=written_by(stream, tokenizer, written, seq_len, seed=seed),
            activations=hidden,
            prefix=prefix,
            saliency=saliency,
            keep=partial(workspace, checked_place(out, "output"), restart=restart),
            ranks=ranks,
        )
        if found is None:
            return
        _write(found, work, out)
    _show(found, out, json_path)


def _write(result: Calibration, work: Path, out: Path) -> None:
    from quantkit.calibration.artifact import write_calibration

    write_calibration(result, work, f"--out {out}")


def _merged(first: Path, second: Path) -> Calibration:
    from quantkit.calibration.artifact import load_calibration, merge

    return merge(load_calibration(first), load_calibration(second))


def _show(result: Calibration, out: Path, json_path: Path | None) -> None:
    meta = result.meta
    print_facts(
        {
            "artifact": f"{out} ({out.stat().st_size / 1e6:.1f} MB)",
            "model": meta.model,
            "layers": str(len(result.layers)),
            "tokens": f"{meta.tokens} ({len(result.windows)} windows of {meta.seq_len})",
            "text": ", ".join(f"{source.name} (sha256 {source.sha256}, seed {source.seed})" for source in meta.texts),
            **({"saliency": f"{meta.saliency} groups of output channels"} if meta.saliency else {}),
            **({} if meta.prefix is None else {"prefix": _prefix_words(meta.prefix)}),
        }
    )
    write_json(
        json_path,
        {
            "artifact": str(out),
            "bytes": out.stat().st_size,
            "model": meta.model,
            "layers": len(result.layers),
            "windows": len(result.windows),
            "seq_len": meta.seq_len,
            "tokens": meta.tokens,
            "texts": [asdict(source) for source in meta.texts],
            "prefix": None if meta.prefix is None else list(meta.prefix),
            "saliency": meta.saliency,
        },
    )


def _prefix_words(tokens: tuple[int, ...]) -> str:
    return f"tokens {', '.join(map(str, tokens))}" if tokens else "none: no token sticks out of the texts by much"
