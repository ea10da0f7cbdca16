"""The export job: read a quantkit checkpoint and write it for another engine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import CheckpointError, OutputError, refusing
from quantkit.exchange.export import plan_export, write_export
from quantkit.exchange.exported import opened_checkpoint
from quantkit.exchange.targets import TARGETS
from quantkit.storage.output import output_folder

_WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True)
class ExportResult:
    """What the job did. exact, rounding: as of ConvertResult."""

    folder: Path
    layers: int
    exact: int
    rounding: float
    bytes: int
    seconds: float


def export_model(checkpoint: Path, out: Path, *, to: str, exact: bool = False) -> ExportResult:
    """Write a checkpoint in another format to ``out``, a new folder; every layer is checked before the first is read.

    Raises CheckpointError for an unknown format, a damaged checkpoint or one that the format does not hold, and
    OutputError.
    """
    if to not in TARGETS:
        raise CheckpointError(f"`to` is {to!r}; known: {', '.join(TARGETS)}")
    started = time.perf_counter()
    with (
        output_folder(out, replace=False, foreign=None, source=checkpoint) as output,
        opened_checkpoint(checkpoint) as source,
    ):
        made = plan_export(source, to, exact=exact)
        with refusing(f"output {out} cannot be written", OutputError):
            write_export(source, made, output.work)
        output.publish()
    roundings = made.roundings.values()
    return ExportResult(
        folder=out,
        layers=len(roundings),
        exact=sum(rounding == 0 for rounding in roundings),
        rounding=max(roundings),
        bytes=sum(path.stat().st_size for path in out.iterdir() if path.suffix in _WEIGHTS),
        seconds=time.perf_counter() - started,
    )
