"""A request's priority reaches schedulers that heed it, and is refused by name where nobody would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import RequestError

Engine = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_schedulers_without_priorities_refuse_them(engine: Engine) -> None:
    llm = engine()
    with pytest.raises(RequestError, match="prompt 1: priority=3 is not supported by scheduler=mixed; leave it 0, or"):
        llm.generate([[1], [2]], GREEDY, use_tqdm=False, priority=[0, 3])
    with pytest.raises(RequestError, match="2 prompts with 3 priorities; give one per prompt"):
        llm.generate([[1], [2]], GREEDY, use_tqdm=False, priority=[0, 0, 0])
    for wrong in (True, 1.5, "high", None):
        with pytest.raises(RequestError, match=f"priority={wrong!r} is not a whole number"):
            llm.engine.add_request("a", [1], GREEDY, priority=wrong)  # type: ignore[arg-type]
    assert not llm.engine.has_unfinished_requests()
    outputs = llm.generate([[1], [2]], GREEDY, use_tqdm=False, priority=[0, 0])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4]


def test_all_completions_of_a_request_have_its_priority(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, seen = engine(), []
    scheduler = llm.engine.scheduler
    monkeypatch.setattr(type(scheduler), "uses_priority", True)
    add = scheduler.add

    def remember(seq: Any) -> None:
        seen.append(seq.priority)
        add(seq)

    monkeypatch.setattr(scheduler, "add", remember)
    llm.generate([[1], [2]], [GREEDY.clone(n=2, temperature=1), GREEDY], use_tqdm=False, priority=[-7, 10**12])
    llm.engine.add_request("a", [1], GREEDY)
    assert seen == [-7, -7, 10**12, 0]
