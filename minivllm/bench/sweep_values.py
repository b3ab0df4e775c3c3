"""Expands ``key=a,b`` overrides into configurations: Hydra's sweep syntax, without Hydra's launcher."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from minivllm.config.keys import keys_of
from minivllm.config.modes import MODES
from minivllm.config.overrides import Override, check_group, check_key, group_options, groups_of
from minivllm.config.settle import component_fields, named_component
from minivllm.errors import ConfigError
from minivllm.plugins.registry import Registry

MOST = 10_000  # configurations of one sweep
_KEYS, _GROUPS = keys_of(MODES["bench"].schema), groups_of(MODES["bench"].schema)


def expand(overrides: Sequence[str], registry: Registry) -> tuple[list[str], list[dict[str, str]]]:
    """The keys with several values, and every combination as ``{key: value}``, the last key varying fastest.

    ``a,b`` and ``choice(a,b)`` are values, ``range(1,4)`` numbers, ``glob(*)`` options of a group; ``[a,b]`` is a
    single value, a list. Values follow Hydra's grammar.

    Raises:
        ConfigError: an override that cannot be read, a key that is typed twice or unknown, a value of the wrong type,
            a name that is not registered, or more than ``MOST`` configurations.
    """
    values: dict[str, list[str]] = {}
    swept = []
    for text in overrides:
        override = Override.parse(text)
        name = "+" * override.adds + override.key
        if name in values:
            raise ConfigError(f"{text}: {name} is typed twice; several values are typed {name}=a,b")
        found = _values(override, registry)
        if found is not None:
            swept.append(name)
        values[name] = found if found is not None else [override.raw]
        for value in values[name]:
            _check(Override.parse(f"{name}={value}"), registry)
    if (count := math.prod(map(len, values.values()))) > MOST:
        sizes = " x ".join(f"{len(values[name])} of {name}" for name in swept)
        raise ConfigError(f"a sweep has at most {MOST} configurations; {sizes} are {count}: type fewer values")
    return swept, [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]


def _check(override: Override, registry: Registry) -> None:
    """Check what does not depend on other keys. What they, or this machine, rule out is reported by the row."""
    if override.key in _GROUPS:
        check_group(override, registry)
        return
    check_key(override, _KEYS, "bench", engine_only=False)
    group, _, field = override.key.partition(".")
    value = override.value.strip("'\"")
    if field in component_fields(group) and value != "null" and "${" not in value:
        named_component(group, field, value, registry)


def _values(override: Override, registry: Registry) -> list[str] | None:
    """The values of a key that has several, else None."""
    from hydra.core.override_parser.types import IntervalSweep
    from hydra.errors import HydraException

    is_text = override.key in _KEYS and _KEYS[override.key].text
    try:
        parsed = override.read(
            f"several values are typed {override.key}=a,b or choice(a,b), numbers range(1,5), options of a group "
            "glob(*)"
        )
    except ConfigError:
        if is_text:
            return None  # a file's name, or other text outside Hydra's grammar
        raise
    if not parsed.is_sweep_override():
        return None
    value: Any = parsed.value()
    if isinstance(value, IntervalSweep):
        raise ConfigError(f"{override.text}: a sweep needs values, not an interval; type {override.key}=range(1,4)")
    if parsed.is_choice_sweep() and hasattr(value, "filter"):  # glob(...)
        if override.key not in _GROUPS:
            raise ConfigError(f"{override.text}: glob chooses among a group's options: {', '.join(_GROUPS[:-1])}")
        found = value.filter(sorted(group_options(override.key, registry)))
    else:
        try:
            found = [_text(v, plain=is_text) for v in itertools.islice(parsed.sweep_iterator(), MOST + 1)]
        except (HydraException, ValueError) as e:  # a range of step 0
            raise ConfigError(f"{override.text}: this names no value ({e})") from e
    if not found:
        raise ConfigError(f"{override.text}: this names no value")
    if len(found) > MOST:  # a range may be endless
        raise ConfigError(f"{override.text}: a sweep has at most {MOST} configurations; type fewer values")
    return found


def _text(value: Any, *, plain: bool) -> str:
    """As an override's value; a ``plain`` string is outside Hydra's grammar, so nothing in it is escaped."""
    from hydra.core.override_parser.types import QuotedString, Transformer

    if isinstance(value, bool):
        return str(value).lower()
    if plain and isinstance(value, str) and not isinstance(value, QuotedString):
        return value
    return Transformer.str(value)
