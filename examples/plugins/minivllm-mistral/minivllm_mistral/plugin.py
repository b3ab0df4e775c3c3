"""What this package adds to minivllm. It imports nothing heavy: the model is imported when it is used."""

from collections.abc import Iterator
from typing import Any

from minivllm.plugins import ConfigOption, ModelComponent, hookimpl

MINIVLLM_API_VERSION = 1


@hookimpl
def minivllm_models() -> Iterator[ModelComponent]:
    yield ModelComponent(
        "mistral",
        "minivllm_mistral.model:MistralForCausalLM",
        architectures=("MistralForCausalLM",),
        description="Mistral 7B and what shares its architecture, with or without a sliding window",
    )


@hookimpl
def minivllm_configs() -> Iterator[ConfigOption]:
    # Each is a config.json: load_format=dummy builds from it, a download brings its own.
    shape: dict[str, Any] = {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
    }  # fmt: skip
    small = {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2}
    yield ConfigOption("model", "mistral", {"hf_config": shape | small | {"num_hidden_layers": 4}})
    later = {"vocab_size": 32768, "rope_theta": 1e6, "sliding_window": None}
    for name, version, changes in (("mistral-7b", "v0.3", later), ("mistral-7b-v0.1", "v0.1", {})):
        yield ConfigOption("model", name, {"repo": f"mistralai/Mistral-7B-{version}", "hf_config": shape | changes})
