"""LoRA adapters for a benchmark's requests: random ones, written to a folder that is gone once they are loaded."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.core.lora_request import LoRARequest
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.config.modes import WorkloadOptions
    from minivllm.core.engine import LLMEngine


def check_adapters(options: WorkloadOptions, config: EngineConfig) -> None:
    """Raise ConfigError if the engine would not have as many adapters at once: requests would wait for loads."""
    many = options.num_adapters
    if many is not None and (not config.enable_lora or many > config.max_loras):
        raise ConfigError(
            f"workload.num_adapters={many} needs an engine with as many places; type enable_lora=true max_loras={many}"
        )


def load_random_adapters(engine: LLMEngine, options: WorkloadOptions) -> list[LoRARequest]:
    """``num_adapters`` of them, for all linear layers that take any."""
    from minivllm.models.request_adapters import write_random_adapter
    from minivllm.plugins.manager import default_registry

    config, made = engine.config, []
    model_class = default_registry().model_class_for(engine.model_config.architecture)
    for number in range(1, 1 + (options.num_adapters or 0)):
        with tempfile.TemporaryDirectory(prefix="minivllm-") as folder:
            write_random_adapter(Path(folder), engine.model_config, model_class, config.max_lora_rank, number)
            made.append(LoRARequest(f"random {number}", number, folder))
            engine.add_lora(made[-1])
    return made
