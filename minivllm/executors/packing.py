"""Decides whether a rank packs its weights (``layers/packed.py``), by configuration, device, model and memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from minivllm.errors import ConfigError
from minivllm.kernels import nvrtc
from minivllm.kernels._triton import num_sms
from minivllm.kernels.hopper import compile_ahead
from minivllm.kernels.linear.chain_config import ChainShape
from minivllm.kernels.linear.packed_chain import packed_chain_config, packed_kernel, packed_rows, use_packed
from minivllm.kernels.linear.packed_linear import MIN_WEIGHTS, linear_config, linear_kernel, use_packed_linear
from minivllm.kernels.linear.packed_weights import PACK_KERNEL, Order, packable, packed_bytes
from minivllm.kernels.megakernel.megakernel import DecoderShape, megakernel_config, megakernel_of, use_megakernel
from minivllm.layers.embedding import rank_rows
from minivllm.layers.fused import chain_shape, dense_shape
from minivllm.layers.packed import (
    Product,
    Ways,
    heads_of,
    pack_products,
    packable_decoders,
    packed_ways,
    products_of,
    unpack_products,
)

if TYPE_CHECKING:
    from minivllm.config.engine_config import EngineConfig
    from minivllm.core.interfaces import Model
    from minivllm.core.model_config import ModelConfig
    from minivllm.core.parallel import TensorParallel
    from minivllm.executors.memory import MemoryShare

logger = logging.getLogger("minivllm")

_LEFT_FOR_CACHE = 3 / 4  # of the memory available to the cache, unless packing is requested
_CACHE_OF_LEFT = 0.9  # at most, for a cache of a requested size; steps need memory, too


def compile_for_packing(config: EngineConfig, its: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """While weights load, start compiling the packing kernels and those that ``pack_weights`` will need, if the model
    is a usual one."""
    if config.packed_weights == "false" or _impossible(dtype, device) is not None:
        return
    compile_ahead(PACK_KERNEL)
    tp, sms = config.tp, num_sms(device)
    kv_heads = max(its.num_kv_heads // tp, 1)
    sizes = its.hidden_size, its.intermediate_size // tp, its.num_heads // tp, kv_heads, its.head_dim
    shape = DecoderShape(*sizes, ranks=tp, float8_cache=config.cache.dtype == "fp8")
    # MLPs of experts have other sizes and are not packed; nor is what is kept in float8
    others = config.quantization != "none" or any("experts" in key for key in its.hf_config)
    chain, whole, order = Ways(None, None, Order.UNITS) if others else packed_ways(shape.products, shape, tp)
    if chain and (chained := packed_chain_config(packed_rows(chain)[0], chain, sms)):
        compile_ahead(packed_kernel(chain, chained))
    if whole and (cut := megakernel_config(whole, 1, sms, order)):
        compile_ahead(megakernel_of(whole, cut))
    head = rank_rows(its.vocab_size, tp)[0], its.hidden_size
    if head[0] * head[1] >= MIN_WEIGHTS and (linear := linear_config(1, *head, sms)) is not None:
        compile_ahead(linear_kernel(*head, linear))


def pack_weights(
    model: Model,
    config: EngineConfig,
    tp: TensorParallel,
    dtype: torch.dtype,
    device: torch.device,
    memory: MemoryShare | None,
    cache_bytes: int,
    plain: bool,
) -> bool:
    """Pack the LM head and layer weights of a loaded model if ``config.packed_weights`` is true, or is auto and they
    fit on all ranks; returns whether any were packed. ``memory``: the rank's, on a GPU; ``cache_bytes``: the smallest
    cache that the configuration allows. ``plain``: its attention ``attends_plainly``.

    Raises:
        ConfigError: packed_weights=true, but some that would be faster cannot be packed, or none would be; says why.
    """
    if config.packed_weights == "false":
        return False
    module, asked = cast(nn.Module, model), config.packed_weights == "true"
    reasons: list[str] = []
    impossible = _impossible(dtype, device)
    parts = _heads(module), _layers(module, plain, config.cache.dtype == "fp8")
    for part in parts:
        unfit = impossible or part.unfit or part.odd(dtype)
        why = unfit or _pack(part, module, config, dtype, device, memory, cache_bytes)
        if not tp.minimum(int(why is None), device) and why is None:  # ranks' kernels wait for each other
            unpack_products(part.products)
            why = f"{part.what} are not packed on another rank"
        if why is not None:
            reasons.append(why)
            if asked and unfit is None:
                raise _refusal(why)
    if asked and len(reasons) == len(parts):
        raise _refusal(", and ".join(dict.fromkeys(reasons)))
    for why in dict.fromkeys(reasons):
        logger.debug("weights are not packed: %s", why)
    return len(reasons) < len(parts)


def _pack(
    part: _Part,
    model: nn.Module,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    memory: MemoryShare | None,
    cache_bytes: int,
) -> str | None:
    """Pack this part, or return why it cannot be packed."""
    assert memory is not None, "only weights on a GPU can be packed"
    if (why := _lacks_room(part.weights, config, memory, cache_bytes)) is not None:
        return why
    if not all(packable(*weight.shape) for weight in part.weights) or not part.runs(dtype, device):
        return f"the kernel of packed weights is not for the sizes of {part.what}, or does not run here"
    if (name := pack_products(model, part.products)) is not None:
        return f"{name} has weights whose exponents lie too far apart"
    return None


def _refusal(why: str) -> ConfigError:
    return ConfigError(f"packed_weights=true, but {why}; packed_weights=auto packs where it can")


@dataclass(frozen=True)
class _Part:
    """The part of a model that is packed as a whole or not at all. ``unfit``: why packing would gain nothing."""

    what: str
    products: Mapping[Product, Order]
    unfit: str | None
    runs: Callable[[torch.dtype, torch.device], bool]  # whether the kernel supports these and loads; compiles it

    @property
    def weights(self) -> list[torch.Tensor]:
        return [product.weight for product in self.products]

    def odd(self, dtype: torch.dtype) -> str | None:
        if self.weights and all(weight.dtype == dtype and weight.is_contiguous() for weight in self.weights):
            return None
        return f"{self.what} are not of the kind that reads packed weights"


def _heads(model: nn.Module) -> _Part:
    heads = heads_of(model)
    sizes = {(head.weight.shape[0], head.weight.shape[1]) for head in heads}
    unfit = next((f"in LM heads of {lines * k / 1e6:.0f} million weights packed ones are not faster"
                  for lines, k in sizes if lines * k < MIN_WEIGHTS), None)  # fmt: skip

    def runs(dtype: torch.dtype, device: torch.device) -> bool:
        return all(use_packed_linear(1, lines, k, dtype, device) for lines, k in sizes)

    return _Part(f"the LM heads of {type(model).__name__}", dict.fromkeys(heads, Order.UNITS), unfit, runs)


def _layers(model: nn.Module, plain: bool, float8_cache: bool) -> _Part:
    ways: dict[ChainShape, Ways] = {}
    products: dict[Product, Order] = {}
    for decoder in packable_decoders(model):
        layers = list(decoder.layers)
        if chain := chain_shape(layers):
            whole = dense_shape(layers, decoder.tp) if plain else None
            whole = whole and replace(whole, float8_cache=float8_cache)
            ways[chain] = packed_ways(chain, whole, decoder.tp.size)
            products |= dict.fromkeys(products_of(decoder), ways[chain].order)
    unfit = None
    if none := next((chain for chain, its in ways.items() if not its), None):
        its = f"layers of {none.weights / 1e6:.0f} million weights"
        unfit = f"in {its} packed ones are not faster" if plain else f"with this attention, {its} are not read packed"

    def runs(dtype: torch.dtype, device: torch.device) -> bool:
        def reads(its: Ways) -> bool:
            if its.whole and use_megakernel(its.whole, 1, dtype, device, its.order):
                return True
            return its.chain is not None and use_packed(packed_rows(its.chain)[0], its.chain, dtype, device)

        return all(map(reads, ways.values()))

    return _Part(f"the layers of {type(model).__name__}", products, unfit, runs)


def _impossible(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the device or dtype rules packing out."""
    if not nvrtc.available(device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "device=cpu"
        return f"{name} is no Hopper GPU (H100, H200), or the package cuda-bindings is missing"
    if dtype != torch.bfloat16:
        return f"only weights of dtype=bfloat16 are packed, not of dtype={str(dtype).removeprefix('torch.')}"
    return None


def _lacks_room(
    weights: Sequence[torch.Tensor], config: EngineConfig, memory: MemoryShare, cache_bytes: int
) -> str | None:
    """What there is not enough memory for, if anything."""
    needed = sum(packed_bytes(*weight.shape) for weight in weights)
    room = memory.left()
    left, asked = room - needed, config.packed_weights == "true"
    if left >= (0 if asked else _LEFT_FOR_CACHE * room) and cache_bytes <= _CACHE_OF_LEFT * left:
        return None
    return (
        f"they take {needed / 2**30:.1f} GiB of the {max(room, 0) / 2**30:.1f} that are left, and the cache at least "
        f"{cache_bytes / 2**30:.1f}; lower cache.num_blocks or max_model_len, or raise "
        f"cache.gpu_memory_utilization={config.cache.gpu_memory_utilization}"
    )
