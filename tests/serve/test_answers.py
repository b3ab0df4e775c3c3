"""What the endpoints answer: the engine's own texts, the same whole and in pieces, alone and in a crowd."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from running import Running, told
from streams import joined, streamed, whole

from minivllm import LLM, RequestOutput, SamplingParams
from minivllm.core.outputs import CompletionOutput
from minivllm.serve import engine_client, engine_loop
from minivllm.serve.app import EventStream
from minivllm.serve.http_process import RemoteEngine
from minivllm.serve.protocol import MAX_TEXT, ChatBody
from minivllm.serve.replies import ChatReply, CompletionReply, Reply
from minivllm.version import __version__

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "the quick brown fox jumps over"
HELLO = [{"role": "user", "content": "hello there"}]


def same_both_ways(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices, which are the same whole and streamed."""
    chat = path == CHAT
    answer = server.post(path, **body)
    assert answer.status_code == 200, answer.text
    once = whole(answer.json(), chat=chat)
    assert joined(streamed(server.client, path, body), chat=chat) == once
    return once


def test_a_completion_is_what_llm_generates(server: Running, alone: LLM) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0.8, "seed": 7}
    answer = server.post(COMPLETIONS, model="tiny", **body).json()
    (expected,) = alone.generate(PROMPT, SamplingParams(max_tokens=20, temperature=0.8, seed=7), use_tqdm=False)
    (choice,) = answer["choices"]
    said = expected.outputs[0]
    assert choice == {
        "index": 0, "text": said.text, "logprobs": None, "finish_reason": said.finish_reason, "stop_reason": None
    }  # fmt: skip
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["id"].startswith("cmpl-")
    prompt, completion = len(expected.prompt_token_ids), len(said.token_ids)
    assert answer["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_a_chat_answer_is_what_llm_chat_says(server: Running, alone: LLM) -> None:
    answer = server.post(CHAT, messages=HELLO, max_completion_tokens=12, temperature=0).json()
    (expected,) = alone.chat(HELLO, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.outputs[0].text}
    assert (answer["object"], answer["id"][:9]) == ("chat.completion", "chatcmpl-")
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


def test_a_chat_without_a_limit_may_use_what_is_left(server: Running) -> None:
    hello = [{"role": "user", "content": "x" * 900}]
    answer = server.post(CHAT, messages=hello, temperature=0, ignore_eos=True, priority=0).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == server.engine.max_model_len


def test_completions_have_openais_default_of_16_tokens(server: Running) -> None:
    answer = server.post(COMPLETIONS, prompt=PROMPT, ignore_eos=True, max_tokens=None).json()
    assert answer["usage"]["completion_tokens"] == 16


KINDS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}),
    (COMPLETIONS, {"prompt": [5, 6, 7, 300], "max_tokens": 40, "seed": 3, "temperature": 1.5}),
    (COMPLETIONS, {"prompt": [PROMPT, "once"], "n": 2, "max_tokens": 17, "seed": 3}),
    (COMPLETIONS, {"prompt": [[5, 6], [7, 8, 9]], "max_tokens": 9, "seed": 3, "logprobs": 3}),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 30, "seed": 1, "top_p": 0.5, "top_k": 9, "min_p": 0.01}),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 30, "seed": 1, "ignore_eos": True, "min_tokens": 5}),
    (
        COMPLETIONS,
        {
            "prompt": PROMPT,
            "max_tokens": 40,
            "temperature": 0,
            "ignore_eos": True,
            "presence_penalty": 1.5,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.2,
        },
    ),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logit_bias": {"14": -100, "302": 2.5}}),
    (COMPLETIONS, {"prompt": PROMPT, "max_tokens": 20, "seed": 2, "allowed_token_ids": [*range(200, 400)], "n": 2}),
    (COMPLETIONS, {"prompt": "naïve 日本語 🎈", "max_tokens": 60, "seed": 11, "temperature": 2}),
    (CHAT, {"messages": HELLO, "max_tokens": 20, "temperature": 0}),
    (CHAT, {"messages": HELLO, "max_tokens": 20, "seed": 5, "n": 3}),
    (CHAT, {"messages": HELLO, "max_tokens": 20, "seed": 5, "logprobs": True, "top_logprobs": 2}),
]


