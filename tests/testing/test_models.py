"""The built-in models through the suite that plugins run."""

from __future__ import annotations

from minivllm.testing import ModelConformance


class TestQwen3(ModelConformance):
    architecture = "Qwen3ForCausalLM"
    config = {"head_dim": 32}  # not hidden / heads


class TestLlama(ModelConformance):
    architecture = "LlamaForCausalLM"
    config = {"tie_word_embeddings": True, "num_key_value_heads": 1, "attention_bias": True}
