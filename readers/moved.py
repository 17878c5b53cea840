"""Moved modules: their old names can be imported for one release, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_FRAMEWORKS = ("grain", "lightning", "notebook", "timm", "transformers")
MOVED = {
    **{f"readers.{name}": f"readers.frameworks.{name}" for name in _FRAMEWORKS},
    "readers.position": "readers.loop",
    "readers.index": "readers.table",
    "readers.names": "readers.layout",
    "readers.remote": "readers.opening.remote",
    "readers.sample": "readers.table",
    "readers.strings": "readers.table",
    "readers.tree": "readers.opening.tree",
}


class _Moved(MetaPathFinder, Loader):
    """Finds modules by their old names and loads them from their new place."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} has moved to {MOVED[spec.name]}", DeprecationWarning, stacklevel=2)
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(MOVED[module.__name__])


sys.meta_path.insert(0, _Moved())