@pytest.mark.parametrize(("path", "body"), KINDS)
def test_streamed_text_is_the_whole_text(server: Running, alone: LLM, path: str, body: dict[str, Any]) -> None:
    choices = same_both_ways(server, path, body)
    if path == COMPLETIONS:
        names = {"n", "max_tokens", "temperature", "seed", "top_p", "top_k", "min_p", "ignore_eos", "min_tokens",
                 "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
                 "allowed_token_ids"}  # fmt: skip
        params = SamplingParams(**{key: value for key, value in body.items() if key in names})
        prompts = body["prompt"]
        expected = [one for output in alone.generate(prompts, params, use_tqdm=False) for one in output.outputs]
        assert [choice["text"] for choice in choices] == [one.text for one in expected]


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("kind", [CompletionReply, ChatReply])
@pytest.mark.parametrize(
    "text", ["plain", 'a "quote", a \\ and a\nline', "é 漢 🙂 \ue000 text \ue000", "\u2028\x7f</script>"]
)
def test_a_chunk_of_text_is_the_json_of_its_object(kind: type[Reply], text: str, include_usage: bool) -> None:
    """Chunks that only bring text are put together from a frame made once."""
    reply = kind("id-1", 'mod"el', ["a", "b"], 2, include_usage)
    output = RequestOutput("b", None, [1, 2], [CompletionOutput(1, text, [5])], finished=False)
    for first in (True, False):  # the frame made, and kept
        *roles, chunk = reply.chunks(output)
        assert len(roles) == (4 if first and kind is ChatReply else 0)
        expected = reply._chunk([reply._choice(3, output.outputs[0], whole=False)])
        assert json.loads(chunk) == json.loads(expected.json_bytes())
    assert reply.usage().completion_tokens == 2


