"""Tokens equal transformers', however requests are chunked, cached, preempted or split over ranks."""

from __future__ import annotations

from typing import Any

from transformers import LlamaForCausalLM

from minivllm import LLM, SamplingParams
from minivllm.testing import ModelConformance


class Reference(LlamaForCausalLM):
    """The model's outputs must equal this one's."""


Reference.__name__ = "ExampleForCausalLM"  # transformers writes this into config.json as the architecture


class TestExample(ModelConformance):
    architecture = "ExampleForCausalLM"
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # the rest is minivllm.testing's

    @classmethod
    def reference_class(cls) -> type[Any]:
        return Reference


def test_the_option_runs_with_random_weights() -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM("example", device="cpu", load_format="dummy") as llm:
        outputs = llm.generate(["one", "two"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4]
