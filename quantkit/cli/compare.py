"""``quantkit compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.common import (
    ActivationsOption,
    DeviceOption,
    JsonOption,
    check_json_path,
    chosen_device,
    print_table,
    write_json,
)
from quantkit.storage.output import write_file


def compare(
    models: Annotated[list[str], typer.Argument(help="Folders, hub ids or smollm2-135m; the first is the reference.")],
    text: Annotated[str, typer.Option(help="A .txt, .jsonl or .parquet file, or wikitext2, c4 or pydoc.")],
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens per window; by default 2048, at most the models' positions.")
    ] = None,
    max_windows: Annotated[int | None, typer.Option(help="Read only the first windows of the text.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Also these tasks, comma-separated; see eval tasks.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the tasks' local .jsonl files.")] = None,
    device: DeviceOption = None,
    activations: ActivationsOption = "fp32",
    html: Annotated[Path | None, typer.Option(help="Also write the table as an HTML page.")] = None,
    json_path: JsonOption = None,
) -> None:
    """One table of several models: size, perplexity, divergence, tasks and time per token."""
    check_json_path(json_path)
    check_json_path(html, "--html")
    from quantkit.data.corpora import DATASETS, check_text, load_text

    dataset, file = (text, None) if text in DATASETS else (None, Path(text))
    check_text(dataset, file)
    from quantkit.evaluation.perplexity import check_options
    from quantkit.evaluation.tasks import TaskOptions
    from quantkit.jobs.compare import check_models, comparison_table
    from quantkit.jobs.compare import compare as measure
    from quantkit.models.streaming import activations_dtype

    activations_dtype(activations)
    check_options("gptq", seq_len=seq_len, max_windows=max_windows)
    options = TaskOptions(tuple(tasks.split(",")), data_dir=data_dir) if tasks is not None else None
    check_models(models, options)
    corpus = load_text(dataset, file, split="test")
    result = measure(
        models,
        corpus,
        seq_len=seq_len,
        max_windows=max_windows,
        tasks=options,
        device=chosen_device(device),
        activations=activations,
    )
    document = result.to_json()
    columns, rows = comparison_table(document)
    print_table(f"{corpus.name}, {result.rows[0].divergence.tokens} tokens", columns, rows)
    write_json(json_path, document)
    if html is not None:
        from quantkit.report.page import comparison_section, document_html

        title = "quantkit compare"
        section = comparison_section(corpus.name, document, figures=False)
        write_file(html, document_html(title, [section]).encode(), "--html")
