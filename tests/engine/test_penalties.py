"""Penalties and biases: greedy tokens equal those of a loop over transformers' logits, however the work is cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import reference_model
from test_equality import PROMPTS

from minivllm import LLM, SamplingParams

KINDS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.3},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.8},
    {"frequency_penalty": -0.5, "presence_penalty": 2.0, "repetition_penalty": 1.1},
    {"logit_bias": {5: 3.0, 9: -2.5, 40: 0.25}},
    {"allowed_token_ids": [*range(20, 60)], "frequency_penalty": 0.2, "logit_bias": {21: 1.0}},
]
REQUESTS = list(zip(PROMPTS, itertools.cycle(KINDS), strict=False))
MAX_TOKENS = 24


@lru_cache(maxsize=256)
def logits_of(folder: Path, tokens: tuple[int, ...], last: int) -> torch.Tensor:
    """The logits after each of the ``last`` tokens: (last, vocabulary)."""
    with torch.inference_mode():
        return reference_model(folder)(torch.tensor([tokens])).logits[0, -last:]


def penalized(logits: list[float], prompt: list[int], said: list[int], kind: dict[str, Any]) -> list[float]:
    out = [x if i in kind.get("allowed_token_ids", (i,)) else float("-inf") for i, x in enumerate(logits)]
    for token, bias in kind.get("logit_bias", {}).items():
        out[token] += bias
    for token in {*prompt, *said}:
        repetition = kind.get("repetition_penalty", 1.0)
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(said):
        out[token] -= kind.get("frequency_penalty", 0.0) * said.count(token) + kind.get("presence_penalty", 0.0)
    return out


@pytest.mark.parametrize("case", [
    {"tight": False, "prefix": False, "pipeline": False, "budget": 4096, "scheduler": "mixed"},
    {"tight": True, "prefix": False, "pipeline": True, "budget": 64, "scheduler": "mixed"},
    {"tight": True, "prefix": True, "pipeline": True, "budget": 16, "scheduler": "prefill_first"},
    {"tight": False, "prefix": True, "pipeline": True, "budget": 7, "scheduler": "mixed"},
], ids=str)  # fmt: skip
def test_penalized_tokens_equal_a_plain_loop(
    case: dict[str, Any], tiny_checkpoint: Callable[..., Path], engine: Callable[..., LLM]
) -> None:
    folder = tiny_checkpoint("qwen3")
    llm = engine(
        folder,
        **{
            "cache.block_size": 4,
            "cache.num_blocks": 60 if case["tight"] else 4096,
            "cache.enable_prefix_caching": str(case["prefix"]).lower(),
            "scheduler": case["scheduler"],
            "scheduler.max_num_seqs": 16,  # slots are used again
            "scheduler.max_num_batched_tokens": case["budget"],
            "scheduler.async_scheduling": str(case["pipeline"]).lower(),
            "max_model_len": 256,
        },
    )
    params = [SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, **kind) for _, kind in REQUESTS]
    outputs = llm.generate([prompt for prompt, _ in REQUESTS], params, use_tqdm=False)
    for (prompt, kind), output in zip(REQUESTS, outputs, strict=True):
        answer = output.outputs[0].token_ids
        assert len(answer) == MAX_TOKENS
        logits = logits_of(folder, tuple(prompt + answer[:-1]), MAX_TOKENS).tolist()
        for i, token in enumerate(answer):
            scores = penalized(logits[i], prompt, answer[:i], kind)
            assert scores[token] >= max(scores) - 1e-4, (kind, i)
        if kind.get("presence_penalty", 0) > 1 and "frequency_penalty" not in kind:
            assert len(set(answer)) > MAX_TOKENS // 2
    assert not case["tight"] or llm.engine.stats.preemptions > 0
    assert (llm.engine.stats.cached_tokens > 0) == case["prefix"]


def test_penalties_change_what_is_said_and_no_neighbour(engine: Callable[..., LLM]) -> None:
    llm = engine()
    prompt = PROMPTS[0]

    def say(**kind: float) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **kind)

    (alone,) = llm.generate([prompt], say(), use_tqdm=False)
    kinds = [say(), say(repetition_penalty=1.5), say(), say(presence_penalty=2), say(frequency_penalty=2)]
    answers = [o.outputs[0].token_ids for o in llm.generate([prompt] * 5, kinds, use_tqdm=False)]
    assert answers[0] == answers[2] == alone.outputs[0].token_ids
    assert all(answers[i] != answers[0] for i in (1, 3, 4))


def test_sampled_answers_do_not_depend_on_neighbours(engine: Callable[..., LLM]) -> None:
    """Drawn with a seed, with top-k and log-probabilities, penalized: the same alone and in a crowd."""
    llm = engine()
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=20, ignore_eos=True, top_k=20, logprobs=2, **KINDS[i % 8])
        for i in range(len(PROMPTS))
    ]
    crowd = llm.generate(PROMPTS, params, use_tqdm=False)
    for prompt, param, together in list(zip(PROMPTS, params, crowd, strict=True))[::5]:
        (alone,) = llm.generate([prompt], param, use_tqdm=False)
        assert alone.outputs[0].token_ids == together.outputs[0].token_ids
