"""Prompts are taken in a few at a time: whoever runs, or hangs up, does not wait for all of another's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from running import Running, metrics, serving, told, until
from streams import events, joined, streamed, whole

from minivllm import LLM

COMPLETIONS = "/v1/completions"
LONG = {"prompt": [1, 2], "max_tokens": 900, "ignore_eos": True}
SLOW = 0.03  # seconds that a prompt takes to be taken in


def slow_to_add(server: Running, monkeypatch: pytest.MonkeyPatch, seconds: float = SLOW) -> list[str]:
    """The names of the requests that are added from now on."""
    added: list[str] = []
    add_request = server.engine.add_request

    def slowly(name: str, *args: Any, **options: Any) -> None:
        added.append(name)
        time.sleep(seconds)
        add_request(name, *args, **options)

    monkeypatch.setattr(server.engine, "add_request", slowly)
    return added


def test_those_that_run_go_on_meanwhile(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with server.client.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as response:
        stream = events(response.iter_lines())
        next(stream)
        added = slow_to_add(server, monkeypatch)
        many = threading.Thread(target=server.post, args=(COMPLETIONS,), kwargs={"prompt": [[5]] * 20, "max_tokens": 1})
        many.start()
        until(lambda: len(added) == 2)
        before = server.engine.stats.steps
        until(lambda: len(added) == 12)
        assert server.engine.stats.steps - before >= 8
        many.join()


def test_who_leaves_is_not_taken_in_any_further(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    added = slow_to_add(server, monkeypatch)
    before = metrics(server)["request_success_total", "abort"]
    with pytest.raises(httpx.ReadTimeout):
        server.client.post(COMPLETIONS, json={"prompt": [[5]] * 100, "max_tokens": 900}, timeout=0.3)
    server.settled()
    assert 1 < len(added) < 60
    assert metrics(server)["request_success_total", "abort"] - before == 100


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_is_the_same(server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """Of some that have ended before the last ones begin."""
    body = {"prompt": [[i, i + 1] for i in range(5, 17)], "max_tokens": 4, "temperature": 0, "logprobs": 1}
    at_once = whole(server.post(COMPLETIONS, **body).json(), chat=False)
    before = metrics(server)
    added = slow_to_add(server, monkeypatch)
    if stream:
        other = joined(streamed(server.client, COMPLETIONS, body), chat=False)
    else:
        other = whole(server.post(COMPLETIONS, **body).json(), chat=False)
    assert len(added) == 12
    for one, same in zip(other, at_once, strict=True):
        assert (one["text"], one["finish_reason"]) == (same["text"], same["finish_reason"])
        assert one["logprobs"]["tokens"] == same["logprobs"]["tokens"]
    after = metrics(server)
    assert after["prompt_tokens_total", ""] - before["prompt_tokens_total", ""] == 24
    assert after["e2e_request_latency_seconds_count", ""] - before["e2e_request_latency_seconds_count", ""] == 12


@pytest.mark.parametrize("stream", [False, True])
def test_all_or_none(server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """The first ones have ended when the last one is refused."""
    slow_to_add(server, monkeypatch)
    before = metrics(server)
    counts: list[float] = []
    answers: list[httpx.Response] = []

    def ask() -> None:
        body: dict[str, Any] = {"prompt": [[5]] * 12 + [[512]], "max_tokens": 1, "stream": stream}
        answers.append(server.post(COMPLETIONS, **body))

    client = threading.Thread(target=ask)
    client.start()
    while client.is_alive():
        counts.append(metrics(server)["prompt_tokens_total", ""])
    told(answers[0], 400, "prompt 12: token id 512 at index 0 is outside the vocabulary", "prompt")
    server.settled()
    after = metrics(server)
    assert {*counts, after["prompt_tokens_total", ""]} == {before["prompt_tokens_total", ""]}, "it never goes back"
    assert after["request_success_total", "length"] == before["request_success_total", "length"]


def test_the_end_waits_for_no_prompt(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(make_llm()) as server:
        added = slow_to_add(server, monkeypatch, 0.1)
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(COMPLETIONS, json={"prompt": [[5]] * 200, "max_tokens": 900}, timeout=0.3)
        began = time.monotonic()
    assert time.monotonic() - began < 5 and len(added) < 50
