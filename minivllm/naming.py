"""How errors suggest names for an unknown one: the nearest names, and all allowed ones, in one wording everywhere."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ALIKE = 0.6  # the lowest difflib ratio of a suggestion
_CLOSE = 0.12  # how far below the best ratio further suggestions may be


def nearest(value: str, allowed: Iterable[str]) -> list[str]:
    """The names most like ``value``, best first; case is ignored, and dashes in front, which all flags share."""
    value = _compared(value)
    by_lower = {_compared(name): name for name in allowed}
    matches = difflib.get_close_matches(value, by_lower, n=3, cutoff=_ALIKE)
    ratios = [difflib.SequenceMatcher(None, m, value).ratio() for m in matches]
    return [by_lower[m] for m, ratio in zip(matches, ratios, strict=True) if ratio >= ratios[0] - _CLOSE]


def _compared(name: str) -> str:
    return name.lower().lstrip("-")


def did_you_mean(value: str, allowed: Iterable[str]) -> str:
    """`` Did you mean a or b?`` with a leading space, or empty."""
    names = nearest(value, allowed)
    return f" Did you mean {either(names)}?" if names else ""


def either(names: list[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def listing(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
