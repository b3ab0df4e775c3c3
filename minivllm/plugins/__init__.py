"""What plugin authors import: the hook marker and the dataclasses that hooks yield. Imports nothing heavy."""

from minivllm.plugins.hookspecs import HOOKS, hookimpl
from minivllm.plugins.manager import default_registry, load_plugins
from minivllm.plugins.registry import KINDS, Registry
from minivllm.plugins.types import Component, ConfigOption, ModelComponent

__all__ = [
    "HOOKS",
    "KINDS",
    "Component",
    "ConfigOption",
    "ModelComponent",
    "Registry",
    "default_registry",
    "hookimpl",
    "load_plugins",
]
