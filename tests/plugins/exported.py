"""What ``minivllm.plugins.api`` exports, written down: names, members and call signatures, one a line.

``python tests/plugins/exported.py`` writes ``exported.txt`` anew: to add to it, any time; to take from it, only with a
new ``API_VERSION``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any

from minivllm.plugins import api

FILE = Path(__file__).parent / "exported.txt"
_KINDS = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
    inspect.Parameter.KEYWORD_ONLY: "kw:",
    inspect.Parameter.POSITIONAL_ONLY: "",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "",
}


def describe() -> list[str]:
    return sorted(line for module, names in api.EXPORTS.items() for name in names for line in _lines(name, module))


def _lines(name: str, module: str) -> Iterable[str]:
    value = getattr(api, name)
    if not inspect.isclass(value):
        yield f"{name}{signature(value)}" if inspect.isfunction(value) else name
        return
    plain = issubclass(value, BaseException | Enum | dict) or getattr(value, "_is_protocol", False)
    yield name if plain else f"{name}{signature(value)}"
    for abstract in sorted(getattr(value, "__abstractmethods__", ())):
        yield f"{name} must {abstract}"
    ours = [c for c in value.__mro__ if c.__module__.startswith("minivllm.")]
    members = dict.fromkeys(m for c in ours for m in [*vars(c), *inspect.get_annotations(c)] if not m.startswith("_"))
    for member in members:
        found = inspect.getattr_static(value, member, None)
        call = found.__func__ if isinstance(found, classmethod | staticmethod) else found
        yield f"{name}.{member}{signature(call)}" if inspect.isfunction(call) else f"{name}.{member}"


def signature(call: Callable[..., Any]) -> str:
    """``(x, y=, kw:z)``: ``=`` for what has a default, ``kw:`` for what is given by name only."""
    parameters = inspect.signature(call).parameters.values()
    return "(" + ", ".join(_KINDS[p.kind] + p.name + ("" if p.default is p.empty else "=") for p in parameters) + ")"


def shrunk(before: Iterable[str], now: Iterable[str]) -> list[str]:
    """What a plugin written against ``before`` would miss ``now``: one line a loss."""
    current = dict(_split(line) for line in now)
    known, losses = dict(map(_split, before)), []
    for name, parameters in known.items():
        if name not in current:
            losses.append(f"{name} is gone")
        elif parameters is not None:
            losses += [f"{name}: {loss}" for loss in _lost(parameters, current[name] or [])]
    for name in current.keys() - known.keys():
        if " must " in name and name.partition(" ")[0] in known:
            losses.append(f"{name}: those that are there do not")
    return sorted(losses)


def _lost(before: list[str], now: list[str]) -> Iterable[str]:
    names = [p.rstrip("=") for p in now]
    for place, parameter in enumerate(before):
        name = parameter.rstrip("=")
        if name not in names and f"kw:{name}" in names:
            yield f"{name} is given by name only"
        elif name.removeprefix("kw:") not in [n.removeprefix("kw:") for n in names]:
            yield f"the parameter {name} is gone"
        elif parameter.endswith("=") and name in now:
            yield f"{name} has no default any more"
        elif name in names and not name.startswith(("kw:", "*")) and names.index(name) != place:
            yield f"{name} stands elsewhere"
    old = [p.rstrip("=").removeprefix("kw:") for p in before]
    for parameter in now:
        if (
            parameter.removeprefix("kw:").rstrip("=") not in old
            and not parameter.endswith("=")
            and "*" not in parameter
        ):
            yield f"{parameter} is new and has no default"


def _split(line: str) -> tuple[str, list[str] | None]:
    name, bracket, rest = line.partition("(")
    return name, [p for p in rest.rstrip(")").split(", ") if p] if bracket else None


if __name__ == "__main__":
    FILE.write_text("\n".join(describe()) + "\n")
