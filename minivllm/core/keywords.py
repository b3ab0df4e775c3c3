"""Constructors with helpful errors for keywords that are not fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any


def refusing_by_name(check: Callable[[str, Any, tuple[Any, ...], Mapping[str, Any]], None]) -> Any:
    """Decorator for a dataclass with slots. For a keyword that is not a field, ``check(name, value, args, others)``
    either raises or returns, and the keyword is dropped; ``args`` and ``others`` are the other arguments."""

    def decorate(cls: Any) -> Any:
        plain = cls.__init__

        @wraps(plain)
        def init(self: Any, *args: Any, **given: Any) -> None:
            try:
                plain(self, *args, **given)
                return
            except TypeError:
                if not (others := {name: given.pop(name) for name in [*given] if name not in cls.__slots__}):
                    raise
            for name, value in others.items():
                check(name, value, args, given)
            plain(self, *args, **given)

        cls.__init__ = init
        return cls

    return decorate
