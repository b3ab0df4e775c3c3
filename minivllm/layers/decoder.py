"""What dense decoders share: self-attention, the pre-norm layer, the stack, and the language-model head.

A model file subclasses ``DecoderLayer`` for what is specific to it and names that class in its ``CausalLM``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, Protocol, TypeVar, cast

import torch
from torch import nn

from minivllm.core.interfaces import AttentionBackend, Model, overrides_both
from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.kernels._triton import compiling
from minivllm.kernels.capture import only_loads
from minivllm.kernels.chain_config import MAX_ROWS as MAX_CHAIN_ROWS
from minivllm.kernels.chain_config import ChainShape
from minivllm.kernels.chain_linear import chain_linear, use_chain
from minivllm.kernels.exchange import PeerExchange
from minivllm.kernels.megakernel import MAX_MEGAKERNEL_ROWS, DecoderShape, Routing
from minivllm.kernels.packed_chain import packed_chain, packed_rows, use_packed
from minivllm.kernels.packed_weights import Order, PackedWeight
from minivllm.kernels.sampling import Shard
from minivllm.kernels.skinny_linear import norm_gate_up
from minivllm.layers.attention import Attention, launch_all_kinds
from minivllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minivllm.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.norm import RMSNorm
from minivllm.layers.parameter import ShardId
from minivllm.layers.parts import PartedStream, adds_parts
from minivllm.layers.plain import is_plain
from minivllm.layers.rotary import RotaryTable
from minivllm.layers.whole import decode_whole, decoder_shape, goes_whole, routed_experts

_Shape = TypeVar("_Shape", ChainShape, DecoderShape)
_Pick = Callable[[torch.Tensor, torch.Tensor, AttentionBackend], tuple[torch.Tensor, torch.Tensor]]


class LayerFactory(Protocol):
    """Creates layer ``index`` of a decoder; a layer class is one."""

    def __call__(self, config: ModelConfig, tp: TensorParallel, index: int, rotary: RotaryTable, /) -> nn.Module: ...


class SelfAttention(nn.Module):
    """Grouped-query self-attention with rotary embeddings. ``qk_norm`` normalizes each head's q and k before rotary;
    ``scale`` multiplies the scores (default head_dim**-0.5).

    Like the MLP, it takes the residual stream and the norm before it, and adds its output to the stream in place.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        index: int,
        rotary: RotaryTable,
        *,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        out_bias: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = QKVParallelLinear(config.hidden_size, heads, kv_heads, head_dim, tp, bias=qkv_bias)
        self.o_proj = RowParallelLinear(
            heads * head_dim, config.hidden_size, tp, bias=out_bias, what="attention heads' width"
        )
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if qk_norm else None
        self.attention = Attention(
            index,
            self.qkv_proj.num_heads,
            self.qkv_proj.num_kv_heads,
            head_dim,
            rotary,
            scale=scale,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
        )
        self._pick: _Pick = _all_tokens

    def forward(
        self, x: torch.Tensor, norm: RMSNorm, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """x: (t, hidden), the residual stream, updated in place and returned. In the last layer, a new tensor of only
        the picked tokens may be returned (``pick_last_tokens``)."""
        return self.add(x, self.attention.of_stream(x, norm, self.qkv_proj, positions, attention), attention)

    def add(self, x: torch.Tensor, heads: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """The part of ``forward`` after attention: project heads (t, width) and add them to x."""
        return self.o_proj.add_to(*self._pick(x, heads, attention))

    def in_parts(
        self, stream: PartedStream, norm: RMSNorm, positions: torch.Tensor, attention: AttentionBackend, eps: float
    ) -> None:
        """``forward`` of all tokens, see ``DecoderLayer.goes_in_parts``; returns with sums in flight. ``eps``: of the
        following norm."""
        heads = self.attention.of_parts(stream, norm, self.qkv_proj, positions, attention)
        stream.add(self.o_proj, [heads[part.rows] for part in stream.parts], eps)


def launch_all_heads(model: Model, backend: AttentionBackend) -> None:
    """``launch_all_kinds`` for the first layer with plain ``Attention``; the others are like it."""
    for module in model.modules():  # type: ignore[attr-defined]
        if isinstance(module, SelfAttention) and type(module.attention) is Attention:
            if type(module.qkv_proj) is QKVParallelLinear:
                launch_all_kinds(module.attention, module.qkv_proj, backend)
            return


def _all_tokens(x: torch.Tensor, heads: torch.Tensor, backend: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
    return x, heads


def _last_tokens(x: torch.Tensor, heads: torch.Tensor, backend: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
    """x (t, hidden), heads (t, width): copies of the rows in ``last_tokens``, or all rows if it is None."""
    assert backend.batch is not None
    last = backend.batch.last_tokens
    return (x, heads) if last is None else (x.index_select(0, last), heads.index_select(0, last))


class DecoderLayer(nn.Module):
    """Pre-norm attention, then a pre-norm MLP, each added to the residual stream."""

    self_attn: nn.Module
    mlp: nn.Module

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """x: (t, hidden), the residual stream, updated in place; returns it."""
        x = self.self_attn(x, self.input_layernorm, positions, attention)
        return self.mlp(x, self.post_attention_layernorm)

    def norm_pairs(self) -> list[tuple[RMSNorm, QKVParallelLinear | MergedColumnParallelLinear]]:
        """Each norm whose output only one matmul reads, with that matmul: the loader may fold the norm's weight in.

        An overridden ``forward``, here or in a submodule, may use a norm twice: then its pair is left out, unless this
        method is overridden.
        """
        pairs: list[tuple[RMSNorm, QKVParallelLinear | MergedColumnParallelLinear]] = []
        if type(self).forward is not DecoderLayer.forward:
            return pairs
        attention, mlp = self.self_attn, self.mlp
        if (
            isinstance(attention, SelfAttention)
            and type(attention).forward is SelfAttention.forward
            and type(attention.attention).of_stream is Attention.of_stream
            and type(attention.attention).__call__ is Attention.__call__  # gets unscaled rows
        ):
            pairs.append((self.input_layernorm, attention.qkv_proj))
        if isinstance(mlp, GatedMLP) and type(mlp).forward is GatedMLP.forward:
            pairs.append((self.post_attention_layernorm, mlp.gate_up_proj))
        return pairs

    def pick_last_tokens(self) -> None:
        """Called on the last layer: after its attention, only ``AttentionBatch.last_tokens`` are needed.

        An overridden ``forward``, here or in the attention, may need all tokens: then this does nothing unless
        overridden.
        """
        if type(self).forward is not DecoderLayer.forward:
            return
        attention = self.self_attn
        if isinstance(attention, SelfAttention) and type(attention).forward is SelfAttention.forward:
            attention._pick = _last_tokens

    def is_usual(self) -> bool:
        """Whether a fused path may replace ``forward``: not if ``forward`` is overridden, or a hook is registered, here
        or in a submodule. Checked at each such step, since modules may be replaced at any time."""
        mlp = self.mlp
        gated = is_plain(mlp, GatedMLP) and adds_parts(mlp.down_proj) and is_plain(mlp.gate_up_proj, LinearBase)
        return gated and self._attends_as_usual()

    def _attends_as_usual(self) -> bool:
        attention = self.self_attn
        return (
            is_plain(self, DecoderLayer)
            and is_plain(self.input_layernorm, RMSNorm)
            and is_plain(self.post_attention_layernorm, RMSNorm)
            and is_plain(attention, SelfAttention)
            and type(attention).add is SelfAttention.add
            and isinstance(attention.attention, Attention)
            and type(attention.attention).of_stream is Attention.of_stream
            and type(attention.qkv_proj) is QKVParallelLinear
            and is_plain(attention.qkv_proj, LinearBase)
            and attention.qkv_proj.weight_scale is None
            and adds_parts(attention.o_proj)
        )

    def goes_in_parts(self) -> bool:
        """``is_usual``, and it keeps all tokens."""
        return self.is_usual() and cast(SelfAttention, self.self_attn)._pick is _all_tokens

    def in_parts(self, stream: PartedStream, positions: torch.Tensor, attention: AttentionBackend, eps: float) -> None:
        """``forward`` of a layer that ``goes_in_parts``; returns with sums in flight. ``eps``: of the next norm."""
        assert isinstance(self.self_attn, SelfAttention) and isinstance(self.mlp, GatedMLP)
        behind = self.post_attention_layernorm
        self.self_attn.in_parts(stream, self.input_layernorm, positions, attention, behind.eps)
        self.mlp.in_parts(stream, behind, eps)

    def chain_shape(self) -> ChainShape | None:
        """The shape of the layer (of this rank's part), if ``chain_linear`` may compute its matmuls: its norms are
        folded into them."""
        attention, mlp = self.self_attn, self.mlp
        if not self.is_usual():
            return None
        assert isinstance(attention, SelfAttention) and isinstance(mlp, GatedMLP)
        usual = type(attention.attention) is Attention and type(mlp.gate_up_proj) is MergedColumnParallelLinear
        folded = attention.qkv_proj.folded and mlp.gate_up_proj.folded
        if not usual or not folded or mlp.activation is not norm_gate_up:
            return None
        hidden, width = attention.o_proj.weight.shape
        return ChainShape(hidden, width, mlp.down_proj.weight.shape[1], attention.qkv_proj.weight.shape[0])

    def routed_shape(self) -> DecoderShape | None:
        """The shape of the layer, if it is usual except for an MLP of experts, on one rank."""
        attention, experts = self.self_attn, routed_experts(self.mlp)
        if experts is None or not self._attends_as_usual():
            return None
        assert isinstance(attention, SelfAttention)
        if type(attention.attention) is not Attention or not attention.qkv_proj.folded:
            return None
        routing = Routing(len(experts.router), experts.top_k, experts.renormalize)
        return decoder_shape(self, experts.down.shape[2], routing)

    def products(self) -> tuple[QKVParallelLinear, RowParallelLinear, MergedColumnParallelLinear, RowParallelLinear]:
        """The four matmuls, in order, of a layer that has a ``chain_shape``."""
        own, mlp = self.self_attn, self.mlp
        assert isinstance(own, SelfAttention) and isinstance(mlp, GatedMLP)
        return own.qkv_proj, own.o_proj, mlp.gate_up_proj, mlp.down_proj

    def chain(
        self,
        x: torch.Tensor,
        heads: torch.Tensor,
        behind: DecoderLayer,
        positions: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """This layer after attention, then the attention of the next layer, ``behind``: adds to x (t, hidden) in place
        and returns (t, width). Both layers must have the same ``chain_shape``."""
        o, gate_up, down = (product.weight for product in self.products()[1:])
        projection = behind.products()[0]
        eps, eps_behind = self.post_attention_layernorm.eps, behind.input_layernorm.eps
        qkv, scale = chain_linear(heads, o, x, gate_up, eps, down, projection.weight, eps_behind, projection.bias)
        return cast(SelfAttention, behind.self_attn).attention(qkv, positions, attention, scale)

    def chain_packed(
        self,
        x: torch.Tensor,
        heads: torch.Tensor,
        behind: DecoderLayer,
        positions: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """``chain`` with packed weights."""
        o, gate_up, down = (cast(PackedWeight, product.packed_weight) for product in self.products()[1:])
        projection = behind.products()[0]
        weight = cast(PackedWeight, projection.packed_weight)
        eps, eps_behind = self.post_attention_layernorm.eps, behind.input_layernorm.eps
        qkv = packed_chain(heads, o, x, gate_up, eps, down, weight, eps_behind, projection.bias)
        return cast(SelfAttention, behind.self_attn).attention(qkv, positions, attention)


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, layer: LayerFactory) -> None:
        super().__init__()
        self.tp = tp
        self.rotary = RotaryTable(config)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.layers = nn.ModuleList(layer(config, tp, i, self.rotary) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._windows = config.layer_windows()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        x: torch.Tensor = self.embed_tokens(input_ids)  # not shared: the layers add to it in place
        layers = self._different_layers if compiling() or only_loads() else list(self.layers)
        exchange = self.tp.exchange
        if exchange is not None and exchange.takes(x):
            x, layers = self._in_parts(layers, exchange, x, positions, attention)
        else:
            x, layers = self._at_once(layers, x, positions, attention)
        for layer in layers:
            x = layer(x, positions, attention)
        return self.norm(x)

    def _at_once(
        self, layers: list[nn.Module], x: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> tuple[torch.Tensor, list[nn.Module]]:
        """Run all layers with several matmuls per kernel, if possible; returns the stream and the layers left to run,
        none or all."""
        usual, products = cast(list[DecoderLayer], layers), self._shape_of(layers, x, DecoderLayer.chain_shape)
        whole = self._whole_shape(layers, x, products)
        order = _order_of(usual) if products and (whole or len(x) in packed_rows(products)) else None
        if whole and order and goes_whole(usual, whole, x, attention, order):
            return decode_whole(usual, whole, x, positions, attention, self.tp, packed=True), []
        if products is not None and self.tp.size == 1:
            packed = order is Order.UNITS and _goes_packed(products, x)
            if packed or use_chain(len(x), products, x.dtype, x.device):
                return self._chained(usual, x, positions, attention, packed), []
        if whole and goes_whole(usual, whole, x, attention):
            return decode_whole(usual, whole, x, positions, attention, self.tp), []
        return x, layers

    @cached_property
    def _different_layers(self) -> list[nn.Module]:
        """Layers that together launch every kernel: the first two, each one unlike those before it, and the last."""
        found: dict[object, nn.Module] = {}
        for i, layer in enumerate(self.layers):
            kind = type(layer), self._windows[i], *(weight.shape for weight in layer.parameters())
            found.setdefault(i if i in (0, 1, len(self.layers) - 1) else kind, layer)
        return list(found.values())

    def _shape_of(
        self, layers: list[nn.Module], x: torch.Tensor, of: Callable[[DecoderLayer], _Shape | None]
    ) -> _Shape | None:
        """The shape that all layers share. None: they differ, or there are too many rows for any kernel that fuses
        several matmuls; with several ranks, only the one for few rows exists."""
        alone = self.tp.size == 1
        if len(x) > (MAX_CHAIN_ROWS if alone else MAX_MEGAKERNEL_ROWS) or not (alone or self.tp.words):
            return None
        return _shared_shape(layers, of)

    def chain_shape(self) -> ChainShape | None:
        """The shape of all layers, if they share one."""
        return _shared_shape(list(self.layers), DecoderLayer.chain_shape)

    def dense_shape(self) -> DecoderShape | None:
        """The shape of this rank's part of all layers in one kernel, if ranks can synchronize within a kernel."""
        products = self.chain_shape()
        if products is None or not (self.tp.size == 1 or self.tp.words):
            return None
        return self._dense_shape(self.layers[0], products)

    def _dense_shape(self, layer: nn.Module, products: ChainShape) -> DecoderShape:
        return decoder_shape(cast(DecoderLayer, layer), products.inner, ranks=self.tp.size)

    def _whole_shape(
        self, layers: list[nn.Module], x: torch.Tensor, products: ChainShape | None
    ) -> DecoderShape | None:
        """The shape for running all layers as one kernel, dense or with experts; only for steps of few rows."""
        if len(x) > MAX_MEGAKERNEL_ROWS:  # do not ask each layer in vain
            return None
        if products is not None:
            return self._dense_shape(layers[0], products)
        return self._shape_of(layers, x, DecoderLayer.routed_shape) if self.tp.size == 1 else None

    def _chained(
        self,
        layers: list[DecoderLayer],
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        packed: bool,
    ) -> torch.Tensor:
        """The stream after all layers, running each one's matmuls and the next one's projection in one kernel."""
        first, last = cast(SelfAttention, layers[0].self_attn), cast(SelfAttention, layers[-1].self_attn)
        heads = first.attention.of_stream(x, layers[0].input_layernorm, first.qkv_proj, positions, attention)
        for layer, behind in pairwise(layers):
            heads = (layer.chain_packed if packed else layer.chain)(x, heads, behind, positions, attention)
        return cast(torch.Tensor, layers[-1].mlp(last.add(x, heads, attention), layers[-1].post_attention_layernorm))

    def _in_parts(
        self,
        layers: list[nn.Module],
        exchange: PeerExchange,
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
    ) -> tuple[torch.Tensor, list[nn.Module]]:
        """Run layers in parts; returns the stream and the layers left to run: the last one, whose output must be whole,
        or all of them if one cannot run in parts."""
        *first, last = layers
        if not first or not all(isinstance(layer, DecoderLayer) and layer.goes_in_parts() for layer in first):
            return x, layers
        stream = PartedStream(exchange, x)
        parted = cast(list[DecoderLayer], first)
        for layer, behind in zip(parted, [*parted[1:], parted[0]], strict=True):  # unused after the last
            layer.in_parts(stream, positions, attention, behind.input_layernorm.eps)
        return stream.whole(), [last]


def _shared_shape(layers: list[nn.Module], of: Callable[[DecoderLayer], _Shape | None]) -> _Shape | None:
    """The shape that all layers have, if only the last one may pick tokens; else None."""
    shapes = (of(layer) if isinstance(layer, DecoderLayer) else None for layer in layers)
    shape = next(shapes, None)
    if shape is None or any(other != shape for other in shapes):
        return None
    all_tokens = all(cast(SelfAttention, layer.self_attn)._pick is _all_tokens for layer in layers[:-1])
    return shape if all_tokens else None


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


class CausalLM(nn.Module, Model):
    """A decoder with a language-model head, with the tensor names of Hugging Face's checkpoints.

    A subclass sets ``architectures``, which it can load, ``layer``, its layer class, and, if its checkpoints pack
    weights differently, ``packed``: a checkpoint's module name -> (ours, shard id).
    """

    architectures: ClassVar[tuple[str, ...]] = ()
    layer: ClassVar[LayerFactory]
    packed: ClassVar[Mapping[str, tuple[str, ShardId]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, tp, type(self).layer)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp)
        if config.tie_word_embeddings:
            self.lm_head.tie(self.model.embed_tokens)
        last = self.model.layers[-1]
        if type(self).forward is CausalLM.forward and isinstance(last, DecoderLayer):
            last.pick_last_tokens()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        return self.model(input_ids, positions, attention)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def compute_logits_shard(self, hidden: torch.Tensor) -> tuple[torch.Tensor, Shard] | None:
        kind = type(self.lm_head)
        if not overrides_both(kind, "forward", "shard") or not is_plain(self.lm_head, kind):
            return None  # a subclass's own head, or one with a hook
        return self.lm_head.shard(hidden)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        from minivllm.models.loader import load_weights

        load_weights(self, weights, packed=self.packed)
