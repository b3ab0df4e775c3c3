"""Qwen3: grouped-query attention with a norm on each head's q and k, gated MLP, pre-norm."""

from __future__ import annotations

import json

from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError
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

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        uses, window = (config.hf_config.get(key) for key in ("use_sliding_window", "sliding_window"))
        if window if uses is None else uses:
            raise CheckpointError(
                f"use_sliding_window={json.dumps(uses)} (sliding_window={window}) is not supported for Qwen3, whose "
                "layers would differ; no published Qwen3 checkpoint asks for it: set use_sliding_window to false"
            )
        super().__init__(config, tp)
