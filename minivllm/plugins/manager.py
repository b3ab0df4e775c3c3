"""Finds, loads and checks plugins one by one: a broken one becomes a line in ``Registry.reports``; the rest work."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from minivllm.errors import PluginError
from minivllm.naming import did_you_mean, listing
from minivllm.plugins import hookspecs
from minivllm.plugins.hookspecs import ENTRY_POINT_GROUP, HOOKS, PROJECT
from minivllm.plugins.registry import KINDS, Entry, OptionEntry, Provider, Registry, Report, is_reserved
from minivllm.plugins.types import Component, ConfigOption, ModelComponent
from minivllm.version import API_VERSION, __version__

_BUILTIN = "minivllm.plugins.builtin"


def load_plugins(found: Iterable[EntryPoint] | None = None, environ: Mapping[str, str] | None = None) -> Registry:
    """Load every plugin and return a registry of everything they offer.

    Args:
        found: the entry points to load; by default, all installed ones.
        environ: read for ``MINIVLLM_DISABLE_PLUGINS`` and ``MINIVLLM_STRICT_PLUGINS``.

    Raises:
        PluginError: in strict mode, if there is anything to report.
    """
    environ = os.environ if environ is None else environ
    loader = _Loader(environ.get("MINIVLLM_DISABLE_PLUGINS", ""))
    loader.load(list(entry_points(group=ENTRY_POINT_GROUP) if found is None else found))
    strict = environ.get("MINIVLLM_STRICT_PLUGINS", "").lower() not in ("", "0", "false")
    registry = loader.collect(strict)
    if strict and registry.reports:
        raise PluginError("MINIVLLM_STRICT_PLUGINS: " + " | ".join(map(str, registry.reports)))
    return registry


@cache
def default_registry() -> Registry:
    """This process's registry, loaded once; problems with plugins are logged then."""
    registry = load_plugins()
    for report in registry.reports:
        registry.tell(str(report))
    return registry


