"""What this package adds to minivllm. It imports nothing heavy: the model is imported when it is used."""

from collections.abc import Iterator
from typing import Any

from minivllm.plugins import ConfigOption, ModelComponent, hookimpl

MINIVLLM_API_VERSION = 1


def read_config(hf: dict[str, Any]) -> dict[str, Any]:
    """With transformers' defaults where they are not those of other models."""
    return {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28} | hf


@hookimpl
def minivllm_models() -> Iterator[ModelComponent]:
    yield ModelComponent(
        "qwen2",
        "minivllm_qwen2.model:Qwen2ForCausalLM",
        architectures=("Qwen2ForCausalLM",),
        description="Qwen2 and Qwen2.5, dense",
        read_config=read_config,
    )


@hookimpl
def minivllm_configs() -> Iterator[ConfigOption]:
    # Each is a config.json: load_format=dummy builds from it, a download brings its own.
    shape: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "use_sliding_window": False,
        "bos_token_id": 151643, "eos_token_id": 151645, "dtype": "bfloat16",
    }  # fmt: skip
    sizes = {  # hidden, MLP, layers, heads, key heads
        "0.5B": (896, 4864, 24, 14, 2), "1.5B": (1536, 8960, 28, 12, 2), "3B": (2048, 11008, 36, 16, 2),
        "7B": (3584, 18944, 28, 28, 4), "14B": (5120, 13824, 48, 40, 8), "32B": (5120, 27648, 64, 40, 8),
        "72B": (8192, 29568, 80, 64, 8),
    }  # fmt: skip
    for size, (hidden, inner, layers, heads, kv_heads) in sizes.items():
        small = size in ("0.5B", "1.5B", "3B")
        numbers = {
            "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": small,
            "vocab_size": 151936 if small else 152064,
        }  # fmt: skip
        name = "qwen2" if size == "0.5B" else f"qwen2-{size.lower()}"
        repo = f"Qwen/Qwen2.5-{size}-Instruct"
        yield ConfigOption("model", name, {"repo": repo, "hf_config": shape | numbers})
