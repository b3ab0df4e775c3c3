"""LoRA adapters of single requests on a GPU: steps with graphs say what prompts do, and models with merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import save_adapter

from minivllm import LLM, SamplingParams
from minivllm.lora.request import LoRARequest
from minivllm.models.checkpoint import DEMO

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = ["Once upon a time", "The engine", "In a small village", "The sea was", "My favourite animal is", "Hello"]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0)
NEAR, NEAR_IN_FP8 = 0.08, 0.25  # log-probabilities of an answer's tokens, the mean difference


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """None, and three."""
    home = tmp_path_factory.mktemp("adapters")
    for number, rank in ((1, 4), (2, 8), (3, 16)):
        save_adapter(home / str(number), DEMO, ALL, rank=rank, seed=number, lora_alpha=rank)
    return [None, *(LoRARequest(str(n), n, str(home / str(n))) for n in (1, 2, 3))]


def apart(some: list[float], others: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(some, others, strict=True)) / len(some)


def make(**options: Any) -> LLM:
    return LLM("demo", device="cuda", **{"gpu_memory_utilization": 0.3, "max_loras": 3, "enable_lora": True} | options)


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"quantization": "fp8"}], ids=["one", "two", "fp8"])
def test_answers_are_as_likely_as_their_prompts_would_be(
    adapters: list[LoRARequest | None], options: dict[str, Any]
) -> None:
    """What decodes, from graphs, say of each token of an answer is what a prompt of the same tokens says of it; and,
    with weights in bfloat16, what a model says into which the adapter is merged."""
    if torch.cuda.device_count() < options.get("tp", 1):
        pytest.skip("needs two GPUs")
    prompts, its = PROMPTS * 8, [adapters[i % 4] for i in range(8 * len(PROMPTS))]
    with make(**options) as llm:
        assert llm.engine.describe()["cuda_graphs"]
        answers = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=its)
        whole = [answer.prompt_token_ids + answer.outputs[0].token_ids for answer in answers]
        score = SamplingParams(max_tokens=1, prompt_logprobs=0)
        scored = llm.generate(whole, score, use_tqdm=False, lora_request=its)
        plain = llm.generate(whole, score, use_tqdm=False)
    changed = 0
    for answer, found, without, adapter in zip(answers, scored, plain, its, strict=True):
        at = len(answer.prompt_token_ids)
        said = [next(iter(one.values())).logprob for one in answer.outputs[0].logprobs]
        again, base = ([next(iter(one.values())).logprob for one in o.prompt_logprobs[at:]] for o in (found, without))
        assert apart(said, again) < (NEAR_IN_FP8 if options else NEAR)
        changed += adapter is not None and apart(said, base) > 2 * NEAR_IN_FP8
    assert changed > len(its) // 3
    if options:
        return
    for number, adapter in enumerate(adapters[1:], 1):
        assert adapter is not None
        mine = [i for i in range(len(its)) if i % 4 == number]
        with make(enable_lora=False, max_loras=1, overrides=[f"model.lora={adapter.lora_path}"]) as llm:
            merged = llm.generate([whole[i] for i in mine], score, use_tqdm=False)
        for i, other in zip(mine, merged, strict=True):
            ours, theirs = (
                [next(iter(one.values())).logprob for one in o.prompt_logprobs[1:]] for o in (scored[i], other)
            )
            assert apart(ours, theirs) < NEAR


@pytest.mark.parametrize("attention", ["auto", "flashinfer"])
def test_graphs_change_nothing_in_float32(adapters: list[LoRARequest | None], attention: str, tmp_path: Path) -> None:
    """Of batches of any size, with one that is loaded while others run, and slots that others had."""
    options = {"dtype": "float32"} if attention == "auto" else {"attention": attention}
    params = [GREEDY.clone(max_tokens=4 + 5 * i % 37) for i in range(40)]
    its = [adapters[i * 7 % 4] for i in range(40)]
    said = []
    for eager in (False, True):
        with make(enforce_eager=eager, max_num_seqs=12, max_loras=3, **options) as llm:
            outputs = llm.generate([PROMPTS[i % 6] for i in range(40)], params, use_tqdm=False, lora_request=its)
            said.append([o.outputs[0].token_ids for o in outputs])
            more = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            said[-1] += [o.outputs[0].token_ids for o in more]
    same = [a == b for a, b in zip(*said, strict=True)]
    assert all(same) if attention == "auto" else sum(same) > len(same) * 0.8