class _Loader:
    """One pass over the entry points: load, register with pluggy, call the hooks, resolve conflicts."""

    def __init__(self, disable: str) -> None:
        self.pm = pluggy.PluginManager(PROJECT)
        self.pm.add_hookspecs(hookspecs)
        self.disable = {name.strip() for name in disable.split(",") if name.strip()}
        self.providers: dict[str, Provider] = {}  # pluggy's plugin name -> where it comes from
        self.reports: list[Report] = []
        self.disabled: list[str] = []
        self.entries: list[Entry] = []
        self.options: list[OptionEntry] = []
        self.taken: dict[tuple[str, str], Provider] = {}  # (kind, name or alias) -> its provider

    def report(self, provider: Provider, message: str) -> None:
        self.reports.append(Report(provider.plugin, str(provider), " ".join(message.split())))

    # ------------------------------------------------------------------ entry points

    def load(self, found: list[EntryPoint]) -> None:
        ours = [ep for ep in found if ep.value == _BUILTIN]
        # Without an installed distribution (a bare source folder), minivllm has no entry point.
        builtin = ours[0] if ours else EntryPoint("builtin", _BUILTIN, ENTRY_POINT_GROUP)
        self._load_one(builtin, Provider("builtin", "minivllm", __version__, builtin=True))
        # A fixed order, so that the winner of a conflict does not depend on the order of sys.path.
        others = [(ep, _provider(ep)) for ep in found if ep.value != _BUILTIN]
        others.sort(key=lambda pair: (pair[1].package.lower(), pair[1].plugin))
        known = {"all", *(name for _, p in others for name in (p.plugin, p.package))}
        for name in sorted(self.disable - known):
            why = "the built-ins stay" if name == "builtin" else f"no such plugin. Installed: {listing(sorted(known))}"
            self.reports.append(Report(name, "MINIVLLM_DISABLE_PLUGINS", f"cannot be disabled: {why}"))
        for ep, provider in others:
            if self.disable & {"all", provider.plugin, provider.package}:
                self.disabled.append(f"{provider.plugin} ({provider})")
            else:
                self._load_one(ep, provider)

    def _load_one(self, ep: EntryPoint, provider: Provider) -> None:
        try:
            plugin = ep.load()
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # SystemExit, and libraries' own BaseExceptions
            self.report(provider, f"cannot be loaded from {ep.value}: {type(e).__name__}: {e}")
            return
        if (why := _wrong_version(plugin, provider)) is not None:
            self.report(provider, why)
            return
        name = f"{provider.package}:{provider.plugin}"
        try:
            self.pm.register(plugin, name=name)
        except Exception as e:  # pluggy: registered twice, or a hook has arguments that the spec lacks
            self.report(provider, f"cannot be registered: {e}")
            if self.pm.has_plugin(name):
                self.pm.unregister(name=name)
            return
        self.providers[name] = provider
        self._check_hooks(plugin, provider)

    def _check_hooks(self, plugin: Any, provider: Provider) -> None:
        """Refuse what pluggy's check_pending would, for this plugin only, and a hook without its marker."""
        implemented = {caller.name for caller in self.pm.get_hookcallers(plugin) or ()}
        for hook in sorted(implemented - HOOKS.keys()):
            self.report(provider, f"implements {hook}, which is no hook.{did_you_mean(hook, HOOKS)} {_hooks()}")
        unmarked = [h for h in HOOKS if h not in implemented and callable(inspect.getattr_static(plugin, h, None))]
        for hook in unmarked:
            self.report(provider, f"has {hook} without @hookimpl (from minivllm.plugins import hookimpl)")
        if not implemented and not unmarked:
            self.report(provider, f"implements no hook. {_hooks()}")

    # ------------------------------------------------------------------ hooks

    def collect(self, strict: bool) -> Registry:
        order = list(self.providers)  # not pluggy's order, which a plugin may change
        for hook, (kind, expected) in HOOKS.items():
            for impl in sorted(getattr(self.pm.hook, hook).get_hookimpls(), key=lambda i: order.index(i.plugin_name)):
                provider = self.providers[impl.plugin_name]
                if impl.hookwrapper or impl.wrapper:
                    self.report(provider, f"{hook} is a wrapper; a plugin adds, it does not change others' answers")
                    continue
                for item in self._answers(hook, impl.function, provider):
                    if not isinstance(item, expected):
                        what = f"{hook} yields {type(item).__name__}, not {expected.__name__}: {item!r}"
                        self.report(provider, what)
                    elif isinstance(item, ConfigOption):
                        self._add_option(item, provider)
                    elif isinstance(item, Component):
                        self._add_component(kind, item, provider)
        return Registry(self.entries, self.options, self.reports, self.disabled, strict=strict)

    def _answers(self, hook: str, function: Any, provider: Provider) -> list[Any]:
        answers: list[Any] = []
        try:
            # Collected one by one: what a generator yielded before raising is kept.
            found = function()
            if inspect.iscoroutine(found) or inspect.isasyncgen(found):
                if inspect.iscoroutine(found):
                    found.close()  # else Python warns that it was never awaited
                self.report(provider, f"{hook} is an async function, which nobody awaits: write def, not async def")
                found = ()
            elif found is None or isinstance(found, Component | ConfigOption | str):
                what = "None" if found is None else f"one {type(found).__name__}"
                self.report(provider, f"{hook} returned {what}: yield its components, or return a list of them")
                found = ()
            for item in found:
                answers.append(item)
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            self.report(provider, f"{hook} raised {type(e).__name__}: {e}")
        return answers

    def _add_component(self, kind: str, component: Component, provider: Provider) -> None:
        what = f"{KINDS[kind]} {component.name!r}"
        if is_reserved(kind, component.name):
            self.report(provider, f"{what}: the name is reserved")
            return
        if not self._claim(kind, component.name, what, provider):
            return
        aliases = []
        for alias in component.aliases:
            if is_reserved(kind, alias):
                self.report(provider, f"{what}: its alias {alias!r} is reserved")
            elif self._claim(kind, alias, f"{what}: its alias {alias!r}", provider):
                aliases.append(alias)
        changes: dict[str, Any] = {"aliases": tuple(aliases)}
        if isinstance(component, ModelComponent):
            changes["architectures"] = tuple(
                name
                for name in component.architectures
                if self._claim("architecture", name, f"{what}: the architecture {name}", provider)
            )
        self.entries.append(Entry(kind, _replace(component, changes), provider))

    def _add_option(self, option: ConfigOption, provider: Provider) -> None:
        what = f"the option {option.group}={option.name}"
        if self._claim("option " + option.group, option.name, what, provider):
            self.options.append(OptionEntry(option, provider))

    def _claim(self, kind: str, name: str, what: str, provider: Provider) -> bool:
        """Whether nobody had the name; else that is reported, as of ``what``, and it stays where it is."""
        if (owner := self.taken.get((kind, name))) is not None:
            self.report(provider, f"{what} is already registered by {owner}, which is kept")
            return False
        self.taken[kind, name] = provider
        return True


def _replace(component: Component, changes: dict[str, Any]) -> Component:
    """``dataclasses.replace`` without validation: a conflict may leave a model without an architecture."""
    fields = {name: getattr(component, name) for name in type(component).__dataclass_fields__}
    new = object.__new__(type(component))
    for name, value in {**fields, **changes}.items():
        object.__setattr__(new, name, value)
    return new


def _provider(ep: EntryPoint) -> Provider:
    dist = ep.dist
    if dist is None:
        return Provider(ep.name, ep.value.partition(":")[0].partition(".")[0], "")
    return Provider(ep.name, dist.name, dist.version)


def _wrong_version(plugin: Any, provider: Provider) -> str | None:
    """A plugin that does not state its API version is taken to be written for version 1, the first."""
    module = plugin if inspect.ismodule(plugin) else sys.modules.get(getattr(plugin, "__module__", ""), plugin)
    version = getattr(plugin, "MINIVLLM_API_VERSION", getattr(module, "MINIVLLM_API_VERSION", 1))
    if version == API_VERSION:
        return None
    if not isinstance(version, int):
        return f"MINIVLLM_API_VERSION={version!r} is not an integer"
    side = f"upgrade minivllm (this is {__version__})" if version > API_VERSION else f"upgrade {provider.package}"
    return f"was written for plugin API {version}, this minivllm has {API_VERSION}; {side}"


def _hooks() -> str:
    return f"Hooks: {listing(HOOKS)}."
