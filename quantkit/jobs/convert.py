"""The conversion job: read a quantized model of another tool and write it as a quantkit checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging

from quantkit.checkpoint.config import bits_per_weight
from quantkit.checkpoint.write import folder_bytes, foreign
from quantkit.errors import CheckpointError, OutputError, refusing
from quantkit.exchange.convert import plan, write
from quantkit.exchange.table import opened_source
from quantkit.integrations.transformers import check_readable
from quantkit.storage.output import output_folder


@dataclass(frozen=True)
class ConvertResult:
    """What the job did.

    method: the source's format. exact: layers whose levels are the source's to the bit. rounding: the largest
    difference of a level elsewhere, over the largest magnitude in its group. notes: what was left out, and of how many
    layers.
    """

    folder: Path
    method: str
    layers: int
    exact: int
    rounding: float
    notes: Mapping[str, int]
    bits_per_weight: float
    bytes: int
    seconds: float
    report: Mapping[str, Mapping[str, Any]]


def convert_model(
    source: Path, out: Path, *, exact: bool = False, weights_only: bool = False, overwrite: bool = False
) -> ConvertResult:
    """Convert a folder to ``out``; everything but the codes is checked before the first is read.

    exact: see exchange.grid.fitted. weights_only: see exchange.table.opened_source.
    Raises CheckpointError for a source that cannot be converted, and OutputError.
    """
    started = time.perf_counter()
    with (
        output_folder(out, replace=overwrite, foreign=foreign, source=source) as output,
        opened_source(source, weights_only=weights_only) as opened,
    ):
        made = plan(opened, output.work, exact=exact)
        with refusing(f"output {out} cannot be written", OutputError):
            write(opened, made, output.work, exact=exact)
        _check_result(output.work, source)
        output.publish()
    reports = made.reports
    notes: dict[str, int] = {}
    for report in reports.values():
        if "note" in report:
            notes[report["note"]] = notes.get(report["note"], 0) + 1
    return ConvertResult(
        folder=out,
        method=opened.method,
        layers=len(reports),
        exact=sum(report["exact"] for report in reports.values()),
        rounding=max(report["rounding"] for report in reports.values()),
        notes=notes,
        bits_per_weight=bits_per_weight(made.config),
        bytes=folder_bytes(out),
        seconds=time.perf_counter() - started,
        report=reports,
    )


def _check_result(folder: Path, source: Path) -> None:
    """Load the result without giving it memory. Raises CheckpointError where the source lacked something."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # what it would report is in the error
    logging.disable_progress_bar()
    try:
        check_readable(folder)
    except CheckpointError as error:
        problem = str(error).replace(f"checkpoint {folder}", "as a checkpoint")
        raise CheckpointError(f"source {source}: does not make a whole model: {problem}") from error
    finally:
        logging.set_verbosity(verbosity)
