"""Mixed batches with a limit on prompt tokens per step, so that long prompts do not delay decodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.core.scheduler import MixedScheduler
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from minivllm.config.engine_config import SchedulerOptions
    from minivllm.core.interfaces import BlockManager

PROMPT_TOKENS = 512


class ExampleScheduler(MixedScheduler):
    """Raises ConfigError if ``scheduler.options.prompt_tokens`` is not a positive integer."""

    def __init__(
        self, options: SchedulerOptions, blocks: BlockManager, max_model_len: int, sampler_row: np.dtype | None = None
    ) -> None:
        super().__init__(options, blocks, max_model_len, sampler_row)
        self.prompt_tokens = options.options.get("prompt_tokens", PROMPT_TOKENS)
        if type(self.prompt_tokens) is not int or self.prompt_tokens < 1:
            raise ConfigError(f"scheduler.options.prompt_tokens={self.prompt_tokens} is not a whole number from 1")

    def take_chunks(self, budget: int) -> list[tuple[int, int]]:
        """Prompt chunks as (slot, number of tokens)."""
        return super().take_chunks(min(budget, self.prompt_tokens))
