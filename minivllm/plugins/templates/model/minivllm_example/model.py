"""A dense decoder built on minivllm's layers: grouped-query attention and a gated MLP, each with a norm before it.

Parameters have the names of the checkpoint's tensors. The layers handle tensor parallelism, loading and CUDA graphs.
"""

from __future__ import annotations

from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.layers.decoder import CausalLM, DecoderLayer, SelfAttention
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.rotary import RotaryTable


class ExampleDecoderLayer(DecoderLayer):
    def __init__(self, config: ModelConfig, tp: TensorParallel, index: int, rotary: RotaryTable) -> None:
        super().__init__(config)
        bias = config.attention_bias
        self.self_attn = SelfAttention(config, tp, index, rotary, qk_norm=False, qkv_bias=bias, out_bias=bias)
        self.mlp = GatedMLP(config, tp)


class ExampleForCausalLM(CausalLM):
    architectures = ("ExampleForCausalLM",)
    layer = ExampleDecoderLayer
