"""The registry of components by name. ``load_plugins`` builds it once; it never changes. Targets import lazily."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from minivllm.errors import CheckpointError, ConfigError, MinivllmError, PluginError, described, one_line, shown
from minivllm.modules import exists
from minivllm.naming import did_you_mean, listing
from minivllm.plugins.types import Component, ConfigOption, ModelComponent

# kind -> its name in messages
KINDS: dict[str, str] = {
    "model": "model",
    "attention": "attention backend",
    "scheduler": "scheduler",
    "sampler": "sampler",
    "executor": "executor",
}
# kind -> the interface in minivllm.core.interfaces that its classes implement
_INTERFACES = {
    "model": "Model",
    "attention": "AttentionBackend",
    "scheduler": "Scheduler",
    "sampler": "Sampler",
    "executor": "Executor",
}

_HAVE_AUTO = ("attention", "executor")
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # Linux; WSL


def is_reserved(kind: str, name: str) -> bool:
    """Whether the engine reserves this name for itself, so that no component may use it."""
    return name == "auto" and kind in _HAVE_AUTO


@dataclass(frozen=True, slots=True)
class Provider:
    """The package that a plugin comes from."""

    plugin: str  # the entry point's name
    package: str
    version: str
    builtin: bool = False

    def __str__(self) -> str:
        return f"{self.package} {self.version}".strip()


@dataclass(frozen=True, slots=True)
class Report:
    """What is wrong with one plugin, in one line. Other plugins are unaffected."""

    plugin: str
    package: str
    message: str

    def __str__(self) -> str:
        return f"minivllm plugin {self.plugin!r} ({self.package}): {self.message}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered component and its provider."""

    kind: str
    component: Component
    provider: Provider

    def __str__(self) -> str:
        return f"{KINDS[self.kind]} {self.component.name!r} of {self.provider}"


@dataclass(frozen=True, slots=True)
class OptionEntry:
    """A registered Hydra group option and its provider."""

    option: ConfigOption
    provider: Provider


