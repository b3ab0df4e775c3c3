"""What this package adds to minivllm. It imports nothing heavy: the model is imported when it is used."""

from collections.abc import Iterator, Mapping
from typing import Any

from minivllm.errors import CheckpointError
from minivllm.plugins import ConfigOption, ModelComponent, hookimpl

MINIVLLM_API_VERSION = 1

SLIDING, FULL = "sliding_attention", "full_attention"
DEFAULTS: dict[str, Any] = {  # transformers', of what a config.json may leave out
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "eos_token_id": 1, "bos_token_id": 2,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip


def read_config(hf: dict[str, Any]) -> dict[str, Any]:
    """With transformers' defaults, each layer's type, and two kinds of rope parameters: ``rope_parameters`` of the
    layers that attend to all, ``local_rope_parameters`` of those with a window."""
    hf = DEFAULTS | hf
    rope = _mapping(hf, "rope_parameters")  # transformers 5: by layer type
    everywhere = {} if {SLIDING, FULL} & rope.keys() else rope
    full = (
        {"rope_theta": hf.get("rope_theta") or 1e6} | everywhere | _mapping(rope, FULL) | _mapping(hf, "rope_scaling")
    )
    local = {"rope_theta": hf.get("rope_local_base_freq") or 1e4} | _mapping(rope, SLIDING)
    return hf | {
        "hidden_act": hf["hidden_activation"],
        "layer_types": hf.get("layer_types") or _layer_types(hf),
        "rope_parameters": full | _mapping(hf, "rope_scaling"),
        "rope_scaling": None,
        "local_rope_parameters": local,
    }


def _layer_types(hf: Mapping[str, Any]) -> list[str] | None:
    """By the pattern: the last layer of each group of so many attends to all."""
    layers, group = hf["num_hidden_layers"], hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    if type(group) is not int or group < 1:
        raise CheckpointError(f"config.json: sliding_window_pattern={group!r} is not a whole number from 1")
    if type(layers) is not int:
        return None  # ModelConfig refuses it
    return [SLIDING if (i + 1) % group else FULL for i in range(layers)]


def _mapping(of: Mapping[str, Any], key: str) -> dict[str, Any]:
    """What is there, or nothing for null. Raises CheckpointError if it is no mapping."""
    value = of.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {key}={value!r} is not a mapping")
    return dict(value)


@hookimpl
def minivllm_models() -> Iterator[ModelComponent]:
    yield ModelComponent(
        "gemma3",
        "minivllm_gemma3.model:Gemma3ForCausalLM",
        architectures=("Gemma3ForCausalLM",),
        description="Gemma 3's text models",
        read_config=read_config,
    )


@hookimpl
def minivllm_configs() -> Iterator[ConfigOption]:
    # Each is a config.json: load_format=dummy builds from it, a download brings its own.
    shape: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6,
        "rope_theta": 1000000, "rope_local_base_freq": 10000, "bos_token_id": 2, "eos_token_id": [1, 106],
        "dtype": "bfloat16",
    }  # fmt: skip
    small = {"hidden_size": 288, "intermediate_size": 1728, "num_hidden_layers": 6}
    yield ConfigOption("model", "gemma3", {"hf_config": shape | small})
    smallest = {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18}
    for size, changes in (("270m", smallest), ("1b", {})):
        yield ConfigOption(
            "model", f"gemma3-{size}", {"repo": f"google/gemma-3-{size}-it", "hf_config": shape | changes}
        )
