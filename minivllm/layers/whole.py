"""Runs a decode step of a few sequences through all layers as one kernel (``kernels/megakernel/megakernel.py``), if the
layers and the attention backend allow it. Called by ``layers/fused.py``; keeps no state of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import nn

from minivllm.core.interfaces import AttentionBackend
from minivllm.core.overrides import overrides_both
from minivllm.core.parallel import TensorParallel
from minivllm.kernels.linear.packed_weights import Order
from minivllm.kernels.megakernel.megakernel import (
    MAX_MEGAKERNEL_ROWS,
    PAGE,
    DecoderShape,
    DecodeTokens,
    Layers,
    LayerWeights,
    Routing,
    megakernel,
    packed_megakernel_rows,
    use_megakernel,
)
from minivllm.layers.decoder_layer import DecoderLayer, SelfAttention
from minivllm.layers.experts import RoutedExperts, RoutedMLP
from minivllm.layers.linear import LinearBase
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.plain import is_plain

_T = TypeVar("_T")


def decoder_shape(
    layer: DecoderLayer, inner: int, routing: Routing | None = None, ranks: int = 1, float8: bool = False
) -> DecoderShape:
    """The shape of a layer with the usual attention. ``inner``: the width of its MLP, or of each expert."""
    attention = _self_attention(layer)
    hidden, heads, biased = attention.o_proj.weight.shape[0], attention.attention, attention.qkv_proj.bias is not None
    sizes = hidden, inner, heads.num_heads, heads.num_kv_heads, heads.head_dim
    return DecoderShape(*sizes, routing, ranks, biased, float8)


def routed_experts(mlp: nn.Module) -> RoutedExperts | None:
    """The experts that compute the same as calling this MLP; None: it must be called."""
    if not overrides_both(type(mlp), "forward", "routed_experts") or not is_plain(mlp, type(mlp)):
        return None
    return cast(RoutedMLP, mlp).routed_experts()


def attends_plainly(backend: AttentionBackend) -> bool:
    """Whether the all-layers kernel implements this backend's decode attention; a given step may still differ."""
    return backend.plain_decode and backend.keeps_cache_write() and backend.spec.block_size == PAGE


def goes_whole(
    layers: list[DecoderLayer],
    shape: DecoderShape,
    x: torch.Tensor,
    backend: AttentionBackend,
    packed: Order | None = None,
) -> bool:
    """Whether layers of this shape run as one kernel in this step. ``packed``: the order of packed weights, if used."""
    batch = backend.batch
    if packed and len(x) not in packed_megakernel_rows(shape, packed):
        return False
    if len(x) > MAX_MEGAKERNEL_ROWS or batch is None or not batch.num_decodes == batch.num_seqs == len(x):
        return False
    if batch.cascade is not None:
        return False
    if not attends_plainly(backend):
        return False
    alike = {_attention_of(layer) for layer in layers}, {eps for layer in layers for eps in _eps_of(layer)}
    if any(len(kinds) > 1 for kinds in alike):
        return False
    own = _self_attention(layers[0])
    products = own.o_proj.weight.shape, own.qkv_proj.weight.shape
    fits = products == ((shape.hidden, shape.width), (shape.qkv, shape.hidden))
    fits = fits and backend.kv_cache.dtype == (torch.float8_e4m3fn if shape.float8_cache else x.dtype)
    rotates = own.attention.rotary.cos_sin.shape[1] == shape.head_dim
    return fits and rotates and use_megakernel(shape, len(x), x.dtype, x.device, packed)


def decode_whole(
    layers: list[DecoderLayer],
    shape: DecoderShape,
    x: torch.Tensor,
    positions: torch.Tensor,
    backend: AttentionBackend,
    tp: TensorParallel,
    packed: bool = False,
) -> torch.Tensor:
    """The residual stream (rows, hidden) after all layers, from x (rows, hidden). Requires ``goes_whole``."""
    batch, heads = backend.batch, _self_attention(layers[0]).attention
    assert batch is not None
    eps, _ = _eps_of(layers[0])
    weights = [_weights_of(layer, shape, backend, packed) for layer in layers]
    fixed = Layers(shape, weights, heads.rotary.cos_sin, backend.spec.scale, eps, heads.eps, tp.words)
    return megakernel(x, fixed, DecodeTokens(positions, batch.slot_mapping, batch.seq_lens, batch.block_tables))


def _self_attention(layer: DecoderLayer) -> SelfAttention:
    return cast(SelfAttention, layer.self_attn)


def _attention_of(layer: DecoderLayer) -> tuple[object, ...]:
    """What must be the same in all layers."""
    own = _self_attention(layer)
    heads = own.attention
    there = heads.q_norm is not None, heads.k_norm is not None, own.qkv_proj.bias is not None
    return (heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.rotary, heads.eps, *there)


def _eps_of(layer: DecoderLayer) -> tuple[float, float]:
    return layer.input_layernorm.eps, layer.post_attention_layernorm.eps


def _weights_of(layer: DecoderLayer, shape: DecoderShape, backend: AttentionBackend, packed: bool) -> LayerWeights:
    attention, mlp = _self_attention(layer), layer.mlp
    heads = attention.attention
    experts = routed_experts(mlp)
    weights: tuple[torch.Tensor, torch.Tensor]
    if experts is None:
        assert isinstance(mlp, GatedMLP)
        weights = mlp.gate_up_proj.weight, mlp.down_proj.weight
    else:
        weights = experts.gate_up, experts.down
    keys, values = backend.kv_cache[heads.index]
    return LayerWeights(
        attention.qkv_proj.weight,
        attention.o_proj.weight,
        *weights,
        None if heads.q_norm is None else heads.q_norm.weight,
        None if heads.k_norm is None else heads.k_norm.weight,
        keys,
        values,
        None if experts is None else experts.router,
        layer.post_attention_layernorm.weight if experts is not None or shape.float8 else None,
        _of_products(layer, lambda its: its.packed_weight) if packed else None,
        attention.qkv_proj.bias,
        layer.input_layernorm.weight if shape.float8 else None,
        _of_products(layer, lambda its: its.weight_scale) if shape.float8 else None,
    )


def _of_products(layer: DecoderLayer, get: Callable[[LinearBase], _T | None]) -> tuple[_T, _T, _T, _T]:
    """What each of the layer's products has."""
    qkv, o, gate_up, down = (cast(_T, get(product)) for product in layer.products())
    return qkv, o, gate_up, down
