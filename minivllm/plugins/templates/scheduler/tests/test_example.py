"""minivllm's suite for schedulers, plus what this one adds."""

from __future__ import annotations

import pytest

from minivllm.errors import ConfigError
from minivllm.testing import SchedulerConformance
from minivllm.testing.simulation import Ask


class TestExample(SchedulerConformance):
    scheduler = "example"
    options = {"prompt_tokens": 8}

    def test_no_step_holds_more_prompt_tokens(self) -> None:
        world = self.make()
        for length in (30, 3, 20):
            world.add(Ask((1,) * length))
        world.drain()
        assert max(len(batch.token_ids) for batch in world.batches) == 8


def test_a_wrong_option_is_refused() -> None:
    class Wrong(TestExample):
        options = {"prompt_tokens": 0}

    with pytest.raises(ConfigError, match="prompt_tokens=0 is not a whole number from 1"):
        Wrong().make()
