"""``quantization=fp8``: the linear layers of a decoder keep their weights in float8 (e4m3) with a scale per output
feature, and multiply inputs in float8 with a scale per row (``kernels/linear/fp8_linear.py``). So do modules that mark
their parameters, as experts (``sharded_parameter``). Embeddings, the LM head, norms and routers stay in the model's
dtype.

Weights are quantized tensor by tensor as they are loaded, so that a GPU never holds more than it keeps.
"""

from __future__ import annotations

import torch
from torch import nn

from minivllm.errors import ConfigError
from minivllm.kernels.linear.fp8_linear import MULTIPLE
from minivllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minivllm.layers.parameter import has_whole_rows, keep_in_fp8
from minivllm.layers.usual import usual_products

_ADVICE = "leave quantization out"


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
    fitting = {module for _, module in usual_products(model) if _fits(module.weight)}
    kept, left = 0, 0
    largest = 0, ""
    for path, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding | ParallelLMHead):
            continue
        for name, param in module.named_parameters(recurse=False):
            if param.dim() < 2:
                continue
            if (module in fitting and name == "weight") or _is_marked(param):
                keep_in_fp8(param)
                kept += param.numel()
            else:
                left += param.numel()
                largest = max(largest, (param.numel(), f"{path}.{name} {list(param.shape)}"))
    if kept <= left:
        raise ConfigError(
            f"quantization=fp8 would keep {100 * kept // max(kept + left, 1)}% of the weights of "
            f"{type(model).__name__}'s layers in float8, and not {largest[1] or 'any'}: only linear layers can be, of "
            f"sizes that {MULTIPLE} divides, and experts whose model says that they may_be_fp8; {_ADVICE}"
        )


def _is_marked(param: nn.Parameter) -> bool:
    return getattr(param, "may_be_fp8", False) and has_whole_rows(param)


def _fits(weight: nn.Parameter) -> bool:
    return has_whole_rows(weight) and not any(size % MULTIPLE for size in weight.shape)
