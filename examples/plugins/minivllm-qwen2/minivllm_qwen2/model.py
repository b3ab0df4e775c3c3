"""Qwen2 and Qwen2.5: grouped-query attention with biases on q, k and v, gated MLP, pre-norm."""

from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.layers.decoder import CausalLM, DecoderLayer, SelfAttention
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.rotary import RotaryTable


class Qwen2Layer(DecoderLayer):
    def __init__(self, config: ModelConfig, tp: TensorParallel, index: int, rotary: RotaryTable) -> None:
        super().__init__(config)
        self.self_attn = SelfAttention(config, tp, index, rotary, qkv_bias=True)
        self.mlp = GatedMLP(config, tp)


class Qwen2ForCausalLM(CausalLM):
    architectures = ("Qwen2ForCausalLM",)
    layer = Qwen2Layer
