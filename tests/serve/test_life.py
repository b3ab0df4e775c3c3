"""Clients that leave, an engine that dies, what /metrics counts, and a thread that sleeps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
import pytest
from fastapi import FastAPI
from running import Running, metrics, serving, until
from starlette.testclient import TestClient
from streams import events, streamed

from minivllm import LLM, SamplingParams
from minivllm.core.sampling_params import RequestOutputKind
from minivllm.errors import EngineDeadError, MinivllmError, RequestError
from minivllm.serve import async_engine, engine_client, engine_loop
from minivllm.serve.app import ServerOptions, create_app
from minivllm.serve.async_engine import AsyncEngine
from minivllm.serve.generation import Aborted
from minivllm.serve.timings import Timings

T = TypeVar("T")
COMPLETIONS = "/v1/completions"
LONG = {"prompt": "once upon", "max_tokens": 900, "ignore_eos": True}


def used_blocks(server: Running) -> int:
    blocks = server.engine.scheduler.blocks
    return blocks.num_blocks - blocks.num_free


# --------------------------------------------------------------------------- clients that leave


def test_a_client_that_leaves_a_stream_frees_its_blocks(server: Running) -> None:
    before = server.engine.stats.output_tokens
    with server.client.stream("POST", COMPLETIONS, json=LONG | {"stream": True, "n": 3}) as response:
        stream = events(response.iter_lines())  # kept: httpx hangs up when it is collected
        next(stream)
        assert used_blocks(server) > 0
    until(lambda: used_blocks(server) == 0)
    server.settled()
    assert server.engine.stats.output_tokens - before < 3 * 900


def test_a_client_that_leaves_before_its_answer_frees_its_blocks(server: Running) -> None:
    before = server.engine.stats.output_tokens
    with pytest.raises(httpx.ReadTimeout):
        server.client.post(COMPLETIONS, json=LONG | {"prompt": ["a", "b"]}, timeout=0.1)
    server.settled()
    assert server.engine.stats.output_tokens - before < 2 * 900


def test_a_client_that_leaves_the_queue_is_forgotten(make_llm: Callable[..., LLM]) -> None:
    with serving(make_llm("scheduler.max_num_seqs=1")) as server:
        with server.client.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as response:
            stream = events(response.iter_lines())  # kept: httpx hangs up when it is collected
            next(stream)
            with pytest.raises(httpx.ReadTimeout):
                server.client.post(COMPLETIONS, json=LONG, timeout=0.1)
            until(lambda: server.engine_loop.num_waiting == 0)
        server.settled()


# --------------------------------------------------------------------------- the engine's death


def test_a_dead_engine_is_one_error_for_all(make_llm: Callable[..., LLM]) -> None:
    with serving(make_llm()) as server:
        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(server.post(COMPLETIONS, **LONG)))
        died = threading.Event()
        server.engine_client.on_death = died.set
        with server.client.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            waiting.start()
            until(lambda: server.engine_loop.num_running == 2)

            def fail(batch: Any) -> None:
                raise ArithmeticError("the numbers ran out")

            server.engine.executor.launch = fail  # type: ignore[method-assign]
            *_, last = (line for line in lines if line)
        why = "a step failed: ArithmeticError: the numbers ran out"
        assert why in last and '"engine_dead"' in last
        waiting.join()
        assert died.is_set()
        later = (
            server.post(COMPLETIONS, prompt="a"),
            server.get("/health"),
            server.post(COMPLETIONS, prompt="a", stream=True),
            server.get("/metrics"),
        )
        for answer in (*answers, *later):
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert why in error["message"] and (error["type"], error["code"]) == ("server_error", "engine_dead")
        assert server.get("/v1/models").status_code == 200


def test_a_rank_that_dies_while_nothing_runs_is_noticed(make_llm: Callable[..., LLM]) -> None:
    with serving(make_llm()) as server:

        def gone() -> None:
            raise EngineDeadError("rank 1 was killed")

        server.engine.executor.check_health = gone  # type: ignore[method-assign]
        until(lambda: server.get("/health").status_code == 503, 5)
        assert "rank 1 was killed" in server.get("/health").json()["error"]["message"]


def test_a_bug_that_one_request_comes_upon_is_its_own(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(server.engine._admission.sampler_class, "encode", broken)
    answer = server.post(COMPLETIONS, prompt="a")
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the server failed: KeyError"
    monkeypatch.undo()
    assert server.post(COMPLETIONS, prompt="a").status_code == 200


# --------------------------------------------------------------------------- /metrics


def test_metrics_count(server: Running) -> None:
    before = metrics(server)
    with server.client.stream("POST", COMPLETIONS, json=LONG | {"stream": True, "n": 2}) as response:
        stream = events(response.iter_lines())  # kept: httpx hangs up when it is collected
        next(stream)
        during = metrics(server)
    assert during["num_requests_running", ""] == 1 and 0 < during["kv_cache_usage_perc", ""] < 1
    server.settled()
    middle = metrics(server)
    streamed(server.client, COMPLETIONS, {"prompt": [5] * 20, "max_tokens": 7, "ignore_eos": True, "n": 2})
    server.post(COMPLETIONS, prompt=[5] * 20, max_tokens=4, ignore_eos=True)
    server.settled()
    after = metrics(server)

    def grown(name: str, label: str = "") -> float:
        return after[name, label] - middle[name, label]

    assert middle["request_success_total", "abort"] - before["request_success_total", "abort"] == 2
    assert (grown("prompt_tokens_total"), grown("generation_tokens_total")) == (40, 18)
    assert (grown("prefix_cache_queries_total"), grown("prefix_cache_hits_total")) == (40, 16)
    assert grown("request_success_total", "length") == 3
    assert grown("e2e_request_latency_seconds_count") == 2
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds"):
        assert grown(f"{name}_count") == grown(f"{name}_bucket", "+Inf") == 3
        assert grown(f"{name}_sum") > 0
    assert grown("inter_token_latency_seconds_count") == 18 - 3
    assert (
        after["num_requests_running", ""] == after["num_requests_waiting", ""] == after["kv_cache_usage_perc", ""] == 0
    )


# --------------------------------------------------------------------------- without HTTP


def run_session(llm: LLM, session: Callable[[AsyncEngine], Coroutine[Any, Any, T]]) -> tuple[AsyncEngine, T]:
    """What ``session`` returns, and the engine that it had, which it starts and which is stopped then."""
    engine = AsyncEngine(llm.engine)
    try:
        return engine, asyncio.run(session(engine))
    finally:
        engine.stop()


def test_the_engines_thread_sleeps_and_wakes(make_llm: Callable[..., LLM]) -> None:
    async def session(engine: AsyncEngine) -> None:
        engine.start()
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        await asyncio.sleep(0.3)  # its first moments
        began = time.process_time()
        await asyncio.sleep(1.5)
        assert time.process_time() - began < 0.1
        generation = await engine.generate(["a", "b"], [[1, 2], [3]], params)
        tokens: dict[str, list[int]] = {"a": [], "b": []}
        async for output in generation:
            tokens[output.request_id] += output.outputs[0].token_ids
        assert [len(ids) for ids in tokens.values()] == [5, 5]

        # nobody fetches: the pieces wait as one
        for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
            slow = await engine.generate([f"c-{kind.name}"], [[1, 2]], params.clone(output_kind=kind))
            while engine.num_completions:
                await asyncio.sleep(0.01)
            pieces = [output async for output in slow]
            assert [piece.outputs[0].token_ids for piece in pieces] == [tokens["a"]]

        left = await engine.generate(["d"], [[1, 2]], params.clone(max_tokens=900))
        left.abort()
        with pytest.raises(Aborted):
            await anext(left)
        waits = asyncio.ensure_future(engine.generate(["e"], [[1, 2]], params.clone(max_tokens=900)))
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        while engine.engine.has_unfinished_requests():
            await asyncio.sleep(0.01)
        assert not engine._generations

    llm = make_llm()
    run_session(llm, session)
    llm.engine.scheduler.check()


def test_many_readers_hear_the_same_in_fewer_pieces(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they are told of something, the engine makes no outputs that would only wait for them."""
    held: list[bool] = []

    async def session(engine: AsyncEngine) -> list[list[int]]:
        engine.start()
        params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

        async def read(number: int) -> list[int]:
            tokens: list[int] = []
            async for output in await engine.generate([str(number)], [[7, number]], params):
                held.append(engine.engine.hold_outputs)
                tokens += output.outputs[0].token_ids
                time.sleep(0.001)  # what a socket takes
            return tokens

        return await asyncio.gather(*(read(number) for number in range(8)))

    said = []
    for most in (1000, 4):
        monkeypatch.setattr(engine_loop, "_MANY", most)
        llm = make_llm("scheduler.max_num_seqs=8")
        held.clear()
        said.append(run_session(llm, session)[1])
        assert any(held) == (most == 4) and not llm.engine.hold_outputs and not llm.engine.has_unfinished_requests()
    assert said[0] == said[1] and {len(tokens) for tokens in said[0]} == {60}


