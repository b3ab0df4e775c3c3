"""docs/config.md is what the schema says now."""

from __future__ import annotations

import runpy

from pages import ROOT

from minivllm.config.keys import keys_of
from minivllm.config.modes import MODES

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "config_reference.py"))


def test_the_committed_page_is_current() -> None:
    stored = SCRIPT["PAGE"].read_text(encoding="utf-8") if SCRIPT["PAGE"].exists() else ""
    # Not compared in the assert itself, whose report would be the whole page.
    current = stored == SCRIPT["page"]()
    assert current, f"docs/config.md is not what the schema says; run: {SCRIPT['COMMAND']}"


def test_every_key_has_a_row_with_its_help() -> None:
    """Read from the schema, not from the script."""
    rows = SCRIPT["page"]().splitlines()
    for mode in MODES.values():
        for key in keys_of(mode.schema).values():
            if key.name == "mode" or key.name.endswith(".name"):
                continue  # what group=option sets
            shown = [row for row in rows if row.startswith(f"| `{key.name}` |")]
            assert any(key.help.replace("|", r"\|") in row for row in shown), key.name
