"""One layer of a decoder: self-attention, then an MLP, each behind its norm and added to the residual stream.

A model file subclasses ``DecoderLayer`` for what is specific to it. When several of its parts, or several layers, run
in one kernel: ``layers/fused.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from minivllm.core.interfaces import AttentionBackend, Model
from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.layers.attention import Attention, launch_all_kinds
from minivllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.norm import RMSNorm
from minivllm.layers.parts import PartedStream
from minivllm.layers.rotary import RotaryTable

_Pick = Callable[[torch.Tensor, torch.Tensor, AttentionBackend], tuple[torch.Tensor, torch.Tensor]]


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
        """``forward`` of all tokens in parts (``layers/fused.py``); returns with sums in flight. ``eps``: of the
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

    def keeps_all_tokens(self) -> bool:
        """Whether every token is needed after its attention, which must be a ``SelfAttention``."""
        assert isinstance(self.self_attn, SelfAttention)
        return self.self_attn._pick is _all_tokens

    def products(self) -> tuple[QKVParallelLinear, RowParallelLinear, MergedColumnParallelLinear, RowParallelLinear]:
        """The four matmuls, in order, of a layer with a ``SelfAttention`` and a ``GatedMLP``."""
        own, mlp = self.self_attn, self.mlp
        assert isinstance(own, SelfAttention) and isinstance(mlp, GatedMLP)
        return own.qkv_proj, own.o_proj, mlp.gate_up_proj, mlp.down_proj
