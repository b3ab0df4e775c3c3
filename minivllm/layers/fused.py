"""Ways through a decoder's layers with fewer kernels than layer by layer: the products between two attentions in one
kernel, all layers in one, or, on several ranks, a large step in parts. ``run_fused`` chooses for each step.

Each way takes layers that nobody has changed: no overridden ``forward``, no hook. That is checked at each such step,
since modules may be replaced at any time; a captured step is checked once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar, cast

import torch
from torch import nn

from minivllm.core.interfaces import AttentionBackend
from minivllm.core.parallel import TensorParallel
from minivllm.kernels.collectives.exchange import PeerExchange
from minivllm.kernels.linear.chain_config import MAX_ROWS as MAX_CHAIN_ROWS
from minivllm.kernels.linear.chain_config import ChainShape
from minivllm.kernels.linear.chain_linear import chain_linear, use_chain
from minivllm.kernels.linear.packed_chain import packed_chain, packed_rows, use_packed
from minivllm.kernels.linear.packed_weights import Order, PackedWeight
from minivllm.kernels.linear.products import norm_gate_up
from minivllm.kernels.megakernel.megakernel import MAX_MEGAKERNEL_ROWS, DecoderShape, Routing
from minivllm.kernels.rms_norm import RowScale
from minivllm.layers.attention import Attention
from minivllm.layers.decoder_layer import DecoderLayer, SelfAttention
from minivllm.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear, adds_as_usual
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.norm import RMSNorm
from minivllm.layers.parts import PartedStream
from minivllm.layers.plain import is_plain
from minivllm.layers.whole import decode_whole, decoder_shape, goes_whole, routed_experts

_Shape = TypeVar("_Shape", ChainShape, DecoderShape)


def run_fused(
    layers: list[nn.Module], x: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend, tp: TensorParallel
) -> tuple[torch.Tensor, list[nn.Module]]:
    """The stream (t, hidden) after some of the layers, from x (t, hidden), and the layers left to run: none, all, or,
    after a step in parts, the last one."""
    exchange = tp.exchange
    if exchange is not None and exchange.takes(x):
        return _in_parts(layers, exchange, x, positions, attention)
    return _at_once(layers, x, positions, attention, tp)


# --------------------------------------------------------------------------- which layers


def is_usual(layer: DecoderLayer) -> bool:
    """Whether nothing of the layer is overridden or has a hook. Its products' weights may be in float8."""
    mlp = layer.mlp
    gated = is_plain(mlp, GatedMLP) and _may_add_otherwise(mlp.down_proj) and is_plain(mlp.gate_up_proj, LinearBase)
    return gated and _attends_as_usual(layer)


def _attends_as_usual(layer: DecoderLayer) -> bool:
    attention = layer.self_attn
    return (
        is_plain(layer, DecoderLayer)
        and is_plain(layer.input_layernorm, RMSNorm)
        and is_plain(layer.post_attention_layernorm, RMSNorm)
        and is_plain(attention, SelfAttention)
        and type(attention).add is SelfAttention.add
        and isinstance(attention.attention, Attention)
        and type(attention.attention).of_stream is Attention.of_stream
        and type(attention.qkv_proj) is QKVParallelLinear
        and is_plain(attention.qkv_proj, LinearBase)
        and _may_add_otherwise(attention.o_proj)
    )


def _may_add_otherwise(product: nn.Module) -> bool:
    """Whether it may add its result to the stream in another way than by ``add_to``."""
    return adds_as_usual(product) and product.bias is None


def _in_float8(layer: DecoderLayer) -> bool | None:
    """Whether the weights of a usual layer's products are in float8; None: some are."""
    kept = {product.weight_scale is not None for product in layer.products()}
    return kept.pop() if len(kept) == 1 else None


def _chain_shape_of(layer: DecoderLayer) -> ChainShape | None:
    """The shape of the layer (of this rank's part), if ``chain_linear`` may compute its matmuls: its norms are folded
    into them."""
    if not _is_fusible(layer) or _in_float8(layer) is not False:
        return None
    qkv, o, gate_up, down = layer.products()
    if not qkv.folded or not gate_up.folded:
        return None
    hidden, width = o.weight.shape
    return ChainShape(hidden, width, down.weight.shape[1], qkv.weight.shape[0])


