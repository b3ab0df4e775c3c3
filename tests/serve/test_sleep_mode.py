"""POST /sleep, POST /wake_up, GET /is_sleeping: what runs ends first or is aborted, what comes waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from running import Running, metrics, serving, told, until
from test_reload_weights import COMPLETIONS, LONG, RELOAD, SHORT, Asked, answer_to

from minivllm import LLM


@pytest.fixture
def server(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """Its steps take a while, until ``monkeypatch.undo``: ``LONG`` takes 8 seconds."""
    with serving(make_llm("enable_sleep_mode=true"), enable_sleep_mode=True, allow_reload=True) as running:
        running.slow_down(monkeypatch, 0.02)
        yield running


def sleeps(server: Running) -> bool:
    response = server.get("/is_sleeping")
    assert response.status_code == 200 and response.json().keys() == {"is_sleeping"}
    found: bool = response.json()["is_sleeping"]
    return found


def test_what_runs_ends_first_and_what_comes_waits(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    short = answer_to(server, SHORT)
    runs = Asked(server, COMPLETIONS, **LONG)
    until(lambda: server.engine_loop.num_running == 1)
    sleep = Asked(server, "/sleep")
    until(lambda: bool(server.engine_loop._changes))
    comes = Asked(server, COMPLETIONS, **SHORT)
    until(lambda: server.engine_client.num_completions == 2)
    assert not sleeps(server)
    monkeypatch.undo()
    assert sleep.answer().status_code == 200 and runs.answer().status_code == 200
    assert sleeps(server) and server.get("/health").status_code == 200
    assert comes.is_alive() and server.engine_loop.num_waiting == 1
    assert server.post("/wake_up?tags=weights").status_code == 200
    assert sleeps(server) and comes.is_alive()
    assert server.post("/wake_up?tags=kv_cache&tags=weights").status_code == 200
    assert not sleeps(server)
    assert comes.answer().json()["choices"][0]["text"] == short
    server.settled()


def test_level_2_waits_for_other_weights(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    short = answer_to(server, SHORT)
    assert server.post("/sleep?level=2").status_code == 200
    comes = Asked(server, COMPLETIONS, **SHORT)
    told(server.post(RELOAD), 400, "first (of a server: POST /wake_up, or /wake_up?tags=weights)")
    assert server.post("/wake_up").status_code == 200
    assert not sleeps(server) and comes.is_alive()
    assert server.post(RELOAD).status_code == 200
    assert comes.answer().json()["choices"][0]["text"] == short
    server.settled()


def test_with_abort_what_runs_ends_with_an_error(server: Running) -> None:
    runs = Asked(server, COMPLETIONS, **LONG)
    until(lambda: server.engine_loop.num_running == 1)
    assert server.post("/sleep?abort=true").status_code == 200
    assert "aborted, as the engine goes to sleep" in told_interrupted(runs)
    assert server.post("/wake_up").status_code == 200
    server.settled()


def test_who_leaves_while_it_sleeps_leaves_nothing_behind(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    short = answer_to(server, SHORT)
    assert server.post("/sleep").status_code == 200
    stays = Asked(server, COMPLETIONS, **SHORT)
    until(lambda: server.engine_loop.num_waiting == 1)
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(COMPLETIONS, json=SHORT, timeout=0.1)
    until(lambda: server.engine_client.num_completions == 1)
    until(lambda: len(server.engine_loop._adds) == 1)
    assert metrics(server)["num_requests_waiting", ""] == 1
    assert server.post("/wake_up").status_code == 200
    assert stays.answer().json()["choices"][0]["text"] == short
    server.settled()


def test_to_wake_up_who_is_awake_stops_nobody(server: Running) -> None:
    runs = Asked(server, COMPLETIONS, **LONG)
    until(lambda: server.engine_loop.num_running == 1)
    assert server.post("/wake_up").status_code == 200
    assert runs.is_alive() and server.engine_loop.num_running == 1
    sleep = Asked(server, "/sleep?abort=true")
    wake_up = Asked(server, "/wake_up")
    assert sleep.answer().status_code == wake_up.answer().status_code == 200
    told_interrupted(runs)
    server.settled()


def told_interrupted(asked: Asked) -> str:
    response = asked.answer()
    assert response.status_code == 503 and response.json()["error"]["code"] == "interrupted"
    message: str = response.json()["error"]["message"]
    return message


def test_mistakes(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    told(server.post("/sleep?level=3"), 400, "level=3 is neither 1 nor 2", "level")
    told(server.post("/sleep?abort=1"), 400, "abort=1 is neither true nor false", "abort")
    told(server.post("/sleep?mode=wait"), 400, "mode is no parameter of /sleep; there is level, abort", "mode")
    told(server.post("/sleep", level=2), 400, "the body is not read; type /sleep?level=...")
    told(server.post("/wake_up?tags=weight"), 400, "name some of weights, kv_cache", "tags")
    assert not sleeps(server)
    assert server.post("/wake_up").status_code == 200, "it is awake"
    answer_to(server, SHORT)


def test_only_where_it_is_allowed(make_llm: Callable[..., LLM], tiny_checkpoint: Callable[..., Path]) -> None:
    with serving(make_llm()) as server:
        told(server.post("/sleep"), 403, "start it with enable_sleep_mode=true")
        told(server.post("/wake_up"), 403, "start it with enable_sleep_mode=true")
        assert not sleeps(server)
