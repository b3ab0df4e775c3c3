"""Mistral: grouped-query attention, perhaps in a sliding window, gated MLP, pre-norm, no biases.

The window is not in here: minivllm reads ``sliding_window`` of config.json and hands it to the attention backend.
"""

from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.errors import CheckpointError
from minivllm.layers.decoder import CausalLM, DecoderLayer, SelfAttention
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.rotary import RotaryTable


class MistralLayer(DecoderLayer):
    def __init__(self, config: ModelConfig, tp: TensorParallel, index: int, rotary: RotaryTable) -> None:
        super().__init__(config)
        self.self_attn = SelfAttention(config, tp, index, rotary)
        self.mlp = GatedMLP(config, tp)


class MistralForCausalLM(CausalLM):
    architectures = ("MistralForCausalLM",)
    layer = MistralLayer

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        if "sliding_window" not in config.hf_config:
            raise CheckpointError(
                "config.json has no sliding_window, which transformers reads as 4096 and minivllm as none; "
                'add "sliding_window": 4096 (Mistral-7B-v0.1) or "sliding_window": null (later ones) to it'
            )
        super().__init__(config, tp)
