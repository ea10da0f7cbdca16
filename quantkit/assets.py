"""Where files are: recipes and CUDA sources, in a wheel or in a checkout; what quantkit keeps in the user's cache."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from quantkit.errors import RecipeError

_PACKAGE = Path(__file__).parent


@cache
def asset_folder(name: str) -> Path:
    """``recipes`` or ``kernels``: inside the installed package, else at the root of the checkout."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def cache_folder() -> Path:
    """quantkit's folder in the user's cache (XDG_CACHE_HOME, else ~/.cache); not created here."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "quantkit"


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in asset_folder("recipes").glob("*.yaml"))


def recipe_path(name_or_file: str) -> Path:
    """Path of a recipe given by shipped name or by file.

    Raises RecipeError listing the shipped names where neither exists.
    """
    shipped = asset_folder("recipes") / f"{name_or_file}.yaml"
    if shipped.is_file():
        return shipped
    path = Path(name_or_file)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return path
    raise RecipeError(
        f"recipe {name_or_file!r}: neither a .yaml file nor a shipped recipe; shipped are {', '.join(recipe_names())}"
    )
