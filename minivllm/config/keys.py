"""How ``schema.py`` declares a key, and how its declarations are read."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    type(None): "null",
    Any: "a string or a list",
}


def key(default: Any, help: str, **meta: Any) -> Any:
    """A field with its help and limits.

    ``ge``, ``gt``, ``le`` bound a number; ``text`` marks a value taken as typed, outside Hydra's grammar.
    """
    metadata = {"help": help, **meta}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Key:
    """A leaf of a schema."""

    name: str  # dotted, as typed
    type: str  # as shown in messages
    default: Any
    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    text: bool = False
    mapping: bool = False  # a mapping with arbitrary keys


def keys_of(schema: type, prefix: str = "") -> dict[str, Key]:
    """Every leaf of a schema by its dotted name, in declaration order."""
    found: dict[str, Key] = {}
    hints = get_type_hints(schema)
    for f in fields(schema):
        name, hint, meta = prefix + f.name, hints[f.name], dict(f.metadata)
        if is_dataclass(hint):
            found |= keys_of(hint, name + ".")  # type: ignore[arg-type]
        else:
            default = f.default if f.default_factory is MISSING else f.default_factory()
            found[name] = Key(name, type_in_words(hint), default, **meta, mapping=get_origin(hint) is dict)
    return found


def type_in_words(hint: Any) -> str:
    """A type such as ``int | None`` in words, for messages."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(member.name for member in hint)
    if isinstance(hint, UnionType):
        return " or ".join(type_in_words(arm) for arm in get_args(hint))
    origin = get_origin(hint)
    if origin is list:
        return "a list of " + type_in_words(get_args(hint)[0]).split(" ", 1)[1] + "s"
    if origin is dict:
        return "a mapping"
    return _WORDS[hint]


def spelled(value: Any) -> str:
    """A value as a user types it."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return f"[{','.join(map(spelled, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
