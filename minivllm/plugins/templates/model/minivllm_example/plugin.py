"""What this package adds to minivllm: a model, and the option ``model=example``. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from minivllm.plugins import ConfigOption, ModelComponent, hookimpl

MINIVLLM_API_VERSION = 1

SHAPE = {  # a config.json for load_format=dummy; with model.path= the checkpoint's own is used
    "architectures": ["ExampleForCausalLM"], "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip


@hookimpl
def minivllm_models() -> Iterator[ModelComponent]:
    yield ModelComponent(
        "example",
        "minivllm_example.model:ExampleForCausalLM",
        architectures=("ExampleForCausalLM",),
        description="a dense decoder",
    )


@hookimpl
def minivllm_configs() -> Iterator[ConfigOption]:
    yield ConfigOption("model", "example", {"hf_config": SHAPE})