def _float8_shape_of(layer: DecoderLayer, tp: TensorParallel) -> DecoderShape | None:
    """The shape of the layer (of this rank's part), if its products are in float8."""
    if not _is_fusible(layer) or not _in_float8(layer):
        return None
    return decoder_shape(layer, layer.products()[3].weight.shape[1], ranks=tp.size, float8=True)


def _is_fusible(layer: DecoderLayer) -> bool:
    """Whether it is usual and kernels for several products compute what its attention and MLP do."""
    if not is_usual(layer):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(attention, SelfAttention) and isinstance(mlp, GatedMLP)
    usual = type(attention.attention) is Attention and type(mlp.gate_up_proj) is MergedColumnParallelLinear
    return usual and mlp.activation is norm_gate_up


def _routed_shape_of(layer: DecoderLayer) -> DecoderShape | None:
    """The shape of the layer, if it is usual except for an MLP of experts, on one rank."""
    attention, experts = layer.self_attn, routed_experts(layer.mlp)
    if experts is None or not _attends_as_usual(layer):
        return None
    assert isinstance(attention, SelfAttention)
    kept = attention.qkv_proj.weight_scale, attention.o_proj.weight_scale
    if type(attention.attention) is not Attention or not attention.qkv_proj.folded or kept != (None, None):
        return None
    if {experts.gate_up.dtype, experts.down.dtype} != {experts.router.dtype}:  # experts in float8
        return None
    routing = Routing(len(experts.router), experts.top_k, experts.renormalize)
    return decoder_shape(layer, experts.down.shape[2], routing)


def _shared(layers: Sequence[nn.Module], of: Callable[[DecoderLayer], _Shape | None]) -> _Shape | None:
    """The shape that all layers have, if only the last one may pick tokens; else None."""
    shapes = (of(layer) if isinstance(layer, DecoderLayer) else None for layer in layers)
    shape = next(shapes, None)
    if shape is None or any(other != shape for other in shapes):
        return None
    return shape if all(cast(DecoderLayer, layer).keeps_all_tokens() for layer in layers[:-1]) else None


def chain_shape(layers: Sequence[nn.Module]) -> ChainShape | None:
    """The shape of the layers' products, if they share one and ``chain_linear`` may compute them."""
    return _shared(layers, _chain_shape_of)


def dense_shape(layers: Sequence[nn.Module], tp: TensorParallel) -> DecoderShape | None:
    """The shape of this rank's part of all layers in one kernel, if ranks can synchronize within a kernel."""
    products = chain_shape(layers)
    if products is None or not (tp.size == 1 or tp.words):
        return None
    return _dense_shape(layers[0], products, tp)


def _dense_shape(layer: nn.Module, products: ChainShape, tp: TensorParallel) -> DecoderShape:
    return decoder_shape(cast(DecoderLayer, layer), products.inner, ranks=tp.size)


# --------------------------------------------------------------------------- several products in one kernel


def _at_once(
    layers: list[nn.Module], x: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend, tp: TensorParallel
) -> tuple[torch.Tensor, list[nn.Module]]:
    """Run all layers with several matmuls per kernel, if possible; returns the stream and the layers left to run,
    none or all."""
    most = MAX_CHAIN_ROWS if tp.size == 1 else MAX_MEGAKERNEL_ROWS  # on several ranks the one for few rows exists only
    if len(x) > most or not (tp.size == 1 or tp.words):
        return x, layers
    usual, products = cast(list[DecoderLayer], layers), chain_shape(layers)
    whole = _whole_shape(layers, x, products, attention, tp)
    order = _order_of(usual) if products and (whole or len(x) in packed_rows(products)) else None
    if whole and order and goes_whole(usual, whole, x, attention, order):
        return decode_whole(usual, whole, x, positions, attention, tp, packed=True), []
    if products is not None and tp.size == 1:
        packed = order is Order.UNITS and _goes_packed(products, x)
        if packed or use_chain(len(x), products, x.dtype, x.device):
            return _chained(usual, x, positions, attention, packed), []
    if whole and goes_whole(usual, whole, x, attention):
        return decode_whole(usual, whole, x, positions, attention, tp), []
    return x, layers


