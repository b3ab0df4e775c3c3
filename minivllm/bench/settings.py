"""Normalizes overrides to one order and one spelling, so that equal configurations get equal names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from typing import Any

from minivllm.config.keys import keys_of
from minivllm.config.modes import MODES
from minivllm.config.overrides import Override, groups_of, option_node, typed_keys
from minivllm.errors import ConfigError
from minivllm.plugins import default_registry

_KEYS, _GROUPS = keys_of(MODES["bench"].schema), groups_of(MODES["bench"].schema)[:-1]
# These say how something was measured or recorded, not what: rows may differ in them and still be compared.
_ASIDE = ("repeat", "output", "profile", "profile_steps", "trace", "timeline", "check", "mode", "url")


def settings_of(overrides: Iterable[str]) -> str:
    """Drop overrides that equal the default or the chosen option's value, and those that only say how to measure.

    Raises ConfigError for text that is not an override.
    """
    typed = {o.key: o for o in map(Override.parse, overrides)}  # the last one typed counts
    chosen = {group: _name(typed[group]) if group in typed else _KEYS[f"{group}.name"].default for group in _GROUPS}
    kept = {}
    for key, override in typed.items():
        value = _spelled(_value(override))
        if key not in _ASIDE and not key.startswith("sweep.") and value not in _default(key, chosen):
            kept[key] = value
    return " ".join(f"{key}={kept[key]}" for key in sorted(kept)) or "(defaults)"


def _name(override: Override) -> str:
    return override.value.strip("'\"")


def _value(override: Override) -> Any:
    """The value as the config holds it; as typed, if this version would reject it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, text = _KEYS.get(override.key), override.value
    if override.key in _GROUPS:
        return _name(override)
    if key is not None and override.is_text_of(key):
        return override.raw
    try:
        parsed = override.read("")
        if parsed.is_sweep_override():
            return text
        value = parsed.value()
        if key is None or key.mapping or "${" in text:
            return value
        OmegaConf.update(typed_keys("bench"), key.name, value, merge=False)
        found = OmegaConf.select(typed_keys("bench"), key.name)
        return list(found) if OmegaConf.is_list(found) else found
    except (ConfigError, OmegaConfBaseException):
        return text


def _default(key: str, chosen: Mapping[str, str]) -> tuple[str, ...]:
    """The key's value if it is not typed, spelled, in a tuple; empty for a key that exists only if typed."""
    from omegaconf import OmegaConf

    if key in _GROUPS:
        return (_spelled(_KEYS[f"{key}.name"].default),)
    group, _, inner = key.partition(".")
    value = OmegaConf.select(_option(group, chosen[group]), inner, default=...) if group in chosen else ...
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    if value is ... and key in _KEYS:
        value = _KEYS[key].default
    return () if value is ... else (_spelled(value),)


@cache
def _option(group: str, name: str) -> Any:
    """What an option sets; empty if there is no such option here."""
    from omegaconf import OmegaConf

    entry = default_registry().config_options(group).get(name)
    return OmegaConf.create() if entry is None else option_node(entry.option)


def _spelled(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_spelled, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_spelled(value[key])}' for key in value)}}}"
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)
