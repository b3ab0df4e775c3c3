"""What this package adds to minivllm. It imports nothing heavy: the model is imported when it is used."""

from collections.abc import Iterator
from typing import Any

from minivllm.plugins import ConfigOption, ModelComponent, hookimpl

MINIVLLM_API_VERSION = 1


@hookimpl
def minivllm_models() -> Iterator[ModelComponent]:
    yield ModelComponent(
        "qwen3-moe",
        "minivllm_qwen3_moe.model:Qwen3MoeForCausalLM",
        architectures=("Qwen3MoeForCausalLM",),
        description="Qwen3 with experts; model.options.experts=auto|torch|triton",
        options=("experts",),
    )


@hookimpl
def minivllm_configs() -> Iterator[ConfigOption]:
    # Each is a config.json: load_format=dummy builds from it, a download brings its own.
    shape: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu",
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "attention_bias": False,
        "use_sliding_window": False, "sliding_window": None, "tie_word_embeddings": False, "bos_token_id": 151643,
        "eos_token_id": 151645, "dtype": "bfloat16",
    }  # fmt: skip
    tiny = {
        "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "moe_intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 16,
        "num_experts_per_tok": 4, "mlp_only_layers": [0], "bos_token_id": None, "eos_token_id": 4095,
    }  # fmt: skip
    yield ConfigOption("model", "qwen3-30b-a3b", {"repo": "Qwen/Qwen3-30B-A3B", "hf_config": shape})
    yield ConfigOption("model", "qwen3-moe-tiny", {"hf_config": shape | tiny})
