"""The built-in models through the suite that plugins run."""

from __future__ import annotations

import pytest

from minivllm.testing import ModelConformance

pytestmark = pytest.mark.usefixtures("forked_ranks")  # packages' tests, in tests/examples, start theirs as users do


class TestQwen3(ModelConformance):
    architecture = "Qwen3ForCausalLM"
    config = {"head_dim": 32}  # not hidden / heads


class TestQwen3WithAWindowInSomeLayers(ModelConformance):
    architecture = "Qwen3ForCausalLM"
    config = {
        "head_dim": 32, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1
    }  # fmt: skip
    prompt_lengths = (1, 7, 9, 40, 65)


class TestLlama(ModelConformance):
    architecture = "LlamaForCausalLM"
    config = {"tie_word_embeddings": True, "num_key_value_heads": 1, "attention_bias": True}