def test_a_loop_that_falls_behind_sends_fewer_and_larger_events(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    (expected,) = whole(server.post(COMPLETIONS, **body).json(), chat=False)
    server.slow_down(monkeypatch, 0.005)  # else its loop may fall behind by itself
    small = streamed(server.client, COMPLETIONS, body)
    monkeypatch.setattr(engine_loop, "_MANY", 1)
    monkeypatch.setattr(RemoteEngine, "rest", 1e6)  # as long as it may be, …
    monkeypatch.setattr(engine_client, "_MOST_REST", 0.2)  # … of steps that take 5 ms and more
    large = streamed(server.client, COMPLETIONS, body)
    assert joined(small, chat=False) == joined(large, chat=False) == [expected]
    assert len(large) < len(small) / 2


def test_characters_are_never_cut(server: Running) -> None:
    """Random bytes make many broken characters; a piece must end none that the next one goes on with."""
    body = {"prompt": PROMPT, "max_tokens": 120, "seed": 4, "temperature": 3.0, "ignore_eos": True}
    text = server.post(COMPLETIONS, **body).json()["choices"][0]["text"]
    assert any(ord(c) > 127 and c != "\ufffd" for c in text)
    assert joined(streamed(server.client, COMPLETIONS, body), chat=False)[0]["text"] == text


def test_stop_strings_never_leak(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    text = server.post(COMPLETIONS, **body).json()["choices"][0]["text"]
    for at in (3, 11, 20):
        stop = text[at : at + 5]
        (choice,) = same_both_ways(server, COMPLETIONS, body | {"stop": [stop, "never said"]})
        assert choice["text"] == text[: text.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        (choice,) = same_both_ways(server, COMPLETIONS, body | {"stop": stop, "include_stop_str_in_output": True})
        assert choice["text"] == text[: text.index(stop)] + stop


def test_stop_tokens(server: Running, alone: LLM) -> None:
    (expected,) = alone.generate(PROMPT, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True), use_tqdm=False)
    tokens = expected.outputs[0].token_ids
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stop_token_ids": [tokens[9]]}
    (choice,) = same_both_ways(server, COMPLETIONS, body)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[9])


def test_logprobs_of_a_completion(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    said = server.post(COMPLETIONS, **body).json()["choices"][0]["logprobs"]
    assert {len(values) for values in said.values()} == {8}
    for token, logprob, top in zip(said["tokens"], said["token_logprobs"], said["top_logprobs"], strict=True):
        assert 1 <= len(top) <= 2  # broken characters have one text
        assert top[token] == logprob == max(top.values())
    assert said["text_offset"] == [len("".join(said["tokens"][:i])) for i in range(8)]


def test_logprobs_of_a_chat(server: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 8, "seed": 2, "logprobs": True, "top_logprobs": 3, "ignore_eos": True}
    content = server.post(CHAT, **body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    for one in content:
        assert [top["logprob"] for top in one["top_logprobs"]] == sorted(
            (top["logprob"] for top in one["top_logprobs"]), reverse=True
        )
        assert len(one["top_logprobs"]) == 3
        assert one["bytes"] == (None if "\ufffd" in one["token"] else list(one["token"].encode()))
    bare = server.post(CHAT, **(body | {"top_logprobs": None})).json()["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in bare] == [one["logprob"] for one in content]
    assert all(one["top_logprobs"] == [] for one in bare)


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_usage(server: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 5, "n": 2, "seed": 1, "ignore_eos": True}
    chunks = streamed(server.client, CHAT, body | {"stream_options": {"include_usage": True}})
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert [chunk["choices"][0]["index"] for chunk in chunks[:2]] == [0, 1]
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["id"] == chunks[0]["id"] for chunk in chunks)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 10
    plain = streamed(server.client, CHAT, body)
    assert all("usage" not in chunk and chunk["choices"] for chunk in plain)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_each_chunk_may_count_its_choices_tokens_so_far(server: Running, path: str) -> None:
    asked = {"messages": HELLO} if path == CHAT else {"prompt": [PROMPT, "a"]}
    body = asked | {"max_tokens": 6, "n": 2, "seed": 1, "ignore_eos": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = streamed(server.client, path, body | {"stream_options": options})
    by_choice: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        by_choice.setdefault(chunk["choices"][0]["index"], []).append(chunk["usage"])
    assert len(by_choice) == (2 if path == CHAT else 4)
    for usages in by_choice.values():
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts) and counts[-1] == 6 and (counts[0] == 0) == (path == CHAT)
        assert len({usage["prompt_tokens"] for usage in usages}) == 1
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)
    prompts = {index // 2: usages[0]["prompt_tokens"] for index, usages in by_choice.items()}
    assert last["usage"]["prompt_tokens"] == sum(prompts.values())
    assert last["usage"]["completion_tokens"] == 6 * len(by_choice) and last["choices"] == []


def test_the_role_comes_with_the_first_output_not_before_it() -> None:
    """Who measures takes the first chunk of a chat for its first token's."""

    async def session() -> list[bytes]:
        outputs = [RequestOutput("a", None, [1], [CompletionOutput(0, text, [2])]) for text in ("Hi", " there")]

        async def generated() -> AsyncIterator[RequestOutput]:
            for output in outputs:
                yield output

        reply = ChatReply("chat-1", "tiny", ["a"], 1, False)
        stream = EventStream(generated(), reply)  # type: ignore[arg-type]
        return [bytes(piece) async for piece in stream.body_iterator]  # type: ignore[arg-type]

    first, second, end = asyncio.run(session())
    assert b'"role":"assistant"' in first and b'"content":"Hi"' in first
    assert b'" there"' in second and b"role" not in second and end == b"data: [DONE]\n\n"


def test_a_messages_name_goes_to_the_template(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most have no place for it, and pass it over."""
    seen: list[Any] = []
    render = server.engine.tokenizer.render_chat

    def noted(messages: list[dict[str, str]], **variables: Any) -> str:
        seen.append(messages)
        return render(messages, **variables)

    monkeypatch.setattr(server.engine.tokenizer, "render_chat", noted)
    named = [message | {"name": "ann", "tool_call_id": "7"} for message in HELLO]
    for messages in (named, HELLO):
        assert server.post("/tokenize", messages=messages).status_code == 200
    assert seen == [named, HELLO]


def test_cached_tokens_are_counted_and_salts_share_nothing(server: Running) -> None:
    prompt = list(range(40, 65))  # three whole blocks of 8, and one token that is always computed

    def cached(**more: Any) -> int:
        answer = server.post(COMPLETIONS, prompt=prompt, max_tokens=2, **more).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b")) == (0, 24, 0)


def test_text_parts_are_joined(server: Running) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    as_parts = server.post("/tokenize", messages=[{"role": "user", "content": parts}]).json()
    assert as_parts == server.post("/tokenize", messages=[{"role": "user", "content": "hello\nthere"}]).json()


def test_parts_of_the_responses_api_are_text(server: Running) -> None:
    said = {"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}
    messages = [*HELLO, {"role": "assistant", "content": [said]}]
    messages += [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    assert [part.type for message in ChatBody(messages=messages).messages[1:] for part in message.content] == [
        "text", "text"
    ]  # fmt: skip
    plain = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "hello"}]
    ask = {"max_tokens": 3, "temperature": 0}
    answers = [server.post(CHAT, messages=each, **ask).json() for each in (messages, plain)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]


def test_a_request_has_the_name_that_it_brings(server: Running) -> None:
    """Also one that another has, too."""
    body = {"prompt": PROMPT, "max_tokens": 1}
    for _ in range(2):
        assert server.post(COMPLETIONS, **body, request_id="a-1").json()["id"] == "cmpl-a-1"
        headers = {"X-Request-Id": "b"}
        assert server.client.post(COMPLETIONS, json=body, headers=headers).json()["id"] == "cmpl-b"
    (event, *_) = streamed(server.client, COMPLETIONS, body | {"request_id": "a-1"})
    assert event["id"] == "cmpl-a-1"
    assert server.post(COMPLETIONS, **body, request_id="a b").status_code == 400
    assert len({server.post(COMPLETIONS, **body).json()["id"] for _ in range(2)}) == 2


def test_whole_numbers_may_be_written_as_floats(server: Running) -> None:
    body = {"prompt": PROMPT, "seed": 3, "top_k": 5, "n": 2}
    said = server.post(COMPLETIONS, **body, max_tokens=4).json()["choices"]
    assert server.post(COMPLETIONS, **body | {"top_k": 5.0, "n": 2.0}, max_tokens=4.0).json()["choices"] == said
    assert server.post(COMPLETIONS, **body, max_tokens=4.5).status_code == 400
    assert server.post(COMPLETIONS, **body, max_tokens=True).status_code == 400


def test_what_cannot_change_the_answer_is_passed_over(server: Running) -> None:
    asked = [{**message, "tool_calls": [], "annotations": []} for message in HELLO]
    assert server.post("/tokenize", messages=asked).json() == server.post("/tokenize", messages=HELLO).json()
    plain = {"messages": HELLO, "max_tokens": 6, "temperature": 0}
    more = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"}, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0,
        "best_of": 1, "parallel_tool_calls": True, "model": "", "include_reasoning": True, "max_completion_tokens": 6,
    }  # fmt: skip
    first, second = server.post(CHAT, **plain), server.post(CHAT, **plain, **more)
    assert second.status_code == 200, second.text
    assert second.json()["choices"] == first.json()["choices"]


def test_32_clients_of_all_kinds_get_what_they_get_alone(server: Running) -> None:
    work = [(path, body | {"seed": number}) for number in range(4) for path, body in KINDS][:32]
    alone = [whole(server.post(path, **body).json(), chat=path == CHAT) for path, body in work]
    order = list(range(32))
    random.Random(0).shuffle(order)

    def ask(number: int) -> list[dict[str, Any]]:
        path, body = work[number]
        if number % 2:
            return joined(streamed(server.client, path, body), chat=path == CHAT)
        return whole(server.post(path, **body).json(), chat=path == CHAT)

    with ThreadPoolExecutor(32) as clients:
        said = dict(zip(order, clients.map(ask, order), strict=True))
    for number, expected in enumerate(alone):
        assert _rounded(said[number]) == _rounded(expected), work[number]


def test_prompts_of_ids_do_not_wait_for_a_text_that_is_encoded(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, going, may_go = server.engine.tokenizer.encode_batch, threading.Event(), threading.Event()

    def slowly(texts: list[str], **options: Any) -> list[list[int]]:
        going.set()
        assert may_go.wait(60)
        return encode(texts, **options)

    monkeypatch.setattr(server.engine.tokenizer, "encode_batch", slowly)
    body = {"max_tokens": 3, "temperature": 0}
    with ThreadPoolExecutor(1) as client:
        text = client.submit(server.post, COMPLETIONS, prompt=PROMPT, **body)
        try:
            assert going.wait(60)
            ids = server.post(COMPLETIONS, prompt=encode([PROMPT])[0], **body)
            assert not text.done()
        finally:
            may_go.set()
        assert text.result().json()["choices"] == ids.json()["choices"]


def _rounded(value: Any) -> Any:
    """Log-probabilities depend on the batch's shape in their last digits."""
    if isinstance(value, float):
        return round(value, 2)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


# --------------------------------------------------------------------------- about the server


def test_models_health_and_version(server: Running) -> None:
    (model,) = server.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", server.engine.max_model_len)
    assert model["vocab_size"] == server.engine.model_config.vocab_size
    assert server.get("/v1/models/tiny").json() == model
    assert server.get("/health").status_code == 200
    for path in ("/health", "/ping", "/version", "/metrics", "/v1/models", "/v1/models/tiny"):
        answer = server.client.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path
    assert server.client.head("/v1/models/other").status_code == 404
    assert server.get("/version").json() == {"version": __version__}


def test_tokens_there_and_back(server: Running, alone: LLM) -> None:
    tokenizer = alone.engine.tokenizer
    said = server.post("/tokenize", model="tiny", prompt="naïve 日本").json()
    tokens = tokenizer.encode("naïve 日本")
    assert said == {"count": len(tokens), "max_model_len": server.engine.max_model_len, "tokens": tokens}
    assert server.post("/detokenize", tokens=tokens).json() == {"prompt": "naïve 日本"}
    assert server.post("/tokenize", messages=HELLO).json()["tokens"] == tokenizer.apply_chat_template(HELLO)
    bare = server.post("/tokenize", messages=HELLO, add_generation_prompt=False).json()["tokens"]
    assert bare == tokenizer.apply_chat_template(HELLO, add_generation_prompt=False)
    long = "a" * (MAX_TEXT + 1)
    told(server.post("/tokenize", prompt=long), 400, f"prompt: {MAX_TEXT + 1} characters are more than", "prompt")
    messages = [{"role": "user", "content": long}]
    told(server.post("/tokenize", messages=messages), 400, f"characters are more than {MAX_TEXT}", "messages")
