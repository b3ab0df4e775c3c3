"""The decode step of a few sequences through all layers as one kernel (``kernels/megakernel.py``), where the layers and
the attention backend are made for it. ``Decoder`` asks; nothing of a step lives here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from minivllm.core.interfaces import AttentionBackend
from minivllm.kernels.chain_config import ChainShape
from minivllm.kernels.megakernel import (
    MAX_MEGAKERNEL_ROWS,
    PAGE,
    DecoderShape,
    Layers,
    LayerWeights,
    NewTokens,
    megakernel,
    use_megakernel,
)
from minivllm.layers.mlp import GatedMLP

if TYPE_CHECKING:
    from minivllm.layers.decoder import DecoderLayer, SelfAttention


def whole_shape(
    layers: list[DecoderLayer], products: ChainShape, x: torch.Tensor, backend: AttentionBackend
) -> DecoderShape | None:
    """Of layers that go as one kernel in this step; None: they do not. ``products``: the ``chain_shape`` of all."""
    batch = backend.batch
    if len(x) > MAX_MEGAKERNEL_ROWS or batch is None or not batch.num_decodes == batch.num_seqs == len(x):
        return None
    if batch.cascade is not None:
        return None
    if not backend.plain_decode or not backend.keeps_cache_write() or backend.kv_cache.shape[3] != PAGE:
        return None
    alike = {_attention_of(layer) for layer in layers}, {eps for layer in layers for eps in _eps_of(layer)}
    if any(len(kinds) > 1 for kinds in alike):
        return None
    heads = _self_attention(layers[0]).attention
    shape = DecoderShape(products.hidden, products.inner, heads.num_heads, heads.num_kv_heads, heads.head_dim)
    fits = (shape.width, shape.qkv) == (products.width, products.qkv) and backend.kv_cache.dtype == x.dtype
    rotates = heads.rotary.cos_sin.shape[1] == heads.head_dim
    return shape if fits and rotates and use_megakernel(shape, len(x), x.dtype, x.device) else None


def decode_whole(
    layers: list[DecoderLayer],
    shape: DecoderShape,
    x: torch.Tensor,
    positions: torch.Tensor,
    backend: AttentionBackend,
) -> torch.Tensor:
    """The residual stream (rows, hidden) behind all layers, of x (rows, hidden) before them, which have that
    ``whole_shape``."""
    batch, heads = backend.batch, _self_attention(layers[0]).attention
    assert batch is not None
    eps, _ = _eps_of(layers[0])
    weights = [_weights_of(layer, backend) for layer in layers]
    fixed = Layers(shape, weights, heads.rotary.cos_sin, backend.spec.scale, eps, heads.eps)
    return megakernel(x, fixed, NewTokens(positions, batch.slot_mapping, batch.seq_lens, batch.block_tables))


def _self_attention(layer: DecoderLayer) -> SelfAttention:
    return cast("SelfAttention", layer.self_attn)


def _attention_of(layer: DecoderLayer) -> tuple[object, ...]:
    """What must be the same in all layers."""
    heads = _self_attention(layer).attention
    norms = heads.q_norm is None, heads.k_norm is None
    return (heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.rotary, heads.eps, *norms)


def _eps_of(layer: DecoderLayer) -> tuple[float, float]:
    return layer.input_layernorm.eps, layer.post_attention_layernorm.eps


def _weights_of(layer: DecoderLayer, backend: AttentionBackend) -> LayerWeights:
    attention, mlp = _self_attention(layer), cast(GatedMLP, layer.mlp)
    heads = attention.attention
    keys, values = backend.kv_cache[heads.index]
    return LayerWeights(
        attention.qkv_proj.weight,
        attention.o_proj.weight,
        mlp.gate_up_proj.weight,
        mlp.down_proj.weight,
        None if heads.q_norm is None else heads.q_norm.weight,
        None if heads.k_norm is None else heads.k_norm.weight,
        keys,
        values,
    )
