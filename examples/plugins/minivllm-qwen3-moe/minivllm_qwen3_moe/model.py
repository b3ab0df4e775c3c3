"""Qwen3-MoE: Qwen3's attention; in most layers the MLP is a router and many small experts, a few of them a token."""

from minivllm.core.model_config import ModelConfig
from minivllm.core.parallel import TensorParallel
from minivllm.layers.decoder import CausalLM, DecoderLayer, SelfAttention
from minivllm.layers.mlp import GatedMLP
from minivllm.layers.rotary import RotaryTable
from minivllm_qwen3_moe.block import SparseMLP, packed_experts


class Qwen3MoeLayer(DecoderLayer):
    def __init__(self, config: ModelConfig, tp: TensorParallel, index: int, rotary: RotaryTable) -> None:
        super().__init__(config)
        bias = config.attention_bias
        self.self_attn = SelfAttention(config, tp, index, rotary, qk_norm=True, qkv_bias=bias, out_bias=bias)
        self.mlp = SparseMLP(config, tp) if _is_sparse(config, index) else GatedMLP(config, tp)


class Qwen3MoeForCausalLM(CausalLM):
    architectures = ("Qwen3MoeForCausalLM",)
    layer = Qwen3MoeLayer

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        config.refuse_sliding_window()
        super().__init__(config, tp)
        self.packed = {**CausalLM.packed, **packed_experts(config)}  # type: ignore[misc]  # as many as the config has


def _is_sparse(config: ModelConfig, index: int) -> bool:
    hf = config.hf_config
    return index not in (hf.get("mlp_only_layers") or ()) and (index + 1) % hf.get("decoder_sparse_step", 1) == 0