class Registry:
    """Every component and config option that the installed plugins offer.

    ``strict``: a broken component is an error instead of being skipped. ``tell`` is called with one line for each
    skipped component; by default it logs a warning.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        options: Iterable[OptionEntry] = (),
        reports: Iterable[Report] = (),
        disabled: Iterable[str] = (),
        *,
        strict: bool = False,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.strict = strict
        self._warned: set[str] = set()
        self.tell = tell or logging.getLogger("minivllm.plugins").warning
        self.reports = tuple(reports)
        self.disabled = tuple(disabled)
        self._tables: dict[str, dict[str, Entry]] = {kind: {} for kind in KINDS}
        self._aliases: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
        self._options: dict[tuple[str, str], OptionEntry] = {(o.option.group, o.option.name): o for o in options}
        for entry in entries:
            component = entry.component
            self._tables[entry.kind][component.name] = entry
            self._aliases[entry.kind] |= dict.fromkeys(component.aliases, component.name)

    # ------------------------------------------------------------------ by name

    def entry(self, kind: str, name: str) -> Entry:
        """The component and its provider. Raises ConfigError if the name is not registered."""
        table = self._table(kind)
        found = table.get(self._aliases[kind].get(name, name))
        if found is None:
            allowed = [*table, *self._aliases[kind]]
            raise ConfigError(
                f"{kind}={name}: there is no such {KINDS[kind]}.{did_you_mean(name, allowed)} "
                f"Allowed: {listing(sorted(allowed))}. `minivllm plugins list` says where each comes from."
            )
        return found

    def get(self, kind: str, name: str) -> Component:
        """The component with this name or alias. Raises ConfigError if the name is not registered."""
        return self.entry(kind, name).component

    def names(self, kind: str) -> list[str]:
        """The canonical names, in registration order (built-ins first)."""
        return list(self._table(kind))

    def aliases(self, kind: str) -> Mapping[str, str]:
        """alias -> canonical name."""
        self._table(kind)
        return dict(self._aliases[kind])

    def entries(self, kind: str | None = None) -> list[Entry]:
        """All entries of a kind (or of every kind), in registration order."""
        return [e for k in ([kind] if kind else KINDS) for e in self._table(k).values()]

    def by_priority(self, kind: str, *, prefill: bool = False) -> list[Component]:
        """Highest priority first: the order in which ``auto`` tries them (``prefill``: for prompt chunks)."""

        def priority(c: Component) -> int:
            return c.prefill_priority if prefill and c.prefill_priority is not None else c.priority

        return sorted((e.component for e in self.entries(kind)), key=lambda c: -priority(c))

    def config_options(self, group: str) -> dict[str, OptionEntry]:
        """The options that plugins registered for a Hydra group, by name."""
        return {name: o for (g, name), o in self._options.items() if g == group}

    # ------------------------------------------------------------------ what stands behind a name

    def resolve(self, kind: str, name: str) -> type[Any]:
        """Import and return the class.

        Raises:
            ConfigError: the name is not registered.
            PluginError: it cannot be imported, or does not implement its kind's interface; the message names the
                package, and what to install.
        """
        entry = self.entry(kind, name)
        component = entry.component
        module_name, _, attribute = component.target.partition(":")
        missing = _missing(component)
        if missing and kind != "attention":  # an attention backend's class reports this itself
            reasons = "; ".join(map(_not_installed, missing))
            raise PluginError(f"{entry} cannot be imported: {reasons}.{self.how_to_install(component)}")
        try:
            module = importlib.import_module(module_name)
        except ImportError as e:
            reasons = "; ".join(map(one_line, self.why_not(component) or [str(e)]))
            raise PluginError(f"{entry} cannot be imported: {reasons}.{self.how_to_install(component)}") from e
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            why = f"{module_name} raised {type(e).__name__}: {one_line(e)}"
            raise PluginError(f"{entry} cannot be imported: {why}") from e
        target = getattr(module, attribute, None)
        if not isinstance(target, type):
            raise PluginError(f"{entry} names {component.target}, but {module_name} has no class {attribute}")
        interface: type = getattr(importlib.import_module("minivllm.core.interfaces"), _INTERFACES[kind])
        if not issubclass(target, interface):
            raise PluginError(f"{entry} names {component.target}, which does not subclass {interface.__name__}")
        if left := sorted(getattr(target, "__abstractmethods__", ())):
            raise PluginError(f"{entry} names {component.target}, which lacks {interface.__name__}'s {listing(left)}")
        reads = getattr(target, "architectures", ())
        if reads and (foreign := [a for a in _architectures(component) if a not in reads]):
            raise PluginError(
                f"{entry} is registered for {listing(foreign)}, and the architectures of {component.target} are "
                f"{listing(reads)}: let the ModelComponent and the class name the same"
            )
        return target

    @contextmanager
    def building(self, kind: str, name: str) -> Iterator[None]:
        """A context for constructing a component: an exception from a plugin's class becomes a one-line PluginError
        that names its package. minivllm's own errors, and those of built-in components, pass unchanged."""
        entry = self.entry(kind, name)
        try:
            yield
        except Exception as e:
            if entry.provider.builtin or isinstance(e, MinivllmError):
                raise
            raise PluginError(f"{entry} cannot be built: {described(e)}") from e

    def pass_over(self, error: PluginError) -> None:
        """Skip a broken component that the user did not name. Raises the error in strict mode."""
        if self.strict:
            raise error
        if (line := one_line(error)) not in self._warned:
            self._warned.add(line)
            self.tell(line)

    def model_class_for(self, architecture: str) -> Any:
        """The class of ``model_for_architecture``. Raises as it and ``resolve`` do."""
        return self.resolve("model", self.model_for_architecture(architecture).name)

    def model_for_architecture(self, architecture: str) -> ModelComponent:
        """The model for an architecture named in config.json. Raises CheckpointError naming the hook to write."""
        known = {a: e.component for e in self.entries("model") for a in _architectures(e.component)}
        if architecture in known:
            return known[architecture]  # type: ignore[return-value]
        raise CheckpointError(
            f"no model is registered for the architecture {architecture!r}.{did_you_mean(architecture, known)} "
            f"Registered: {listing(sorted(known))}. A plugin adds one with the hook minivllm_models: "
            f"yield ModelComponent(name=..., target='package.module:Class', architectures=({architecture!r},)). "
            "Packages that add some are in examples/plugins of minivllm's repository."
        )

    def read_config(self, hf: Mapping[str, Any]) -> Mapping[str, Any]:
        """config.json after its model's ``read_config``, if it has one. Raises PluginError."""
        named = hf.get("architectures")
        first = named[0] if isinstance(named, list | tuple) and named else None
        for entry in self.entries("model"):
            read = getattr(entry.component, "read_config", None)
            if read is None or first not in _architectures(entry.component):
                continue
            with self.building("model", entry.component.name):
                said = read(dict(hf))
            if not isinstance(said, Mapping):
                raise PluginError(f"{entry}: read_config returned {shown(said)}, not a mapping")
            return said
        return hf

    def why_not(self, component: Component) -> list[str]:
        """Why a component cannot be used here, without importing anything; empty if it can."""
        why = list(map(_not_installed, _missing(component)))
        module = component.target.partition(":")[0]
        if not exists(module):
            why.append(f"its module {module} does not exist")
        return why

    def usable_here(self, component: Component) -> list[str]:
        """``why_not``, plus a missing GPU if the component needs one, as far as device files show."""
        no_gpu = component.gpu and not any(os.path.exists(device) for device in _GPU_DEVICES)
        return self.why_not(component) + (["it needs an NVIDIA GPU, and none is here"] if no_gpu else [])

    def how_to_install(self, component: Component) -> str:
        """How to install a component's missing requirements, to append to an error; "" if none are missing."""
        missing = [need.split("|")[0].split(".")[0] for need in _missing(component)]
        if not missing:
            return ""
        return f" Install it: {component.install or 'pip install ' + ' '.join(missing)}"

    def _table(self, kind: str) -> dict[str, Entry]:
        try:
            return self._tables[kind]
        except KeyError:
            raise ValueError(f"{kind!r} is no kind of component; the kinds are {listing(KINDS)}") from None


def _architectures(component: Component) -> tuple[str, ...]:
    return component.architectures if isinstance(component, ModelComponent) else ()


def _missing(component: Component) -> list[str]:
    """The entries of ``requires`` for which no alternative is installed."""
    return [need for need in component.requires if not any(map(exists, need.split("|")))]


def _not_installed(need: str) -> str:
    return f"the package {' or '.join(map(repr, need.split('|')))} is not installed"
