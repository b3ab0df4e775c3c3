"""What executors have in common whose ranks run in other processes: what ranks are told to do between steps, and what
is refused before any is started or told."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from minivllm.core.interfaces import Executor
from minivllm.core.parallel import TensorParallel
from minivllm.errors import AdapterError, RequestError
from minivllm.models.lora_config import PATH

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.model_config import ModelConfig
    from minivllm.executors.messages import Answer
    from minivllm.plugins.registry import Registry

# Methods that ranks are told to call between steps (``StepTaker.call``), and what they are doing meanwhile.
DOING = {
    "place_adapter": "loading an adapter",
    "read_adapter": "reading an adapter",
    "reload_weights": "loading weights",
    "sleep": "falling asleep",
    "wake_up": "waking up",
}


class ElsewhereExecutor(Executor):
    """Its ranks run in other processes, and no object of this one reaches them."""

    name: ClassVar[str]  # as users type it

    @abstractmethod
    def tell_all(self, method: str, argument: str) -> list[Answer]:
        """Have all ranks call one of ``DOING``; returns their answers when all have. Raises EngineDeadError if one
        fails."""

    def reload_weights(self, weights: Path | Iterable[tuple[str, torch.Tensor]] | None) -> None:
        if weights is not None and not isinstance(weights, Path):
            raise RequestError(
                f"weights_iterator with executor={self.name}: its ranks run in other processes, which no tensor of "
                "this one reaches; save the weights as a checkpoint and pass weights_path=DIR"
            )
        self.tell_all("reload_weights", str(weights or ""))

    def load_adapter(self, place: int, folder: Path) -> None:
        answers = self.tell_all("read_adapter", str(folder))
        if refused := [answer.refused for answer in answers if answer.refused]:
            raise AdapterError(refused[0])
        if len({answer.read for answer in answers}) > 1:
            raise AdapterError(f"{PATH}={folder} was written to while ranks read it; ask again when it is complete")
        self.tell_all("place_adapter", str(place))

    def sleep(self, level: int) -> None:
        self.tell_all("sleep", str(level))

    def wake_up(self, tags: Sequence[str]) -> None:
        self.tell_all("wake_up", ",".join(tags))


def refuse_unsplittable(config: EngineConfig, model_config: ModelConfig, registry: Registry) -> None:
    """Build the last rank's model on the meta device: it raises ConfigError if the model cannot be split."""
    name = registry.model_for_architecture(model_config.architecture).name
    model_class = registry.resolve("model", name)
    with torch.device("meta"), registry.building("model", name):
        model_class(model_config, TensorParallel(config.tp - 1, config.tp))
