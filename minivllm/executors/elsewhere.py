"""What executors whose ranks run in other processes refuse before they start or tell any."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from minivllm.core.parallel import TensorParallel
from minivllm.errors import RequestError

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.model_config import ModelConfig
    from minivllm.plugins.registry import Registry


def folder_of(weights: Path | Iterable[tuple[str, torch.Tensor]] | None, executor: str) -> Path | None:
    """What ranks are told of the weights to load. Raises RequestError for tensors."""
    if weights is None or isinstance(weights, Path):
        return weights
    raise RequestError(
        f"weights_iterator with executor={executor}: its ranks run in other processes, which no tensor of this one "
        "reaches; save the weights as a checkpoint and pass weights_path=DIR"
    )


def refuse_unsplittable(config: EngineConfig, model_config: ModelConfig, registry: Registry) -> None:
    """Build the last rank's model on the meta device: it raises ConfigError if the model cannot be split."""
    name = registry.model_for_architecture(model_config.architecture).name
    model_class = registry.resolve("model", name)
    with torch.device("meta"), registry.building("model", name):
        model_class(model_config, TensorParallel(config.tp - 1, config.tp))
