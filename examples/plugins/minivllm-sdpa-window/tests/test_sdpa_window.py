"""minivllm's own suite for attention backends, then windows, graphs and ranks in an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError
from minivllm.testing import AttentionConformance

WINDOW = 12
SHAPE = {  # a Llama with a window, too small to be slow
    "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
PROMPTS = [[1, 2, 3], list(range(5, 60)), [7], list(range(30, 50))]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
Say = Callable[..., list[list[int]]]


class TestSdpaWindow(AttentionConformance):
    backend = "sdpa_window"
    must_run_on = ("cpu", "cuda")

    def test_it_is_refused_where_graphs_are_required(self) -> None:
        spec = self.spec("cuda")
        assert self.backend_class().unsupported(spec) == []
        (why,) = self.backend_class().unsupported(replace(spec, needs_graphs=True))  # enforce_eager=false on a GPU
        assert "cannot be CUDA graphs" in why


# --------------------------------------------------------------------------- in an engine


@pytest.fixture
def say(tmp_path: Path) -> Say:
    """``say(attention, window=12, tp=1) -> tokens`` of random weights: prompts in chunks, preemption, two in flight."""

    def run(attention: str, *, window: int | None = WINDOW, tp: int = 1) -> list[list[int]]:
        (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"sliding_window": window}))
        keys = ["load_format=dummy", "scheduler.max_num_batched_tokens=24", "cache.block_size=4", "cache.num_blocks=32"]
        with LLM(str(tmp_path), attention=attention, device="cpu", tp=tp, overrides=keys) as llm:
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert llm.engine.describe()["attention"] == attention
            assert llm.engine.stats.preemptions > 0
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run


@pytest.mark.parametrize(("window", "tp"), [(None, 1), (1, 1), (WINDOW, 1), (WINDOW, 2)])
def test_an_engine_says_the_same_as_with_the_reference(say: Say, window: int | None, tp: int) -> None:
    assert say("sdpa_window", window=window, tp=tp) == say("torch", window=window)


def test_the_window_matters(say: Say) -> None:
    assert say("sdpa_window", window=WINDOW) != say("sdpa_window", window=None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
def test_enforce_eager_on_a_gpu() -> None:
    for eager in (None, True):
        with LLM("demo", attention="sdpa_window", enforce_eager=eager) as llm:
            assert llm.engine.describe()["cuda_graphs"] is False
    with pytest.raises(ConfigError, match="enforce_eager=false asks for"):
        LLM("demo", attention="sdpa_window", enforce_eager=False)
    with LLM(
        "demo", enforce_eager=False, overrides=["attention.prefill=sdpa_window", "attention.decode=triton"]
    ) as llm:
        assert llm.engine.describe()["cuda_graphs"] is True  # prompts are not captured
