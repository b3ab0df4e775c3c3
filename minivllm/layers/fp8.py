"""``quantization=fp8``: the linear layers of a decoder keep their weights in float8 (e4m3) with a scale per output
feature, and multiply inputs in float8 with a scale per row (``kernels/fp8_linear.py``). Embeddings, the LM head, norms
and routers stay in the model's dtype.

Weights are quantized tensor by tensor as they are loaded, so that a GPU never holds more than it keeps.
"""

from __future__ import annotations

import torch
from torch import nn

from minivllm.errors import ConfigError
from minivllm.kernels.fp8_linear import MULTIPLE
from minivllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minivllm.layers.linear import LinearBase, ReplicatedLinear, RowParallelLinear
from minivllm.layers.parameter import has_whole_rows, keep_in_fp8

_ADVICE = "leave quantization out"
_FORWARDS = (LinearBase.forward, RowParallelLinear.forward)  # others may read the weight themselves


def keep_weights_in_fp8(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Called before the model's parameters are allocated.

    Raises:
        ConfigError: the device or dtype has no products in float8, or half of the model's weights or more would not be
            in float8, because their layers are of other kinds or sizes.
    """
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < (8, 9):
            name = torch.cuda.get_device_name(device)
            raise ConfigError(f"quantization=fp8: {name} has no float8, an H100, H200 or L40 has; {_ADVICE}")
        if dtype != torch.bfloat16:
            its = str(dtype).removeprefix("torch.")
            raise ConfigError(f"quantization=fp8 on a GPU computes in dtype=bfloat16, not {its}; type dtype=bfloat16")
    kept, others = 0, 0
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding | ParallelLMHead):
            continue
        fits = _fits(module)
        for name, param in module.named_parameters(recurse=False):
            if param.dim() < 2:
                continue
            if fits and name == "weight":
                keep_in_fp8(param)
                kept += param.numel()
            else:
                others += param.numel()
    if kept <= others:
        raise ConfigError(
            f"quantization=fp8 would keep {kept / 1e6:.0f} of the {(kept + others) / 1e6:.0f} million weights of "
            f"{type(model).__name__}'s layers in float8: only linear layers can, of sizes that {MULTIPLE} divides, and "
            f"no experts; {_ADVICE}"
        )


def _fits(module: nn.Module) -> bool:
    if not isinstance(module, LinearBase) or isinstance(module, ReplicatedLinear):
        return False
    known = type(module).forward in _FORWARDS and has_whole_rows(module.weight)
    return known and not any(size % MULTIPLE for size in module.weight.shape)
