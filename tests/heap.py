"""What makes tests quick that make a thousand engines: conftest.py imports it."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

_trees: weakref.WeakKeyDictionary[Any, dict[Any, bytes]] = weakref.WeakKeyDictionary()  # of each registry
_ABOUT_CONFIG = ("config", "cli", "plugins")  # folders whose tests ask Hydra each time


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> None:
    """Each engine's start and end collect garbage; what is there before a file's tests, half a million objects of the
    libraries, need not be looked at each time. What files import comes bit by bit: each freezes anew."""
    gc.collect()
    gc.freeze()


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
