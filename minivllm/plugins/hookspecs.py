"""The hooks of the entry-point group ``minivllm``. Each takes no arguments and yields (or lists) dataclasses."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from minivllm.plugins.types import Component, ConfigOption, ModelComponent

PROJECT = "minivllm"
ENTRY_POINT_GROUP = "minivllm"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def minivllm_models() -> Iterable[ModelComponent]:  # type: ignore[empty-body]
    """Model classes, keyed by config.json's architecture names."""


@hookspec
def minivllm_attention_backends() -> Iterable[Component]:  # type: ignore[empty-body]
    """Subclasses of ``minivllm.core.interfaces.AttentionBackend``."""


@hookspec
def minivllm_schedulers() -> Iterable[Component]:  # type: ignore[empty-body]
    """Subclasses of ``minivllm.core.interfaces.Scheduler``."""


@hookspec
def minivllm_samplers() -> Iterable[Component]:  # type: ignore[empty-body]
    """Subclasses of ``minivllm.core.interfaces.Sampler``."""


@hookspec
def minivllm_executors() -> Iterable[Component]:  # type: ignore[empty-body]
    """Subclasses of ``minivllm.core.interfaces.Executor``."""


@hookspec
def minivllm_configs() -> Iterable[ConfigOption]:  # type: ignore[empty-body]
    """Options of Hydra groups: ``model=mistral`` with its shape, ``attention=mine`` with its settings."""


# hook -> (the kind of component it provides, the type it yields)
HOOKS: dict[str, tuple[str, type]] = {
    "minivllm_models": ("model", ModelComponent),
    "minivllm_attention_backends": ("attention", Component),
    "minivllm_schedulers": ("scheduler", Component),
    "minivllm_samplers": ("sampler", Component),
    "minivllm_executors": ("executor", Component),
    "minivllm_configs": ("config", ConfigOption),
}
