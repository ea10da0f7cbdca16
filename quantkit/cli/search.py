"""``quantkit search``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.common import print_facts
from quantkit.errors import RecipeError

if TYPE_CHECKING:
    from quantkit.search.plan import Point


def search(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or smollm2-135m (the demo model).")],
    calibration: Annotated[Path, typer.Option(help="Artifact of 'quantkit calibrate'.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Plan to write, a recipe (.yaml); must not exist.")],
    max_bpw: Annotated[float | None, typer.Option(help="Budget: bits per weight of the quantized layers.")] = None,
    max_bytes: Annotated[str | None, typer.Option(help="Budget: size of all weight files, such as 90MB.")] = None,
    max_kl: Annotated[float | None, typer.Option(help="Budget: measured KL in nats per token; smallest size.")] = None,
    bits: Annotated[
        str | None,
        typer.Option(help="Bit widths to choose from, comma-separated (default 2,3,4,5; method=trellis: 2,3,4)."),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(help="Group sizes to choose from; -1 is the row (default 32,64,128,256,-1; method=trellis: -1)."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="per=layer|type, merged=same|free (same, the default: one choice for q, k, v and for gate, up, "
            "which engines run as one product), measure=LAYERS whose KL is measured, most sensitive first "
            "(default: all; 0: faster), compensate=false (faster, and worse), device (default: the first GPU, else the "
            "CPU), method, keep, or a setting of the method; repeatable.",
        ),
    ] = None,
) -> None:
    """Choose bits and group size of every layer for the best model within a budget."""
    budgets = {"bpw": max_bpw, "bytes": max_bytes, "kl": max_kl}
    given = {kind: value for kind, value in budgets.items() if value is not None}
    if len(given) != 1:
        raise RecipeError("give one budget: --max-bpw, --max-bytes or --max-kl")
    widths = None if bits is None else _integers("--bits", bits)
    sizes = None if groups is None else _integers("--groups", groups)
    from quantkit.jobs.search import Budget, search_settings
    from quantkit.jobs.search import search as find
    from quantkit.search.plan import optimality, option_label
    from quantkit.search.sizes import parse_bytes
    from quantkit.search.table import options_of

    limit = parse_bytes(max_bytes) if max_bytes is not None else max_bpw if max_bpw is not None else max_kl
    assert limit is not None
    chosen = search_settings(settings or ())
    result = find(
        model,
        calibration,
        out,
        budget=Budget("bpw" if max_bpw is not None else "bytes" if max_bytes is not None else "kl", limit),
        options=options_of(chosen.base.method, widths, sizes),
        settings=chosen,
    )
    used: dict[str, int] = {}
    for option in result.plan.options.values():
        used[option_label(option)] = used.get(option_label(option), 0) + 1
    facts = {
        "plan": f"{out} (apply it with quantkit quantize --recipe {out})",
        "layers": ", ".join(f"{count} x {label}" for label, count in sorted(used.items())),
        "bits per weight": f"{result.bits_per_weight:.4f} (codes, scales and offsets of the quantized layers)",
        "size": f"at most {result.bytes} bytes (all weight files)",
        "predicted KL": f"{result.plan.predicted_kl:.5f} nats per token",
        **_uniform_facts(result.uniform),
        "optimality": optimality(result.plan.gap, max_kl is not None),
        "error table": str(result.table_file),
    }
    if result.measured_kl is not None:
        facts["measured KL"] = f"{result.measured_kl:.5f} nats per token, quantized model on calibration text"
    print_facts(facts)


def _uniform_facts(uniform: Point | None) -> dict[str, str]:
    if uniform is None:
        return {}
    label, bits = uniform.label, uniform.bits_per_weight
    return {"all layers alike": f"{label}, {bits:.4f} bits per weight: predicted KL {uniform.predicted_kl:.5f}"}


def _integers(name: str, text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise RecipeError(f"{name} {text}: expected integers separated by commas") from error
    return numbers
