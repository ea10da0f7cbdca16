"""The search job: fill the error table, choose within the budget, write plan.yaml and what it was chosen from."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import quantkit
from quantkit.calibration.artifact import Calibration, check_model, load_calibration
from quantkit.checkpoint.names import stored_names
from quantkit.errors import CalibrationError, ModelError, OutputError, RecipeError, refusing
from quantkit.evaluation.divergence import score_logits
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.methods import METHODS, check_recipe, plan_layers, stored_specs
from quantkit.models.families import block_linears, linear_shape, merged_linears
from quantkit.models.loading import first_device, is_quantized, open_stream, stored_dtype, stream_fingerprint
from quantkit.models.logits import window_logits
from quantkit.models.stream import ModelStream
from quantkit.quantizers.base import ACTIVATIONS, ONLINE
from quantkit.quantizers.rotation import placed_rotations
from quantkit.recipe import SCHEMA, Recipe, parse_recipe, with_settings
from quantkit.search.document import plan_document, plan_recipe, plan_text
from quantkit.search.measure import corrected_losses, measure_layers
from quantkit.search.plan import Mode, Plan, Point, Problem, best_uniform, choose
from quantkit.search.rotated import rotate_parts
from quantkit.search.sizes import fixed_bytes, offset_digits, quantized_bytes, shard_overhead
from quantkit.search.table import (
    CHOSEN,
    ErrorTable,
    LayerMethod,
    Option,
    TableFile,
    build_table,
    check_method,
    option_settings,
    table_path,
)
from quantkit.storage.output import output_file

PLAN_SUFFIXES = (".yaml", ".yml")
_BUDGETS = {"bpw": "bits per weight", "bytes": "bytes", "kl": "nats per token"}
_KL_ROUNDS = 6
_KL_TOKENS = 4096  # calibration tokens on which the promise of a budget of KL is measured
_CLOSE_ENOUGH = 0.9  # a measured KL above this share of the limit is not tried to be used up further


@dataclass(frozen=True)
class Budget:
    """What limits the plan: bits per weight of the quantized layers, bytes of all weight files, or measured KL.

    Raises RecipeError for a limit that is no number above 0.
    """

    kind: Literal["bpw", "bytes", "kl"]
    limit: float

    def __post_init__(self) -> None:
        if not 0 < self.limit < math.inf:
            raise RecipeError(f"a budget of {self.limit} {_BUDGETS[self.kind]} leaves nothing; give a number above 0")


@dataclass(frozen=True)
class SearchSettings:
    """base: the recipe that every layer starts from. per: layer or type. device: where to compute.

    merged: "same" gives Linears that engines run as one product (q, k, v; gate, up) one option, "free" each its own.
    measure: how many of the most sensitive layers have their KL measured; -1 all, 0 none.
    """

    base: Recipe
    per: Mode = "layer"
    measure: int = -1
    device: str = field(default_factory=first_device)
    merged: str = "same"


@dataclass(frozen=True)
class SearchResult:
    """measured_kl: of the model quantized by the plan, on calibration text; only measured within a budget of KL.

    bytes: of the weight files, not exceeded when written. uniform: the best (q, g) for all layers alike that is as
    small, by the same table; None where none is.
    """

    plan: Plan
    bits_per_weight: float
    uniform: Point | None
    bytes: int
    measured_kl: float | None
    table_file: Path


def search_settings(settings: Sequence[str]) -> SearchSettings:
    """Settings from ``key=value``: method and keep, per, merged, measure and device, and the method's own.

    Plans are chosen by what will be written: methods that compensate do so unless ``compensate=false`` says otherwise,
    and inputs of trellis codes are rotated, as its recipes do, unless ``rotate`` or ``rotate_inputs`` says otherwise.
    Raises RecipeError for anything else.
    """
    document = with_settings({"schema": SCHEMA, "method": "bcq", "settings": {}}, settings)
    keys = ("per", "merged", "measure", "device")
    own = {key: document["settings"].pop(key) for key in keys if key in document["settings"]}
    method = METHODS.get(document["method"])
    fields = () if method is None else method.settings.__dataclass_fields__
    if "compensate" in fields:
        document["settings"].setdefault("compensate", True)
    if "taps" in fields and not document["settings"].get("rotate"):
        document["settings"].setdefault("rotate_inputs", True)
    recipe = parse_recipe(document, name="search", where="`settings`")
    if recipe.attention_bits is not None:
        raise RecipeError("`settings` attention_bits: no matter of the search; set it when the plan is applied")
    if recipe.tune is not None:
        raise RecipeError("`settings` tune: no matter of the search; set it when the plan is applied")
    if recipe.settings.get("hessian", ACTIVATIONS) != ACTIVATIONS:
        raise RecipeError("`settings` hessian: the search weighs all tokens alike; set it when the plan is applied")
    if recipe.head_bits is not None:
        raise RecipeError("`settings` head_bits: no matter of the search; set it when the plan is applied")
    for name in CHOSEN:
        if name in recipe.settings and name in fields:
            raise RecipeError(f"`settings` {name}: is what the search chooses; give widths and groups to choose from")
    if own.get("per", "layer") not in ("layer", "type"):
        raise RecipeError(f"`settings` per={own['per']}: choose layer or type")
    if own.get("merged", "same") not in ("same", "free"):
        raise RecipeError(f"`settings` merged={own['merged']}: choose same or free")
    if not isinstance(own.get("measure", -1), int) or isinstance(own.get("measure"), bool):
        raise RecipeError(f"`settings` measure={own['measure']}: expected a number of layers, -1 for all")
    if not isinstance(own.get("device", "cpu"), str):
        raise RecipeError(f"`settings` device={own['device']}: expected cpu, cuda, cuda:1, ...")
    return SearchSettings(recipe, **own)


def search(
    model: str,
    calibration: Path,
    out: Path,
    *,
    budget: Budget,
    options: Sequence[Option],
    settings: SearchSettings,
) -> SearchResult:
    """Find the plan of least predicted KL within the budget (or, for a budget of KL, the smallest) and write it.

    Writes ``out``, a recipe, and beside it the same name with .json: what ``quantkit report`` shows.
    Raises QuantkitError before the long work for impossible input, RecipeError where nothing fits the budget.
    """
    if out.suffix not in PLAN_SUFFIXES:
        raise RecipeError(f"`out` {out}: a plan is a recipe; give it the suffix .yaml")
    # The inner one is written first: where the recipe is, the document is too.
    with output_file(out) as recipe_file, output_file(out.with_suffix(".json")) as document_file:
        source = _open_source(model, calibration, options, settings)
        result, document = _find(source, options, budget)
        recipe = plan_recipe(result.plan, settings.base)
        with refusing(f"`out` {out} cannot be written", OutputError):
            recipe_file.write_text(plan_text(recipe, document, out.with_suffix(".json").name), encoding="utf-8")
            document_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return result


def _open_source(model: str, calibration: Path, options: Sequence[Option], settings: SearchSettings) -> _Source:
    """Load and check everything that the search reads."""
    check_method(settings.base.method)
    check_recipe(_under(settings.base, options[0]))
    if is_quantized(model):
        raise ModelError(f"model {model} is quantized already; give the floating-point original")
    artifact = load_calibration(calibration)
    stream, _ = open_stream(model, dtype=torch.float32, device=settings.device)
    check_model(artifact, stream.model, stream_fingerprint(stream))
    layers, rotated = _planned_layers(stream.model, artifact, options, settings.base)
    method = LayerMethod(settings.base.method, settings.base.settings, rotated)
    cache = TableFile(table_path(artifact, method))
    if rotate := settings.base.settings.get("rotate"):
        artifact = rotate_parts(stream, artifact, values=rotate == ONLINE)
    return _Source(model, calibration, artifact, stream, settings, layers, method, cache)


def _find(source: _Source, options: Sequence[Option], budget: Budget) -> tuple[SearchResult, dict[str, Any]]:
    """Fill the table and choose; (the plan, what it was chosen from)."""
    stream, artifact, settings = source.stream, source.artifact, source.settings
    loaded = stream.model
    method, cache = source.method, source.cache
    table = build_table(stream, artifact, source.layers, options, method=method, cache=cache)
    if settings.measure:
        measure_layers(stream, artifact, table, options, settings.measure, method=method, cache=cache)
        table = build_table(stream, artifact, source.layers, options, method=method, cache=cache)
    merged = merged_linears(loaded) if settings.merged == "same" else []
    problem = Problem(table, options, corrected_losses(table, options), merged)
    files = _file_sizes(loaded, table, source.model, budget)
    plan, measured = _solve(problem, budget, files, source)
    total = files.fixed + int(sum(files.sizes[key] for key in plan.options.items()))
    bits, size = problem.bits_per_weight(plan.stored), total + shard_overhead(total)
    uniform = best_uniform(problem, bits)
    facts = {
        "quantkit": quantkit.__version__,
        "model": source.model,
        "method": method.name,
        "settings": dict(method.settings),
        "per": settings.per,
        "merged": settings.merged,
        "budget": asdict(budget),
        "calibration": artifact.meta.to_json(),
        "bits_per_weight": bits,
        "bytes": size,
        "predicted_kl": plan.predicted_kl,
        "gap": plan.gap,
        "measured_kl": measured,
        "best_uniform": None if uniform is None else asdict(uniform),
    }
    return SearchResult(plan, bits, uniform, size, measured, cache.path), plan_document(problem, plan, facts)


@dataclass(frozen=True)
class _Files:
    """sizes: bytes of each entry in the files. fixed: of everything that is not quantized, and headers."""

    sizes: Mapping[tuple[str, Option], float]
    fixed: int


@dataclass(frozen=True)
class _Source:
    """What a search works on. layers: those to plan. method: what quantizes them. cache: of their errors."""

    model: str
    calibration: Path
    artifact: Calibration
    stream: ModelStream
    settings: SearchSettings
    layers: tuple[str, ...]
    method: LayerMethod
    cache: TableFile


def _file_sizes(loaded: torch.nn.Module, table: ErrorTable, model: str, budget: Budget) -> _Files:
    digits = offset_digits(loaded, budget.limit if budget.kind == "bytes" else math.inf)
    names = stored_names(loaded, table.shapes)
    sizes = {
        (name, option): float(quantized_bytes(names[name], entry.spec, table.shapes[name], digits))
        for (name, option), entry in table.entries.items()
    }
    return _Files(sizes, fixed_bytes(loaded, names.values(), stored_dtype(model), digits))


def _solve(problem: Problem, budget: Budget, files: _Files, source: _Source) -> tuple[Plan, float | None]:
    if budget.kind == "kl":
        return _smallest_within_kl(problem, budget.limit, source)
    return _best_within(problem, budget, files, source.settings.per), None


def _planned_layers(
    model: torch.nn.Module, artifact: Calibration, options: Sequence[Option], base: Recipe
) -> tuple[tuple[str, ...], frozenset[str]]:
    """The layers to plan, and those of them whose inputs are rotated as the model runs.

    Every option is checked against the method's settings and each layer on the way.
    """
    linears = block_linears(model)
    for option in options:
        plans = placed_rotations(model, plan_layers(_under(base, option), list(linears)))
        for name, plan in plans.items():
            stored_specs(name, plan, linear_shape(linears[name]))  # raises for a shape that the method cannot take
    absent = [name for name in plans if name not in artifact.layers]
    if absent:
        raise CalibrationError(f"the calibration artifact has no statistics for {absent[0]}; calibrate again")
    rotated = (name for name, plan in plans.items() if getattr(plan.settings, "rotate_inputs", False))
    return tuple(plans), frozenset(rotated)


def _under(base: Recipe, option: Option) -> Recipe:
    """The recipe by which all layers have an option."""
    return Recipe("search", base.method, {**base.settings, **option_settings(base.method, option)}, base.keep)


def _best_within(problem: Problem, budget: Budget, files: _Files, per: Mode) -> Plan:
    sizes, limit = problem.stored(), budget.limit * problem.weights / 8
    if budget.kind == "bytes":
        sizes, limit = dict(files.sizes), budget.limit - files.fixed - shard_overhead(int(budget.limit))
    plan = choose(problem, sizes, problem.losses, limit, per)
    if plan is None:
        smallest = sum(min(size for (n, _), size in sizes.items() if n == name) for name in problem.table.shapes)
        least = (
            f"{problem.bits_per_weight(smallest):.3f} bits per weight"
            if budget.kind == "bpw"
            else f"{int(smallest) + files.fixed} bytes, {files.fixed} of them unquantized"
        )
        raise RecipeError(f"nothing fits the budget: the smallest choice takes {least}; add fewer bits, larger groups")
    return plan


def _smallest_within_kl(problem: Problem, limit: float, source: _Source) -> tuple[Plan, float]:
    """The smallest plan found whose measured KL keeps the limit, and that KL.

    The predicted limit is moved by the ratio of measured to allowed KL until it is nearly used up.
    """
    by_layer = [[problem.losses[n, o] for n, o in problem.losses if n == name] for name in problem.table.shapes]
    least, most = sum(map(min, by_layer)), sum(map(max, by_layer))
    allowed, best, seen = limit, None, set()
    for _ in range(_KL_ROUNDS):
        allowed = min(max(allowed, least * (1 + 1e-9)), most)
        plan = choose(problem, problem.losses, problem.stored(), allowed, source.settings.per)
        if plan is None or tuple(plan.options.items()) in seen:
            break
        seen.add(tuple(plan.options.items()))
        measured = _measured_kl(plan, source)
        if measured <= limit and (best is None or plan.stored < best[0].stored):
            best = plan, measured
        if _CLOSE_ENOUGH * limit <= measured <= limit:
            break
        allowed *= limit / measured
    if best is None:
        raise RecipeError(f"a KL of {limit} is not kept; the last plan tried measures {measured:.4g}; add more bits")
    return best


def _measured_kl(plan: Plan, source: _Source) -> float:
    """KL of the really quantized model, on calibration windows."""
    settings = source.settings
    with tempfile.TemporaryDirectory(prefix="quantkit-search-") as folder:
        out, recipe = Path(folder) / "model", plan_recipe(plan, settings.base)
        device = settings.device
        quantize_model(
            source.model, recipe, out, calibration=source.calibration, options=QuantizeOptions(device=device)
        )
        quantized, _ = open_stream(str(out), dtype=torch.float32, device=device)
        windows = source.artifact.windows.long()
        used = list(windows[: max(1, _KL_TOKENS // windows.shape[1])])
        logits = window_logits(source.stream, used, "reference"), window_logits(quantized, used, "measuring the plan")
        found = [score_logits(p[:-1], q[:-1], window[1:]).kl for p, q, window in zip(*logits, used, strict=True)]
    return float(torch.cat(found).mean())
