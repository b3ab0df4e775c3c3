"""Whether a rank packs its weights (``layers/packed.py``): by configuration, device, model and memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from minivllm.errors import ConfigError
from minivllm.kernels import nvrtc
from minivllm.kernels.chain_config import ChainShape
from minivllm.kernels.hopper import compile_ahead
from minivllm.kernels.packed_chain import packed_rows, use_packed
from minivllm.kernels.packed_weights import PACK_KERNEL, packable, packed_bytes
from minivllm.layers.packed import pack_layers, packable_decoders, products_of

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.interfaces import Model

logger = logging.getLogger("minivllm")

_LEFT_FOR_CACHE = 3 / 4  # of the memory that a cache would have, unless packing is asked for
_CACHE_OF_LEFT = 0.9  # at most, of a cache that is asked for; steps need some, too


def pack_weights(
    model: Model, config: EngineConfig, dtype: torch.dtype, device: torch.device, cache_bytes: int
) -> bool:
    """Pack the weights of a model that is loaded, where ``config.packed_weights`` asks for it, or is auto and they fit;
    returns whether. ``cache_bytes``: of the least cache that the configuration allows.

    Raises:
        ConfigError: packed_weights=true, and it cannot be; it says why.
    """
    if config.packed_weights == "false":
        return False
    module = cast(nn.Module, model)
    if (why := _impossible(config, dtype, device)) is None:
        decoders = packable_decoders(module)
        shapes = {shape for decoder in decoders if (shape := decoder.chain_shape()) is not None}
        weights = [product.weight for product in products_of(decoders)]
        why = _unfit(type(model).__name__, shapes, weights, dtype) or _lacks_room(weights, config, device, cache_bytes)
        if why is None and not _runs(shapes, weights, dtype, device):
            why = "the kernel that reads packed weights is not for layers of these sizes, or does not run here"
    if why is None and (name := pack_layers(module)) is not None:
        why = f"{name} has weights whose exponents lie too far apart"
    if why is None:
        return True
    if config.packed_weights == "true":
        raise ConfigError(f"packed_weights=true, but {why}; packed_weights=auto packs where it can")
    logger.debug("weights are not packed: %s", why)
    return False


def _impossible(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """What it is about the configuration or the device."""
    if config.tp > 1:
        return f"only tp=1 reads packed weights, not tp={config.tp}"
    if not nvrtc.available(device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "device=cpu"
        return f"{name} is no Hopper GPU (H100, H200), or the package cuda-bindings is missing"
    if dtype != torch.bfloat16:
        return f"only weights of dtype=bfloat16 are packed, not of dtype={str(dtype).removeprefix('torch.')}"
    return None


def _unfit(model: str, shapes: set[ChainShape], weights: Sequence[torch.Tensor], dtype: torch.dtype) -> str | None:
    """What it is about a model of that class."""
    if not weights or any(weight.dtype != dtype or not weight.is_contiguous() for weight in weights):
        return f"the layers of {model} are not of the kind that reads packed weights"
    for shape in shapes:
        if not packed_rows(shape):
            return f"in layers of {shape.weights / 1e6:.0f} million weights packed ones are not faster"
    return None


def _lacks_room(
    weights: Sequence[torch.Tensor], config: EngineConfig, device: torch.device, cache_bytes: int
) -> str | None:
    """For what there is not enough memory."""
    needed = sum(packed_bytes(*weight.shape) for weight in weights)
    torch.cuda.empty_cache()
    room = torch.cuda.mem_get_info(device)[0] * config.cache.gpu_memory_utilization
    left, asked = room - needed, config.packed_weights == "true"
    if left >= (0 if asked else _LEFT_FOR_CACHE * room) and cache_bytes <= _CACHE_OF_LEFT * left:
        return None
    return (
        f"they take {needed / 2**30:.1f} GiB of the {room / 2**30:.1f} that are left, and the cache at least "
        f"{cache_bytes / 2**30:.1f}; lower cache.num_blocks or max_model_len, or raise "
        f"cache.gpu_memory_utilization={config.cache.gpu_memory_utilization}"
    )


def _runs(shapes: set[ChainShape], weights: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel is for those sizes and loads here; compiles it, and beside it the one that packs."""
    compile_ahead(PACK_KERNEL)
    fits = all(packable(*weight.shape) for weight in weights)
    return fits and all(use_packed(packed_rows(shape)[0], shape, dtype, device) for shape in shapes)
