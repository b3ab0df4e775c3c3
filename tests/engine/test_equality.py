"""Greedy tokens equal transformers' in float32, token for token, however the engine cuts and orders the work."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import reference_model

from minivllm import LLM, SamplingParams

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # most prompts go past it
}
CHECKPOINTS: dict[str, dict[str, Any]] = {  # hidden / heads is 16
    "qwen3": {"architecture": "qwen3", "num_key_value_heads": 2, "head_dim": 32},
    "qwen3-tied-gqa4": {
        "architecture": "qwen3", "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True, "shards": 3,
    },
    "llama-gqa1": {"architecture": "llama", "num_key_value_heads": 4, "head_dim": 16, "rope_parameters": LLAMA3},
    "llama-tied": {
        "architecture": "llama", "num_key_value_heads": 2, "head_dim": 32, "rope_parameters": LLAMA3,
        "tie_word_embeddings": True, "shards": 3,
    },
}  # fmt: skip
FACTORS: dict[str, tuple[Any, ...]] = {
    "budget": (7, 16, 64, 4096),
    "checkpoint": tuple(CHECKPOINTS),
    "block_size": (1, 4, 16),
    "tight": (True, False),
    "prefix": (True, False),
    "pipeline": (True, False),
    "scheduler": ("mixed", "prefill_first"),
}
MAX_TOKENS = 16


def all_pairs(factors: dict[str, tuple[Any, ...]], seed: int) -> Iterator[dict[str, Any]]:
    """Few combinations that hold each pair of values of any two factors at least once (greedy)."""
    rng, names = random.Random(seed), list(factors)
    missing = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]
    }  # fmt: skip

    def pairs(case: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(case.items(), 2))

    while missing:
        tried = [{name: rng.choice(values) for name, values in factors.items()} for _ in range(200)]
        best = max(tried, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        yield best


CASES = [*all_pairs(FACTORS, 0), *all_pairs(FACTORS, 1)]


def make_prompts() -> list[list[int]]:
    """24 prompts of 1 to 200 tokens. Some begin alike, and two are equal; token id 0 is among them."""
    rng = random.Random(7)
    shared = [rng.randrange(512) for _ in range(60)]
    lengths = [1, 1, 2, 3, 5, 8, 13, 16, 17, 31, 47, 64, 65, 90, 120, 155, 199, 200]
    prompts = [[rng.randrange(512) for _ in range(n)] for n in lengths]
    prompts += [[*shared[:n], *(rng.randrange(512) for _ in range(m))] for n, m in [(20, 1), (60, 9), (60, 0), (33, 5)]]
    prompts += [list(prompts[9]), [0]]
    rng.shuffle(prompts)
    return prompts


PROMPTS = make_prompts()


@lru_cache(maxsize=1024)
def greedy(folder: Path, prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[int]:
    """What transformers says after the prompt and after each of the answer's tokens: the answer, if that is greedy."""
    with torch.inference_mode():
        logits = reference_model(folder)(torch.tensor([prompt + answer[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(-1).tolist()


def case_id(case: dict[str, Any]) -> str:
    words = [case["checkpoint"], f"t{case['budget']}", f"b{case['block_size']}", case["scheduler"]]
    return "-".join(words + [flag for flag in ("tight", "prefix", "pipeline") if case[flag]])


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_greedy_tokens_equal_transformers(
    case: dict[str, Any], tiny_checkpoint: Callable[..., Path], engine: Callable[..., LLM]
) -> None:
    folder = tiny_checkpoint(**CHECKPOINTS[case["checkpoint"]])
    assert (len(list(folder.glob("*.safetensors"))) > 1) == ("shards" in CHECKPOINTS[case["checkpoint"]])
    longest = max(map(len, PROMPTS)) + MAX_TOKENS
    llm = engine(
        folder,
        **{
            "cache.block_size": case["block_size"],
            "cache.num_blocks": -(-longest // case["block_size"]) + 1 if case["tight"] else 4096,
            "cache.enable_prefix_caching": str(case["prefix"]).lower(),
            "scheduler": case["scheduler"],
            "scheduler.max_num_seqs": 24,
            "scheduler.max_num_batched_tokens": case["budget"],
            "scheduler.async_scheduling": str(case["pipeline"]).lower(),
            "max_model_len": 256,
        },
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    got = [o.outputs[0].token_ids for o in outputs]
    assert [len(answer) for answer in got] == [MAX_TOKENS] * len(PROMPTS)
    assert got == [greedy(folder, tuple(p), tuple(answer)) for p, answer in zip(PROMPTS, got, strict=True)]
    assert len({token for answer in got for token in answer}) > 20  # a model that says one token would prove little
    stats, scheduler = llm.engine.stats, llm.engine.scheduler
    assert not case["tight"] or stats.preemptions >= 3, "sequences were to be preempted several times"
    assert (stats.cached_tokens > 0) == case["prefix"]
    assert scheduler.blocks.num_free == llm.engine.num_blocks
    scheduler.check()


def test_the_cases_hold_every_pair() -> None:
    for a, b in itertools.combinations(FACTORS, 2):
        assert {(case[a], case[b]) for case in CASES} == set(itertools.product(FACTORS[a], FACTORS[b]))
    assert len(PROMPTS) == 24 and {1, 200} <= set(map(len, PROMPTS))
