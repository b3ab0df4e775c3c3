from __future__ import annotations

import os

from fake_plugins import fake_plugin  # noqa: F401

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
