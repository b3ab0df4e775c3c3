"""Banned tokens are never sampled; everything else matches the built-in sampler."""

from __future__ import annotations

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError

PROMPTS = ["Once upon a time", "The engine"]
ASKS = [  # greedy, temperature, top-p
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1, seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1, seed=1, top_p=0.9, max_tokens=12, ignore_eos=True),
]


def say(*overrides: str) -> list[list[int]]:
    """The demo model's tokens for each prompt with each of ``ASKS``."""
    with LLM("demo", device="cpu", overrides=[*overrides, "max_model_len=64"]) as llm:
        outputs = llm.generate([p for p in PROMPTS for _ in ASKS], ASKS * len(PROMPTS), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_banned_tokens_are_never_said() -> None:
    free = say("sampler=example")
    assert free == say("sampler=default")
    banned = sorted({tokens[0] for tokens in free})
    said = say("sampler=example", f"sampler.options.banned={banned}")
    assert not {token for tokens in said for token in tokens} & set(banned)
    assert [len(tokens) for tokens in said] == [12] * len(free)


@pytest.mark.parametrize("banned", ["[-1]", "[99999]", "[1.5]", "7"])
def test_a_wrong_option_is_refused(banned: str) -> None:
    with pytest.raises(ConfigError, match="a list of token ids from 0 to"):
        say("sampler=example", f"sampler.options.banned={banned}")
