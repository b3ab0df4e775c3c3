"""Hydra without its global state: composing inside another Hydra app or a notebook leaves the host unchanged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.RLock()


@contextmanager
def private_hydra() -> Iterator[Any]:
    """Swap in our own set of Hydra's singletons, under a lock; yields its ConfigStore, with Hydra's own configs."""
    import hydra.conf  # noqa: F401
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from hydra.core.singleton import Singleton
    from omegaconf.basecontainer import BaseContainer

    with _lock:
        # Hydra's own configs are stored once, when its modules and plugins are first imported: that has to happen
        # in the host's set, or the host would never see them.
        Plugins.instance()
        instances, resolvers = Singleton._instances, dict(BaseContainer._resolvers)
        store = ConfigStore.__new__(ConfigStore)
        store.repo = {
            k: v for k, v in ConfigStore.instance().repo.items() if k in ("hydra", "_dummy_empty_config_.yaml")
        }
        shared = {kind: instances[kind] for kind in (Plugins, SourcesRegistry)}  # the result of discovery, read-only
        Singleton._instances = {**shared, ConfigStore: store}  # type: ignore[dict-item]
        try:
            yield store
        finally:
            Singleton._instances = instances
            BaseContainer._resolvers = resolvers
