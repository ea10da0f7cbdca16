"""``quantkit eval``: how good a model is, quantized or not."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.common import (
    ActivationsOption,
    DeviceOption,
    JsonOption,
    Program,
    check_json_path,
    chosen_device,
    print_facts,
    print_table,
    write_json,
)

app = typer.Typer(
    cls=Program, help="Measure the quality of a model or of a quantized checkpoint.", no_args_is_help=True
)


@app.command()
def perplexity(
    model: Annotated[str, typer.Argument(help="Hub id, folder (also a quantized one), or smollm2-135m.")],
    dataset: Annotated[str | None, typer.Option(help="wikitext2, c4 or pydoc (needs no network).")] = None,
    text: Annotated[Path | None, typer.Option(help="Local text: .txt, .jsonl or .parquet (column 'text').")] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens per window; by default the recipe's, at most the model's positions.")
    ] = None,
    max_windows: Annotated[int | None, typer.Option(help="Read only the first windows of the text.")] = None,
    recipe: Annotated[str, typer.Option(help="gptq (papers), llamacpp or strided.")] = "gptq",
    device: DeviceOption = None,
    activations: ActivationsOption = "fp32",
    json_path: JsonOption = None,
) -> None:
    """Perplexity on a text: the whole recipe is printed beside the number."""
    check_json_path(json_path)
    from quantkit.data.corpora import check_text, load_text
    from quantkit.models.loading import open_evaluated, resolve_model

    check_text(dataset, text)
    resolve_model(model)
    from quantkit.evaluation.perplexity import check_options
    from quantkit.evaluation.perplexity import perplexity as measure
    from quantkit.models.streaming import activations_dtype

    hidden = activations_dtype(activations)
    check_options(recipe, seq_len=seq_len, max_windows=max_windows)
    corpus = load_text(dataset, text, split="test")
    loaded, tokenizer = open_evaluated(model, device=chosen_device(device))
    result = measure(
        loaded, tokenizer, corpus, seq_len=seq_len, max_windows=max_windows, recipe=recipe, activations=hidden
    )
    print_facts(
        {
            "perplexity": f"{result.perplexity:.4f} +/- {result.stderr:.4f}",
            "recipe": f"{result.recipe}, windows of {result.seq_len}",
            "windows": str(result.windows),
            "tokens": f"{result.tokens} ({result.scored_tokens} scored)",
            "text": f"{result.text} (sha256 {result.text_sha256})",
            "BOS": result.bos,
            "tokenizer": result.tokenizer,
            "took": f"{result.seconds:.1f} s",
        }
    )
    write_json(json_path, {"model": model, **asdict(result)})


@app.command()
def divergence(
    reference: Annotated[str, typer.Argument(help="The model to compare with: hub id, folder or smollm2-135m.")],
    model: Annotated[str, typer.Argument(help="Hub id, folder (also a quantized one), or smollm2-135m.")],
    dataset: Annotated[str | None, typer.Option(help="wikitext2, c4 or pydoc (needs no network).")] = None,
    text: Annotated[Path | None, typer.Option(help="Local text: .txt, .jsonl or .parquet (column 'text').")] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens per window; by default 2048, at most the models' positions.")
    ] = None,
    max_windows: Annotated[int | None, typer.Option(help="Read only the first windows of the text.")] = None,
    device: DeviceOption = None,
    activations: ActivationsOption = "fp32",
    json_path: JsonOption = None,
) -> None:
    """KL divergence per token from a reference model, and how often both rank the same token first."""
    check_json_path(json_path)
    from quantkit.data.corpora import check_text, load_text
    from quantkit.models.loading import open_evaluated, resolve_model

    check_text(dataset, text)
    resolve_model(reference)
    resolve_model(model)
    from quantkit.evaluation.divergence import check_same_tokens
    from quantkit.evaluation.divergence import divergence as measure
    from quantkit.evaluation.perplexity import check_options
    from quantkit.models.streaming import activations_dtype

    hidden = activations_dtype(activations)
    check_options("gptq", seq_len=seq_len, max_windows=max_windows)
    corpus = load_text(dataset, text, split="test")
    loaded_reference, tokenizer = open_evaluated(reference, device=chosen_device(device))
    loaded, own_tokenizer = open_evaluated(model, device=chosen_device(device))
    check_same_tokens(tokenizer, own_tokenizer, corpus)
    result = measure(
        loaded_reference, loaded, tokenizer, corpus, seq_len=seq_len, max_windows=max_windows, activations=hidden
    )
    print_facts(
        {
            "mean KL": f"{result.mean_kl:.5f} +/- {result.mean_kl_stderr:.5f} nats per token",
            "median KL": f"{result.median_kl:.5f} +/- {result.median_kl_stderr:.5f}",
            "90% KL": f"{result.p90_kl:.5f} +/- {result.p90_kl_stderr:.5f}",
            "99% KL": f"{result.p99_kl:.5f} +/- {result.p99_kl_stderr:.5f}",
            "same top token": f"{result.same_top1:.2%} +/- {result.same_top1_stderr:.2%}",
            "perplexity": f"{result.perplexity:.4f} (reference {result.reference_perplexity:.4f})",
            "tokens": f"{result.tokens} in {result.windows} windows of {result.seq_len}",
            "text": f"{result.text} (sha256 {result.text_sha256})",
            "took": f"{result.seconds:.1f} s",
        }
    )
    write_json(json_path, {"reference": reference, "model": model, **asdict(result)})


@app.command()
def tasks(
    model: Annotated[str, typer.Argument(help="Hub id, folder (also a quantized one), or smollm2-135m.")],
    tasks: Annotated[
        str,
        typer.Option(help="Comma-separated, such as lambada_openai,piqa,openbookqa,winogrande,hellaswag."),
    ],
    task_path: Annotated[Path | None, typer.Option(help="Folder of your own lm-eval task YAMLs.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of local .jsonl files for the five tasks above; no network needed.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first examples of every task.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Requests at once; by default 8, on a GPU 64.")] = None,
    device: DeviceOption = None,
    json_path: JsonOption = None,
) -> None:
    """Zero-shot accuracy on tasks, by lm-evaluation-harness, with standard errors."""
    check_json_path(json_path)
    from quantkit.evaluation.tasks import TaskOptions, check_tasks, evaluate_tasks
    from quantkit.models.loading import load_model, resolve_model
    from quantkit.runtime.expanded_weights import expanded_on_cpu

    options = TaskOptions(tuple(tasks.split(",")), task_path, data_dir, limit, batch_size)
    check_tasks(options)
    resolve_model(model)
    loaded, tokenizer = load_model(model, device=chosen_device(device))
    with expanded_on_cpu(loaded):
        scores = evaluate_tasks(loaded, tokenizer, options)
    rows = [
        [s.task, s.metric, f"{s.value:.4f}", "" if s.stderr is None else f"{s.stderr:.4f}", str(s.examples)]
        for s in scores
    ]
    print_table(model, ["task", "metric", "value", "stderr", "examples"], rows)
    write_json(json_path, {"model": model, "scores": [asdict(score) for score in scores]})
