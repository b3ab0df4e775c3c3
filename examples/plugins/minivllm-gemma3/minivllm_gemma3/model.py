"""Gemma 3's text models: a window in most layers, norms before and behind attention and MLP, which is gated by GELU.

The window is not in here: minivllm reads ``sliding_window`` and ``layer_types`` of config.json and hands each layer's
to the attention backend. What config.json may leave out is in ``plugin.read_config``.
"""

from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from minivllm.core.interfaces import AttentionBackend
from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError
from minivllm.layers.decoder import CausalLM, DecoderLayer, SelfAttention
from minivllm.layers.embedding import VocabParallelEmbedding
from minivllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.parameter import ShardId, load_piece
from minivllm.layers.rotary import RotaryTable
from minivllm_gemma3.plugin import SLIDING


class Gemma3Attention(SelfAttention):
    """Not added to the residual stream: a norm comes before that."""

    def forward(
        self, x: torch.Tensor, norm: RMSNorm, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """x: (t, hidden), the residual stream; returns the block's output, of the same shape."""
        return self.o_proj(self.attention.of_stream(x, norm, self.qkv_proj, positions, attention))


class Gemma3MLP(nn.Module):
    """down(gelu(gate(norm(x))) * up(norm(x))), not added to the residual stream."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        if config.hidden_act != "gelu_pytorch_tanh":
            raise CheckpointError(
                f"hidden_activation={config.hidden_act!r} of {config.architecture} is not supported; "
                "only gelu_pytorch_tanh is, which all published ones have"
            )
        hidden, inner, what = config.hidden_size, config.intermediate_size, "intermediate_size"
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], tp, what=what)
        self.down_proj = RowParallelLinear(inner, hidden, tp, what=what)

    def forward(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """x: (t, hidden), the residual stream; returns the block's output, of the same shape."""
        gate, up = self.gate_up_proj.after_norm(x, norm).chunk(2, dim=-1)
        return self.down_proj(F.gelu(gate, approximate="tanh") * up)


class Gemma3Layer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))). ``post_attention_layernorm`` is the second of these,
    not the one before the MLP as in other models."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, index: int, rotary: RotaryTable) -> None:
        super().__init__(config)
        hf, bias = config.hf_config, config.attention_bias
        if hf["layer_types"][index] == SLIDING:
            rotary = rotary.other(hf["local_rope_parameters"])
        self.self_attn = Gemma3Attention(
            config, tp, index, rotary,
            qk_norm=True, qkv_bias=bias, out_bias=bias, scale=hf["query_pre_attn_scalar"] ** -0.5,
        )  # fmt: skip
        self.mlp = Gemma3MLP(config, tp)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        x.add_(self.post_attention_layernorm(self.self_attn(x, self.input_layernorm, positions, attention)))
        return x.add_(self.post_feedforward_layernorm(self.mlp(x, self.pre_feedforward_layernorm)))

    def norm_pairs(self) -> list[tuple[RMSNorm, QKVParallelLinear | MergedColumnParallelLinear]]:
        """On a GPU the norm before attention is folded into q, k and v, as in other models."""
        attention = self.self_attn
        assert isinstance(attention, SelfAttention)
        return [(self.input_layernorm, attention.qkv_proj)]


class ScaledEmbedding(VocabParallelEmbedding):
    """Rows are multiplied by sqrt(hidden_size), rounded to their dtype."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = super().forward(ids)
        return rows.mul_(_root(rows.shape[-1], rows.dtype))


@cache
def _root(hidden_size: int, dtype: torch.dtype) -> float:
    return torch.tensor(hidden_size**0.5, dtype=torch.float32, device="cpu").to(dtype).item()


class Gemma3ForCausalLM(CausalLM):
    architectures = ("Gemma3ForCausalLM",)
    layer = Gemma3Layer

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        _refuse_what_differs(config)
        super().__init__(config, tp)
        self.model.embed_tokens = ScaledEmbedding(config.vocab_size, config.hidden_size, tp)
        if config.tie_word_embeddings:
            self.lm_head.tie(self.model.embed_tokens)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.weight_loader = load_plus_one  # type: ignore[attr-defined]


def load_plus_one(param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId = None) -> None:
    """Checkpoints have how much the factor of a norm is above 1; here, and in all kernels, the weight is the factor."""
    load_piece(param, loaded.float() + 1, shard_id)


def _refuse_what_differs(config: ModelConfig) -> None:
    """Raises CheckpointError for keys that would make another model than this file computes, or none."""
    config.layer_windows()  # refuses layers of other types
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := config.hf_config.get(key)) is not None:
            raise CheckpointError(
                f"{key}={cap!r} of {config.architecture} is not supported: Gemma 3 has no caps. "
                "Set it to null in config.json, unless the checkpoint was trained with it"
            )
    scalar = config.hf_config.get("query_pre_attn_scalar")
    if isinstance(scalar, bool) or not isinstance(scalar, int | float) or scalar <= 0:
        raise CheckpointError(f"config.json: query_pre_attn_scalar={scalar!r} is not a number above 0")
    if config.hf_config.get("use_bidirectional_attention"):
        raise CheckpointError(
            f"use_bidirectional_attention of {config.architecture} is not supported: its tokens attend to those behind "
            "them, as in EmbeddingGemma, which generates no text. For a model that does, set it to false in config.json"
        )
