"""What scripts/flattenquant/tables.py measures: the runs of each of the paper's tables."""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("w8a8-per-tensor", "smoothquant", "flatten-o1", "flatten-o2", "flatten-o3")
BETAS, GAMMAS = (1.1, 1.2, 1.3, 1.4, 1.5), (1.7, 1.78, 1.82, 1.84, 1.86, 1.88, 1.9, 1.94, 2.02)
LIMITS = (0.5, 1.0, 2.0, 8.0)
# What a recipe does beyond the paper, undone.
AS_PUBLISHED = {
    "flatten-o1": (
        *("smoothing=sigmoid", "bound_linears=false", "rotate_inputs=false"),
        *("column_price=0", "cover_vocabulary=false", "longer_text=1"),
        *("row_scales=false", "max_flatten_ratio=1"),
    )
}


@dataclass(frozen=True)
class Run:
    """One quantized form of one model: a recipe and its overrides; recipe None is the original."""

    recipe: str | None
    overrides: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[str, ...]:
        """What the recipe is loaded with: the paper's settings, then the overrides."""
        return (*AS_PUBLISHED.get(self.recipe or "", ()), *self.overrides)

    @property
    def key(self) -> str:
        """The name of its row: the recipe and every override."""
        return " ".join((self.recipe or "original", *self.overrides))


# Table -> its runs; the last two are not the paper's, whose ablations (7-10) are of O3.
TABLES: dict[str, tuple[Run, ...]] = {
    "3": (Run(None), *(Run(recipe) for recipe in LEVELS)),
    "7": tuple(Run(r, o) for r in ("flatten-o1", "flatten-o3") for o in ((), ("smoothing=none",))),
    "8": tuple(Run(r, (f"threshold_multiplier={b}",)) for r in ("flatten-o1", "flatten-o3") for b in BETAS),
    "9": tuple(Run(r, o) for r in ("flatten-o1", "flatten-o3") for o in ((), ("outlier_clip=false",))),
    "10": tuple(Run("flatten-o3", (f"kl_ratio_limit={gamma}",)) for gamma in GAMMAS),
    "limit": tuple(Run("flatten-o1", (f"max_flatten_ratio={ratio}",) if ratio != 1.0 else ()) for ratio in LIMITS),
    "order": (Run("flatten-o3"), Run("flatten-o3", ("act_order=true",))),
}
