"""Registers quantkit with transformers at the moment transformers' quantizers are imported, not before.

``import quantkit`` must be enough for ``AutoModelForCausalLM.from_pretrained``, and must not cost the seconds that
importing torch and transformers takes.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

_TRIGGER = "transformers.quantizers.auto"


class _RegisterAfterImport(importlib.abc.MetaPathFinder):
    """Finds only the trigger module, and wraps its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TRIGGER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs the module's own loader, then registers."""

    def __init__(self, inner: importlib.abc.Loader):
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        _register()


def _register() -> None:
    importlib.import_module("quantkit.integrations.transformers")  # registers at its end


def when_transformers_loads() -> None:
    """Register now if transformers' quantizers are already there, else as soon as they are imported."""
    if _TRIGGER in sys.modules:
        _register()
    elif not any(isinstance(finder, _RegisterAfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterAfterImport())
