"""Llama: grouped-query attention, gated MLP, pre-norm; biases if the config says so."""

from __future__ import annotations

from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.layers.decoder import CausalLM, DecoderLayer, SelfAttention
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.rotary import RotaryTable


class LlamaLayer(DecoderLayer):
    def __init__(self, config: ModelConfig, tp: TensorParallel, index: int, rotary: RotaryTable) -> None:
        super().__init__(config)
        bias = config.attention_bias
        self.self_attn = SelfAttention(config, tp, index, rotary, qkv_bias=bias, out_bias=bias)
        self.mlp = GatedMLP(config, tp)


class LlamaForCausalLM(CausalLM):
    architectures = ("LlamaForCausalLM",)
    layer = LlamaLayer