def test_beginnings_and_ends_do_not_wait_for_those_that_go_on(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the loop rests from telling many."""
    monkeypatch.setattr(engine_loop, "_MANY", 1)
    monkeypatch.setattr(AsyncEngine, "rest", 1e9)
    monkeypatch.setattr(engine_client, "_MOST_REST", 20.0)

    async def session(engine: AsyncEngine) -> None:
        engine.start()
        params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        long = await engine.generate(["long"], [[1, 2]], params)
        while not engine.engine.hold_outputs:
            await asyncio.sleep(0.001)
        began = time.perf_counter()
        short = await engine.generate(["short"], [[3, 4]], params.clone(max_tokens=300))
        pieces = [output.outputs[0].token_ids async for output in short]
        assert engine.engine.hold_outputs and time.perf_counter() - began < 10
        assert len(pieces) == 2 and len(pieces[0]) < 300 and sum(map(len, pieces)) == 300
        long.abort()

    run_session(make_llm(), session)


def test_a_prompt_that_fills_a_step_has_waited_too(make_llm: Callable[..., LLM]) -> None:
    """It is scheduled while it is added; one that is refused was never there."""

    async def session(engine: AsyncEngine) -> None:
        engine.start()
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        for name in ("a", "b"):
            async for _ in await engine.generate([name], [[5] * 20], params):
                pass
        with pytest.raises(RequestError, match="prompt 1: the prompt is empty"):
            await engine.generate(["c", "d"], [[5] * 20, []], params)
        while engine.engine.has_unfinished_requests():
            await asyncio.sleep(0.01)

    engine, _ = run_session(make_llm("scheduler.max_num_batched_tokens=16"), session)
    timings = engine.engine_loop.timings
    queued, first, whole = (int(h.counts.sum()) for h in (timings.queue, timings.first_token, timings.whole_request))
    assert 2 == whole <= first <= queued and not timings._arrived  # "c" may have begun before "d" was read


@pytest.mark.parametrize("length", [1, 3])
def test_the_last_token_in_a_slot_is_not_the_first_of_the_next_sequence(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Where all that run end in one step, the next step is launched before the observer is told of these tokens."""
    engine = make_llm("scheduler.max_num_seqs=1").engine
    timings = engine.observer = Timings(engine)
    queued, first, between = [], [], []
    for histogram, values in ((timings.queue, queued), (timings.first_token, first), (timings.between_tokens, between)):
        monkeypatch.setattr(histogram, "add", values.append)
    for name in "abcd":
        timings.arrived(name, time.perf_counter(), 1)
        engine.add_request(name, [1, 2, 3], SamplingParams(max_tokens=length, temperature=0, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    assert len(between) == 4 * (length - 1)
    assert all(token > began for token, began in zip(first, queued, strict=True))


def test_a_prompt_that_is_preempted_before_its_first_token_has_one(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm("cache.num_blocks=14", "scheduler.max_num_batched_tokens=4", "max_model_len=80").engine
    timings = engine.observer = Timings(engine)
    for name, prompt, length in (("a", [5] * 30, 40), ("b", list(range(60)), 3)):
        timings.arrived(name, time.perf_counter(), 1)
        engine.add_request(name, prompt, SamplingParams(max_tokens=length, temperature=0, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.stats.preemptions == 1 and timings.queue.counts.sum() == 2
    assert timings.first_token.counts.sum() == 2 and timings.between_tokens.counts.sum() == 39 + 2


def test_an_application_of_ones_own_runs_the_engine_in_a_thread(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    engine = AsyncEngine(llm.engine)
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    with TestClient(create_app(engine, ServerOptions("tiny", "somewhere"))) as client:
        whole = client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
        with client.stream("POST", COMPLETIONS, json=body | {"stream": True}) as response:
            said = [event["choices"][0]["text"] for event in events(response.iter_lines())]
        assert "".join(said) == whole
        assert 'generation_tokens_total{model_name="tiny"} 10.0' in client.get("/metrics").text
        assert client.get("/health").status_code == 200
    assert not engine._thread.is_alive() and not llm.engine.has_unfinished_requests()


def test_a_mounted_application_is_started_by_its_own_lifespan(make_llm: Callable[..., LLM]) -> None:
    app = create_app(AsyncEngine(make_llm().engine), ServerOptions("tiny", "somewhere", api_key="k"))
    body, key = {"prompt": "a", "max_tokens": 1}, {"Authorization": "Bearer k"}
    alone = FastAPI()
    alone.mount("/llm", app)
    with TestClient(alone, headers=key) as client:
        answers = [client.get("/llm/health"), client.get("/llm/ping"), client.post("/llm" + COMPLETIONS, json=body)]
        answers += [client.post("/llm/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})]
        for answer in answers:
            assert answer.status_code == 503
            assert "async with app.router.lifespan_context(app)" in answer.json()["error"]["message"]
        assert client.post("/llm/tokenize", json={"prompt": "a"}).status_code == 200

    @asynccontextmanager
    async def lifespan(outer: FastAPI) -> AsyncIterator[None]:
        async with app.router.lifespan_context(app):
            yield

    outer = FastAPI(lifespan=lifespan)
    outer.mount("/llm", app)
    with TestClient(outer) as client:
        assert client.get("/llm/health").status_code == 200
        assert client.post("/llm" + COMPLETIONS, json=body).status_code == 401
        assert client.post("/llm" + COMPLETIONS, json=body, headers=key).status_code == 200


def test_an_application_starts_again(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    engine = AsyncEngine(llm.engine)
    app = create_app(engine, ServerOptions("tiny", "somewhere"))
    body = {"prompt": "a b c", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    texts = []
    for _ in range(3):
        with TestClient(app) as client:
            texts.append(client.post(COMPLETIONS, json=body).json()["choices"][0]["text"])
            assert client.get("/health").status_code == 200
            with pytest.raises(MinivllmError, match="is started already"), TestClient(app):
                pass
        assert TestClient(app).get("/health").status_code == 503
    assert len(set(texts)) == 1


def test_an_llm_whose_engine_is_served_refuses_calls(make_llm: Callable[..., LLM]) -> None:
    async def session(engine: AsyncEngine) -> None:
        engine.start()
        for call in (llm.reload_weights, lambda: llm.generate([1, 2], use_tqdm=False)):
            with pytest.raises(RequestError, match="an AsyncEngine runs this engine: send requests to that, or stop"):
                call()

    llm = make_llm()
    run_session(llm, session)
    assert len(llm.generate([1, 2], use_tqdm=False)) == 1


def test_who_is_left_when_an_engine_stops_is_gone_when_it_starts_again(make_llm: Callable[..., LLM]) -> None:
    async def session(engine: AsyncEngine) -> int:
        engine.start()
        params = SamplingParams(max_tokens=900, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        await anext(await engine.generate([f"a{engine.engine.num_requests_added}"], [[1, 2]], params))
        return engine.engine.num_unfinished_requests

    llm = make_llm()
    engine = AsyncEngine(llm.engine)
    for _ in range(2):
        assert asyncio.run(session(engine)) == 1
        engine.stop()
        assert not llm.engine.has_unfinished_requests() and not engine.num_completions
    assert llm.engine.scheduler.blocks.num_free == llm.engine.scheduler.blocks.num_blocks


def test_an_engine_that_starts_again_at_once_hears_of_no_earlier_readers(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is told of news before it stopped comes when nobody waits for that."""
    monkeypatch.setattr(AsyncEngine, "rest", 1e9)

    async def session(engine: AsyncEngine) -> list[int]:
        engine.start()
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        generation = await engine.generate([f"a{engine.engine.num_requests_added}"], [[1, 2]], params)
        return [len(output.outputs[0].token_ids) async for output in generation if output.finished]

    async def sessions(engine: AsyncEngine) -> None:
        for _ in range(3):
            assert await session(engine) == [9]
            engine.stop()
        assert await session(engine) == [9]
        await asyncio.sleep(0.3)  # until it has been told of everything
        engine.check()
        engine.stop()

    engine = AsyncEngine(make_llm().engine)
    asyncio.run(sessions(engine))


def test_a_step_that_does_not_end_keeps_its_thread(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, go_on = make_llm(), threading.Event()
    monkeypatch.setattr(async_engine, "_PATIENCE", 0.1)
    monkeypatch.setattr(llm.engine.executor, "launch", lambda batch: go_on.wait(20))

    async def session(engine: AsyncEngine) -> None:
        engine.start()
        await engine.generate(["a"], [[1, 2]], SamplingParams())

    async def again(engine: AsyncEngine) -> None:
        engine.start()

    engine = AsyncEngine(llm.engine)
    thread = engine._thread
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(session(engine), 0.3))
    engine.stop()
    with pytest.raises(MinivllmError, match="is in a step that does not end"):
        asyncio.run(again(engine))
    go_on.set()
    thread.join(10)


def test_scripts_of_web_pages_are_let_in_where_they_are_named(make_llm: Callable[..., LLM]) -> None:
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with serving(make_llm(), api_key="k", allowed_origins=("https://a.example",)) as server:
        answer = server.client.options(COMPLETIONS, headers=asks | {"Access-Control-Request-Headers": "authorization"})
        assert answer.status_code == 200  # it has no key yet
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        models = server.client.get("/v1/models", headers=asks | {"Authorization": "Bearer k"})
        assert models.headers["access-control-allow-origin"] == "https://a.example"
        other = server.client.get("/v1/models", headers={"Origin": "https://b.example", "Authorization": "Bearer k"})
        assert "access-control-allow-origin" not in other.headers
    with serving(make_llm()) as server:
        assert server.client.options(COMPLETIONS, headers=asks).status_code == 405
