"""Qwen3: grouped-query attention with a norm on each head's q and k, gated MLP, pre-norm."""

from __future__ import annotations

from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.layers.decoder import CausalLM, DecoderLayer, SelfAttention
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.rotary import RotaryTable


class Qwen3Layer(DecoderLayer):
    def __init__(self, config: ModelConfig, tp: TensorParallel, index: int, rotary: RotaryTable) -> None:
        super().__init__(config)
        bias = config.attention_bias
        self.self_attn = SelfAttention(config, tp, index, rotary, qk_norm=True, qkv_bias=bias, out_bias=bias)
        self.mlp = GatedMLP(config, tp)


class Qwen3ForCausalLM(CausalLM):
    architectures = ("Qwen3ForCausalLM",)
    layer = Qwen3Layer