def _whole_shape(
    layers: list[nn.Module],
    x: torch.Tensor,
    products: ChainShape | None,
    attention: AttentionBackend,
    tp: TensorParallel,
) -> DecoderShape | None:
    """The shape for running all layers as one kernel: dense, in float8 or with experts; only for steps of few rows."""
    if len(x) > MAX_MEGAKERNEL_ROWS:  # do not ask each layer in vain
        return None
    if products is not None:
        shape: DecoderShape | None = _dense_shape(layers[0], products, tp)
    else:
        shape = _shared(layers, lambda layer: _float8_shape_of(layer, tp))
        shape = shape or (_shared(layers, _routed_shape_of) if tp.size == 1 else None)
    return shape and replace(shape, float8_cache=attention.spec.kv_cache_dtype == "fp8")


def _order_of(layers: list[DecoderLayer]) -> Order | None:
    """The order in which all their weights are packed; None: they are not packed, or in different orders."""
    first = layers[0].products()[0].packed_weight
    if first is None:  # the common case of no packed weights: do not check the others
        return None
    packed = (product.packed_weight for layer in layers for product in layer.products())
    return first.order if all(its is not None and its.order is first.order for its in packed) else None


def _goes_packed(shape: ChainShape, x: torch.Tensor) -> bool:
    """Whether the kernel between attentions reads packed weights in this step, for layers of this shape."""
    return len(x) in packed_rows(shape) and use_packed(len(x), shape, x.dtype, x.device)


def _chained(
    layers: list[DecoderLayer], x: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend, packed: bool
) -> torch.Tensor:
    """The stream after all layers, running each one's matmuls and the next one's projection in one kernel."""
    own = [cast(SelfAttention, layer.self_attn) for layer in layers]
    heads = own[0].attention.of_stream(x, layers[0].input_layernorm, own[0].qkv_proj, positions, attention)
    for (layer, behind), its in zip(pairwise(layers), own[1:], strict=True):
        qkv, scale = _between_attentions(layer, behind, x, heads, packed)
        heads = its.attention(qkv, positions, attention, scale)
    x = own[-1].add(x, heads, attention)
    return cast(torch.Tensor, layers[-1].mlp(x, layers[-1].post_attention_layernorm))


def _between_attentions(
    layer: DecoderLayer, behind: DecoderLayer, x: torch.Tensor, heads: torch.Tensor, packed: bool
) -> tuple[torch.Tensor, RowScale | None]:
    """``layer`` after attention, whose output heads (t, width) is, then the projection of the next layer, ``behind``.
    Adds to x (t, hidden) in place; returns qkv and the scale that its rows still need."""
    products = [*layer.products()[1:], behind.products()[0]]
    bias, eps, eps_behind = products[-1].bias, layer.post_attention_layernorm.eps, behind.input_layernorm.eps
    if packed:
        copies = [cast(PackedWeight, product.packed_weight) for product in products]
        return packed_chain(heads, copies[0], x, copies[1], eps, copies[2], copies[3], eps_behind, bias), None
    o, gate_up, down, qkv = (product.weight for product in products)
    return chain_linear(heads, o, x, gate_up, eps, down, qkv, eps_behind, bias)


# --------------------------------------------------------------------------- in parts, on several ranks


def _in_parts(
    layers: list[nn.Module],
    exchange: PeerExchange,
    x: torch.Tensor,
    positions: torch.Tensor,
    attention: AttentionBackend,
) -> tuple[torch.Tensor, list[nn.Module]]:
    """Run layers in parts; returns the stream and the layers left to run: the last one, whose output must be whole,
    or all of them if one cannot run in parts."""
    *first, last = layers
    if not first or not all(_goes_in_parts(layer) for layer in first):
        return x, layers
    stream = PartedStream(exchange, x)
    parted = cast(list[DecoderLayer], first)
    for layer, behind in zip(parted, [*parted[1:], parted[0]], strict=True):  # unused after the last
        own, mlp, norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
        assert isinstance(own, SelfAttention) and isinstance(mlp, GatedMLP)
        own.in_parts(stream, layer.input_layernorm, positions, attention, norm.eps)
        mlp.in_parts(stream, norm, behind.input_layernorm.eps)
    return stream.whole(), [last]


def _goes_in_parts(layer: nn.Module) -> bool:
    return (
        isinstance(layer, DecoderLayer) and is_usual(layer) and _in_float8(layer) is False and layer.keeps_all_tokens()
    )
