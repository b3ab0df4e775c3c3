"""The name of ``vllm.lora.request``."""

from __future__ import annotations

from minivllm.core.lora_request import LoRARequest

__all__ = ["LoRARequest"]
