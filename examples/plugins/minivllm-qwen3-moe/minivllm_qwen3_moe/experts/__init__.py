"""What computes the experts, by name: ``torch`` is the reference, ``triton`` is for GPUs.

A backend of your own: subclass ``Experts``, put it into ``BACKENDS``, type ``model.options.experts=NAME``.
"""

from __future__ import annotations

import torch

from minivllm.errors import ConfigError
from minivllm_qwen3_moe.experts.interface import Experts, Weights
from minivllm_qwen3_moe.experts.torch import TorchExperts
from minivllm_qwen3_moe.experts.triton import TritonExperts

__all__ = ["AUTO", "BACKENDS", "Experts", "Weights", "choose"]

AUTO = "auto"
BACKENDS: dict[str, type[Experts]] = {"triton": TritonExperts, "torch": TorchExperts}  # as auto tries them


def choose(name: str, device: torch.device, dtype: torch.dtype) -> type[Experts]:
    """The backend of that name, or the first that can. Raises ConfigError with the reasons if it cannot."""
    if name == AUTO:
        return next(b for b in BACKENDS.values() if device.type in b.devices and not b.unsupported(device, dtype))
    if reasons := BACKENDS[name].unsupported(device, dtype):
        here = [other for other, backend in BACKENDS.items() if not backend.unsupported(device, dtype)]
        raise ConfigError(
            f"model.options.experts={name} cannot run here: {'; '.join(reasons)}. These can: {', '.join((AUTO, *here))}"
        )
    return BACKENDS[name]
