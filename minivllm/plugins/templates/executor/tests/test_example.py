"""The same tokens as with the built-in executor, a count of what ran, and an error after shutdown."""

from __future__ import annotations

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError, EngineDeadError

PROMPTS = [[5, 6, 7], [8]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def say(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_it_runs_and_counts() -> None:
    with LLM("demo", device="cpu", overrides=["executor=single"]) as llm:
        expected = say(llm)
    with LLM("demo", device="cpu", overrides=["executor=example"]) as llm:
        assert say(llm) == expected
        about = llm.engine.describe()
    assert about["steps"] >= 6  # one for both prompts, then one per token
    assert about["tokens"] >= 4 + 2 * 5  # the prompts, and every generated token but the last
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPTS)


def test_more_ranks_than_it_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="tp=2"):
        LLM("demo", device="cpu", tp=2, overrides=["executor=example"])
