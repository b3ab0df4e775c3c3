"""Qwen2 and Qwen2.5: grouped-query attention with biases on q, k and v, gated MLP, pre-norm."""

import json

from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError
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

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        uses, window = (config.hf_config.get(key) for key in ("use_sliding_window", "sliding_window"))
        if window if uses is None else uses:
            raise CheckpointError(
                f"use_sliding_window={json.dumps(uses)} (sliding_window={window}) is not supported for Qwen2, whose "
                "layers would differ: set use_sliding_window to false to attend to everything"
            )
        super().__init__(config, tp)
