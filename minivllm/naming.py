"""How names are recognized, and how error messages list them and suggest some: alike everywhere."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

_ALIKE = 0.6  # the lowest difflib ratio of a suggestion
_CLOSE = 0.12  # how far below the best ratio further suggestions may be


def nearest(value: str, allowed: Iterable[str]) -> list[str]:
    """The names most like ``value``, best first, at most three. Case, leading dashes, and a group that both have in
    common (``cache.``) do not count."""
    alike = sorted(((_ratio(value, name), name) for name in allowed), key=lambda pair: -pair[0])[:3]
    return [name for ratio, name in alike if ratio >= max(_ALIKE, alike[0][0] - _CLOSE)]


def _ratio(value: str, name: str) -> float:
    value, name = (its.lower().lstrip("-") for its in (value, name))
    group, dot, own = value.rpartition(".")
    if dot and name.startswith(group + dot):
        value, name = own, name.removeprefix(group + dot)
    return difflib.SequenceMatcher(None, name, value).ratio()


def did_you_mean(value: str, allowed: Iterable[str]) -> str:
    """`` Did you mean a or b?`` with a leading space, or empty."""
    names = nearest(value, allowed)
    return f" Did you mean {either(names)}?" if names else ""


def either(names: list[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def is_repository(name: str) -> bool:
    """Whether it may be a repository's ORG/NAME on the Hub."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None


def listing(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names of which there may be many: the first few, and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
