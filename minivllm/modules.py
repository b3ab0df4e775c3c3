"""Which modules could be imported, found out without importing them."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec


def exists(module: str) -> bool:
    """Whether a module can be found, without importing the parents of a dotted name as ``find_spec`` does."""
    if module in sys.modules:
        return sys.modules[module] is not None
    top, *rest = module.split(".")
    try:
        spec: ModuleSpec | None = find_spec(top)
        path = top
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return False
            path = f"{path}.{part}"
            spec = PathFinder.find_spec(path, list(spec.submodule_search_locations))
    except (ImportError, ValueError):
        return False
    return spec is not None
