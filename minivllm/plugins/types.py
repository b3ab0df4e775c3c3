"""What plugins yield: frozen dataclasses of names and strings, so that listing them imports none of their targets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_TARGET = re.compile(rf"{_MODULE}:[A-Za-z_]\w*")
_REQUIRE = re.compile(rf"{_MODULE}(\|{_MODULE})*")

# The Hydra groups that a plugin may add options to.
CONFIG_GROUPS = ("model", "attention", "scheduler", "sampler", "executor", "workload")


@dataclass(frozen=True, slots=True)
class Component:
    """A component selected by name: an attention backend, a scheduler, a sampler or an executor.

    Args:
        name: the name users type.
        target: ``package.module:Class``, imported on first use.
        requires: importable modules that it needs; ``"a|b"`` is satisfied by either.
        aliases: other names that users may type.
        priority: ``auto`` picks the usable component with the highest priority.
        prefill_priority: for an attention backend, its priority for prompt chunks, if different.
        description: one line for ``minivllm plugins list``.
        options: the keys that the group's ``options`` mapping may hold for this component.
        install: the command that installs what ``requires`` names.
        gpu: whether it needs an NVIDIA GPU; ``minivllm plugins list`` says so on machines without one.
    """

    name: str
    target: str
    requires: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    priority: int = 0
    description: str = ""
    options: tuple[str, ...] = ()
    install: str = ""
    gpu: bool = False
    prefill_priority: int | None = None

    def __post_init__(self) -> None:
        _check_name(self.name)
        if not (isinstance(self.target, str) and _TARGET.fullmatch(self.target)):
            raise ValueError(f"{self.name}: target={self.target!r} is not 'package.module:Class'")
        for field in ("requires", "aliases", "options"):
            _check_strings(self.name, field, getattr(self, field))
        for module in self.requires:
            if not _REQUIRE.fullmatch(module):
                raise ValueError(f"{self.name}: requires={module!r} is not the name of a module")
        for alias in self.aliases:
            _check_name(alias)
        for field in ("priority", *(() if self.prefill_priority is None else ("prefill_priority",))):
            if type(value := getattr(self, field)) is not int:
                raise TypeError(f"{self.name}: {field}={value!r} is not an integer")
        for field in ("description", "install"):
            value = getattr(self, field)
            if not isinstance(value, str) or len(value.splitlines()) > 1:
                raise TypeError(f"{self.name}: {field}={value!r} is not a string of one line")
        if not isinstance(self.gpu, bool):
            raise TypeError(f"{self.name}: gpu={self.gpu!r} is neither True nor False")


@dataclass(frozen=True, slots=True)
class ModelComponent(Component):
    """A model class and the ``architectures`` (as in config.json) that it runs.

    ``read_config`` is for an architecture whose config.json uses other names or defaults than Llama's: it takes
    config.json as a dict and returns it with Llama's keys (``intermediate_size``, ``tie_word_embeddings``, …).
    """

    architectures: tuple[str, ...] = ()
    read_config: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        # Called by name because zero-argument super() breaks in dataclasses with slots.
        Component.__post_init__(self)
        _check_strings(self.name, "architectures", self.architectures)
        if not self.architectures:
            raise ValueError(f"{self.name}: architectures is empty; name what config.json says, 'FooForCausalLM'")
        if self.read_config is not None and not callable(self.read_config):
            raise TypeError(f"{self.name}: read_config={self.read_config!r} is not a function")


@dataclass(frozen=True, slots=True)
class ConfigOption:
    """One option of a Hydra group, for ``group=name``. ``node``: a mapping, a dataclass instance or a YAML file."""

    group: str
    name: str
    node: Any

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.group not in CONFIG_GROUPS:
            raise ValueError(f"{self.name}: group={self.group!r} is not one of {', '.join(CONFIG_GROUPS)}")
        is_instance = hasattr(type(self.node), "__dataclass_fields__")
        if not (isinstance(self.node, Mapping | Path) or is_instance):
            raise TypeError(f"{self.name}: node must be a mapping, a dataclass instance or a Path to a YAML file")
        if isinstance(self.node, Path) and not self.node.is_file():
            raise ValueError(f"{self.name}: there is no file {self.node}")


def _check_name(name: str) -> None:
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ValueError(f"{name!r} cannot be a name: use letters, digits, '_', '-' and '.'")
    try:
        float(name)
    except ValueError:
        if name.lower() not in ("true", "false", "null"):
            return
    raise ValueError(f"{name!r} cannot be a name: typed on the command line, it is another value")


def _check_strings(name: str, field: str, value: Any) -> None:
    if not (isinstance(value, tuple) and all(isinstance(v, str) and v for v in value)):
        raise TypeError(f"{name}: {field}={value!r} is not a tuple of strings (for one, write ('x',))")
