"""The built-in schedulers through the suite for schedulers, with what only they promise checked at each step."""

from __future__ import annotations

import os

import pytest
from simulation import World

from minivllm.testing import SchedulerConformance


class TestMixed(SchedulerConformance):
    scheduler = "mixed"
    world = World
    examples = int(os.environ.get("MINIVLLM_EXAMPLES", "1000")) // 2


class TestPrefillFirst(TestMixed):
    scheduler = "prefill_first"


class TestShortSight(TestMixed):
    """Most that wait are behind those that a step looks at; of them only the shortest may be admitted."""

    patched: pytest.MonkeyPatch
    limits: tuple[str, ...] = ("waiting._LOOK_AHEAD",)

    @classmethod
    def setup_class(cls) -> None:
        cls.patched = pytest.MonkeyPatch()
        for name in cls.limits:
            cls.patched.setattr(f"minivllm.core.{name}", 1)

    @classmethod
    def teardown_class(cls) -> None:
        cls.patched.undo()


class TestImpatience(TestShortSight):
    """Decodes soon get a step, and few may pass the head of the queue."""

    scheduler = "prefill_first"
    limits = ("scheduler._MOST_PROMPT_STEPS", "waiting._MAX_OVERTAKEN")
