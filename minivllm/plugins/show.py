"""What ``minivllm plugins list`` prints."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from minivllm.plugins.registry import Entry, Registry
from minivllm.plugins.types import ModelComponent


def as_table(registry: Registry) -> str:
    """Every component, one per line; then any problems with plugins."""
    rows = [("KIND", "NAME", "PACKAGE", "USABLE", "WHAT")]
    for entry in registry.entries():
        component, why = entry.component, registry.usable_here(entry.component)
        name = component.name + (f" ({', '.join(component.aliases)})" if component.aliases else "")
        what = f"not here: {'; '.join(why)}" if why else _what(entry)
        rows.append((entry.kind, name, str(entry.provider), "no" if why else "yes", what))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row[:4], widths, strict=True)), row[4]]).rstrip() for row in rows]
    if registry.disabled:
        lines += ["", "Disabled by MINIVLLM_DISABLE_PLUGINS: " + ", ".join(registry.disabled)]
    if registry.reports:
        lines += ["", "Problems:", *(f"  {report}" for report in registry.reports)]
    return "\n".join(lines)


def as_json(registry: Registry) -> str:
    components = [_as_dict(entry, registry) for entry in registry.entries()]
    tree = {
        "components": components,
        "disabled": list(registry.disabled),
        "problems": [asdict(report) for report in registry.reports],
    }
    return json.dumps(tree, indent=2, default=_name_of)


def _name_of(value: Any) -> str:
    """What JSON cannot hold of a component: a function, such as ``read_config``."""
    return f"{value.__module__}:{value.__qualname__}"


def _as_dict(entry: Entry, registry: Registry) -> dict[str, Any]:
    why, provider = registry.usable_here(entry.component), entry.provider
    return {
        "kind": entry.kind,
        **asdict(entry.component),
        "package": provider.package,
        "version": provider.version,
        "plugin": provider.plugin,
        "builtin": provider.builtin,
        "usable": not why,
        "why_not": why,
    }


def _what(entry: Entry) -> str:
    component = entry.component
    text = component.description
    if isinstance(component, ModelComponent):
        text += f" [{', '.join(component.architectures)}]"
    return text.strip()
