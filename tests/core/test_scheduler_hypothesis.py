"""The built-in schedulers through the suite for schedulers, with what only they promise checked at each step."""

from __future__ import annotations

import os

from simulation import World

from minivllm.testing import SchedulerConformance


class TestMixed(SchedulerConformance):
    scheduler = "mixed"
    world = World
    examples = int(os.environ.get("MINIVLLM_EXAMPLES", "1400")) // 2


class TestPrefillFirst(TestMixed):
    scheduler = "prefill_first"
