"""How an unknown name is refused: the value, the nearest names, all allowed ones. One wording for every room."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(value: str, allowed: Iterable[str], n: int = 3) -> list[str]:
    """The names most like ``value``, best first; case does not matter."""
    by_lower = {name.lower(): name for name in allowed}
    return [by_lower[m] for m in difflib.get_close_matches(value.lower(), by_lower, n=n, cutoff=0.6)]


def did_you_mean(value: str, allowed: Iterable[str]) -> str:
    """`` Did you mean a or b?`` with a leading space, or nothing."""
    names = nearest(value, allowed)
    return f" Did you mean {either(names)}?" if names else ""


def either(names: list[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def listing(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
