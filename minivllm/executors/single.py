"""One process, one device: the rank runs in the scheduler's process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.core.interfaces import Executor, StepHandle
from minivllm.core.parallel import TensorParallel
from minivllm.errors import ConfigError
from minivllm.executors.worker import Worker

if TYPE_CHECKING:
    import torch

    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.batch import Batch, TokenMasks
    from minivllm.core.model_config import ModelConfig
    from minivllm.plugins.registry import Registry


class SingleExecutor(Executor):
    """One rank, in this process. Raises ConfigError for ``tp`` other than 1."""

    takes_masks = True

    def __init__(self, config: EngineConfig, model_config: ModelConfig, max_model_len: int, registry: Registry) -> None:
        if config.tp != 1:
            raise ConfigError(
                f"tp={config.tp} with executor={config.executor.name}: one process holds one rank; set tp=1"
            )
        self._worker = Worker(config, model_config, max_model_len, registry, TensorParallel())
        self._about: dict[str, Any] = {}

    def start(self) -> int:
        blocks = self._worker.start()
        self._about = self._worker.describe()
        return blocks

    def launch(self, batch: Batch) -> StepHandle:
        return self._worker.launch(batch)

    def guide(self, masks: TokenMasks) -> None:
        self._worker.guide(masks)

    def reload_weights(self, weights: Path | Iterable[tuple[str, torch.Tensor]] | None) -> None:
        self._worker.reload_weights(weights)

    def load_adapter(self, place: int, folder: Path) -> None:
        self._worker.load_adapter(place, folder)

    def sleep(self, level: int) -> None:
        self._worker.sleep(level)

    def wake_up(self, tags: Sequence[str]) -> None:
        self._worker.wake_up(tags)

    def check_health(self) -> None:
        """Does nothing: this process is alive if its caller is."""

    def describe(self) -> dict[str, Any]:
        return self._about

    def shutdown(self) -> None:
        self._worker.shutdown()
