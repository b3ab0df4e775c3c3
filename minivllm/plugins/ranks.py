"""What a parent tells its ranks about plugins, so that a component that only the parent has can be reported by name.

Each rank loads plugins itself, from the entry points that it finds. What is missing or broken there but not in the
parent is reported back to the parent, which logs it once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm.errors import PluginError
from minivllm.plugins.manager import load_plugins
from minivllm.plugins.registry import KINDS, Entry, Registry
from minivllm.plugins.types import ModelComponent

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.model_config import ModelConfig

_ENVIRON = ("MINIVLLM_DISABLE_PLUGINS", "MINIVLLM_STRICT_PLUGINS")
_KINDS = ("model", "attention", "sampler")  # what ranks build; the parent has the scheduler and the executor


@dataclass(frozen=True, slots=True)
class Known:
    """A plugin's component as the parent sees it."""

    kind: str
    name: str
    target: str
    package: str
    version: str
    architectures: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ParentView:
    """Sent to each rank."""

    components: tuple[Known, ...] = ()
    reports: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()


def view_of(registry: Registry) -> ParentView:
    """What the ranks of this process need to know."""
    entries = [entry for kind in _KINDS for entry in registry.entries(kind) if not entry.provider.builtin]
    return ParentView(
        tuple(map(_known, entries)),
        tuple(map(str, registry.reports)),
        tuple((name, os.environ[name]) for name in _ENVIRON if name in os.environ),
    )


def registry_of_rank(
    parent: ParentView, rank: int, config: EngineConfig, model_config: ModelConfig
) -> tuple[Registry, list[str]]:
    """This process's registry, and a list that collects messages for the parent to log, now and later.

    Raises:
        PluginError: the configuration names a component that this rank lacks, or, in strict mode, any is missing.
    """
    notes: list[str] = []
    registry = load_plugins(environ=dict(parent.environ))
    registry.tell = notes.append
    for known in parent.components:
        if (why := _missing(known, registry)) is None:
            continue
        who = f"{KINDS[known.kind]} {known.name!r} of {known.package} {known.version}".rstrip()
        error = PluginError(
            f"{who} is registered in the parent process only: rank {rank} {why}. Ranks find plugins by their entry "
            f"points: install the package where the rank runs (pip install {known.package}), and let its hooks yield "
            "the same in every process"
        )
        if _is_named(known, config, model_config):
            raise error
        registry.pass_over(error)
    seen = set(parent.reports)
    notes += [f"on rank {rank}: {report}" for report in map(str, registry.reports) if report not in seen]
    return registry, notes


def tell(registry: Registry, notes: Iterable[str]) -> None:
    """In the parent: report each of the ranks' notes once."""
    for note in dict.fromkeys(notes):
        registry.tell(note)


def _is_named(known: Known, config: EngineConfig, model_config: ModelConfig) -> bool:
    if known.kind == "model":
        return model_config.architecture in known.architectures
    names = {known.name, *known.aliases}
    if known.kind == "sampler":
        return config.sampler.name in names
    return not names.isdisjoint((config.attention.name, config.attention.prefill, config.attention.decode))


def _known(entry: Entry) -> Known:
    c, p = entry.component, entry.provider
    architectures = c.architectures if isinstance(c, ModelComponent) else ()
    return Known(entry.kind, c.name, c.target, p.package, p.version, architectures, c.aliases)


def _missing(known: Known, registry: Registry) -> str | None:
    """How a rank's component differs from the parent's; None: it does not."""
    if known.name in registry.names(known.kind):
        mine = registry.entry(known.kind, known.name)
        if mine.component.target == known.target:
            return None
        return f"has {mine.component.target} of {mine.provider} by that name"
    reports = [r.message for r in registry.reports if r.package.partition(" ")[0] == known.package]
    return f"does not have it ({'; '.join(reports)})" if reports else "does not find it"
