"""One process, one device, and a count of the steps and tokens it ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minivllm.executors.single import SingleExecutor

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.batch import Batch
    from minivllm.core.interfaces import StepHandle
    from minivllm.core.model_config import ModelConfig
    from minivllm.plugins import Registry


class ExampleExecutor(SingleExecutor):
    def __init__(self, config: EngineConfig, model_config: ModelConfig, max_model_len: int, registry: Registry) -> None:
        super().__init__(config, model_config, max_model_len, registry)
        self.steps = self.tokens = 0

    def launch(self, batch: Batch) -> StepHandle:
        """Start a step and return at once."""
        self.steps += 1
        self.tokens += batch.num_tokens
        return super().launch(batch)

    def describe(self) -> dict[str, Any]:
        """The built-in executor's fields, plus ``steps`` and ``tokens`` launched so far."""
        return super().describe() | {"steps": self.steps, "tokens": self.tokens}
