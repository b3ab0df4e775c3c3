"""What makes tests quick that make a thousand engines: conftest.py imports it."""

from __future__ import annotations

import gc
import pickle
import sys
import weakref
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

_modules = 0  # that were imported when the heap was last frozen
_trees: weakref.WeakKeyDictionary[Any, dict[Any, bytes]] = weakref.WeakKeyDictionary()  # of each registry
_ABOUT_CONFIG = ("config", "cli", "plugins")  # folders whose tests ask Hydra each time


def _freeze() -> None:
    global _modules
    gc.collect()
    gc.freeze()
    _modules = len(sys.modules)


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> Iterator[None]:
    """Each engine's start and end collect garbage; what is there before a file's tests, half a million objects of the
    libraries, need not be looked at each time. What files import comes bit by bit: each freezes anew. That something is
    frozen is not found out by counting all that is."""
    from minivllm.core import garbage

    _freeze()
    known = SimpleNamespace(**vars(gc) | {"get_freeze_count": lambda: 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage, "gc", known)
        yield


@pytest.fixture(autouse=True)
def imports_frozen() -> Iterator[None]:
    """What a test was the first to import, too."""
    yield
    if len(sys.modules) > _modules + 50:
        _freeze()


@pytest.fixture(autouse=True, scope="module")
def configs_composed_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hydra takes most of a small engine's start. Of the same overrides it has to make the same, which tests of configs
    see; all others are given what it made before."""
    if request.path.parent.name in _ABOUT_CONFIG:
        yield
        return
    from minivllm.config import compose
    from minivllm.config.conf_dir import conf_dir

    compose_tree = compose.compose_tree

    def compose_once(final: Mapping[str, str], schema: type, registry: Any) -> Any:
        known = _trees.setdefault(registry, {})
        key = (*final.items(), schema, str(conf_dir()))
        if key not in known:
            known[key] = pickle.dumps(compose_tree(final, schema, registry))
        return pickle.loads(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "compose_tree", compose_once)
        yield
