"""What is wrong is said in OpenAI's form, with the status that fits; nothing is accepted and ignored."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import httpx
import pytest
from running import Running, serving, told, until
from streams import streamed

from minivllm import LLM
from minivllm.serve.app import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


USER = {"role": "user", "content": "a"}
JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "f"}}
LARGE = {"enum": ["a" * 9] * 30_000}
REFUSED: list[tuple[str, dict[str, Any], str, str | None]] = [
    (CHAT, {"functions": [{"name": "f"}]}, "functions: [{'name': 'f'}] is not supported", "functions"),
    (CHAT, {"function_call": {"name": "f"}}, "function_call: {'name': 'f'} is not supported", "function_call"),
    (CHAT, {"response_format": {"type": "xml"}}, "type 'xml' is not one of text, json_object", "response_format"),
    (CHAT, {"response_format": {}}, "type None is not one of", "response_format"),
    (CHAT, {"response_format": {"type": "json_object", "a": 1}}, "type json_object has no a", "response_format"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "of which schema is a JSON schema", "response_format"),
    (CHAT, {"response_format": JSON | {"json_schema": {"name": "a"}}}, "is a JSON schema", "response_format"),
    (CHAT, {"response_format": JSON, "structured_outputs": {"regex": "a"}}, "are one thing", "response_format"),
    (COMPLETIONS, {"structured_outputs": {"regex": "(("}}, "unclosed group", "structured_outputs"),
    (COMPLETIONS, {"structured_outputs": {"regx": "a"}}, "Did you mean regex?", "structured_outputs"),
    (COMPLETIONS, {"structured_outputs": "a"}, "is not a StructuredOutputsParams", "structured_outputs"),
    (COMPLETIONS, {"guided_json": {}}, '"structured_outputs": {"json": …} now', "guided_json"),
    (COMPLETIONS, {"structured_outputs": {}}, "give one of json, regex", "structured_outputs"),
    (CHAT, {"response_format": JSON | {"json_schema": {"schema": {"type": "objct"}}}}, "objct", "response_format"),
    (CHAT, {"response_format": JSON, "min_tokens": 2}, "not supported with response_format", "min_tokens"),
    (CHAT, {"response_format": {"type": "text"}, "structured_outputs": {"regex": "(("}}, "((", "structured_outputs"),
    (CHAT, {"response_format": JSON | {"json_schema": {"schema": {"maximum": 2**70}}}}, "cannot be", "response_format"),
    (COMPLETIONS, {"bad_words": ["a"] * 5000}, "5000 are more than 4096", "bad_words"),
    (COMPLETIONS, {"structured_outputs": {"choice": ["a" * 9] * 30_000}}, "are more than 262144", "structured_outputs"),
    (CHAT, {"response_format": JSON | {"json_schema": {"schema": LARGE}}}, "are more than 262144", "response_format"),
    (
        CHAT,
        {"tools": [TOOL | {"function": {"name": "f", "parameters": LARGE}}], "tool_choice": "required"},
        "characters are more than 262144; simplify it",
        "tools",
    ),
    (COMPLETIONS, {"bad_words": [" "]}, "more than white space", "bad_words"),
    (CHAT, {"reasoning_effort": "high"}, "the model's chat template has neither", "reasoning_effort"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", "modalities"),
    (CHAT, {"logit_bias": {"a": 1.0}}, "logit_bias: token id='a' is not a whole number", "logit_bias"),
    (CHAT, {"logit_bias": {"9999999": 1.0}}, "logit_bias: 9999999 is outside the vocabulary", "logit_bias"),
    (CHAT, {"logit_bias": {"5": "much"}}, "logit_bias.5: Input should be a valid number", "logit_bias"),
    (COMPLETIONS, {"allowed_token_ids": [9999999]}, "allowed_token_ids: 9999999 is outside", "allowed_token_ids"),
    (CHAT, {"presence_penalty": 2.5}, "presence_penalty=2.5 is out of range", "presence_penalty"),
    (CHAT, {"frequency_penalty": -3}, "frequency_penalty", "frequency_penalty"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs needs logprobs=true", "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "0 to 20", "top_logprobs"),
    (CHAT, {"max_tokens": 2, "max_completion_tokens": 3}, "one thing", "max_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens=0 is less than 1 (null goes", "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 9999}, "lower max_completion_tokens, or start", "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 2, "min_tokens": 3}, "is more than max_completion_tokens=2", "min_tokens"),
    (CHAT, {"messages": [USER | {"content": "a" * 1024}]}, "leaves no room", "messages"),
    (CHAT, {"messages": []}, "at least one", "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "needs content", "messages"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "messages"),
    (CHAT, {"messages": [USER | {"nam": "b"}]}, "messages: there is no field 'nam'. Did you mean name?", "messages"),
    (CHAT, {"messages": [USER | {"content": ["a"]}]}, "a part of a content is an object, not 'a'", "messages"),
    (CHAT, {"messages": [USER | {"tool_calls": [1]}]}, "messages.0.tool_calls: a tool call is {", "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url' is not", "messages"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "cannot be set there", "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"messages": 1}}, "messages cannot be set there", "chat_template_kwargs"),
    (CHAT, {"continue_final_message": True}, 'add "add_generation_prompt": false', "continue_final_message"),
    (CHAT, {"prompt": "a"}, "there is no field 'prompt'", "prompt"),
    (CHAT, {"echo": True}, "echo: True is not supported, other than False", "echo"),
    (COMPLETIONS, {"echo": True, "prompt": [5, 512]}, "prompt: 512 is outside the vocabulary: 0 to 511", "prompt"),
    (COMPLETIONS, {"echo": 1}, "echo: ", "echo"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens=0 is less than 1", "max_tokens"),
    (COMPLETIONS, {"truncate_prompt_tokens": 5}, "is not supported yet; leave it out", "truncate_prompt_tokens"),
    (COMPLETIONS, {"echo": True, "max_tokens": -1}, "max_tokens=-1 is less than 1", "max_tokens"),
    (COMPLETIONS, {"echo": True, "logprobs": 21}, "logprobs=21 is more than 20", "logprobs"),
    (COMPLETIONS, {"suffix": "the end"}, "suffix", "suffix"),
    (COMPLETIONS, {"best_of": 3}, "best_of=3", "best_of"),
    (COMPLETIONS, {"temprature": 1}, "Did you mean temperature?", "temprature"),
    (COMPLETIONS, {"temperature": -1}, "temperature=-1.0 is out of range", "temperature"),
    (COMPLETIONS, {"temperature": "hot"}, "temperature: Input should be a valid number", "temperature"),
    (COMPLETIONS, {"top_p": 0}, "top_p=0", "top_p"),
    (COMPLETIONS, {"n": 0}, "n=0 is less than 1", "n"),
    (COMPLETIONS, {"n": 129}, "n=129 is more than 128", "n"),
    (COMPLETIONS, {"n": 2, "best_of": 1}, "best_of=1", "best_of"),
    (COMPLETIONS, {"best_of": True}, "best_of=True", "best_of"),
    (COMPLETIONS, {"prompt": ["a"] * 2049}, "2049 prompts are more than 2048", "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 100, "n": 100}, "100 prompts with n=100 are more than 8192", "prompt"),
    (COMPLETIONS, {"prompt": [10**30]}, f"token id {10**30} is outside the vocabulary: 0 to 511", "prompt"),
    (COMPLETIONS, {"prompt": [[5], [6, -(10**30)]]}, f"prompt 1: token id {-(10**30)} is outside", "prompt"),
    (COMPLETIONS, {"prompt": [2**63]}, f"token id {2**63} at index 0 is outside", "prompt"),
    (COMPLETIONS, {"stop_token_ids": [10**30]}, f"{10**30} is outside the vocabulary", "stop_token_ids"),
    (COMPLETIONS, {"vllm_xargs": {"mood": 10**30}}, "vllm_xargs has mood", "vllm_xargs"),
    (COMPLETIONS, {"n": 1.5}, "n: ", "n"),
    (COMPLETIONS, {"max_tokens": True}, "max_tokens: ", "max_tokens"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs=21 is more than 20", "logprobs"),
    (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs=21 is ", "prompt_logprobs"),
    (COMPLETIONS, {"prompt_logprobs": -1, "echo": True, "logprobs": 1}, "prompt_logprobs=-1 is ", "prompt_logprobs"),
    (COMPLETIONS, {"prompt": [[5] * 500] * 60, "n": 4, "echo": True, "logprobs": 9}, "1200000 are more", "prompt"),
    (CHAT, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs=0 is not supported with stream", "prompt_logprobs"),
    (COMPLETIONS, {"stop": [""]}, "at least one character", "stop"),
    (COMPLETIONS, {"stop": ["a"] * 129}, "129 strings are more than 128", "stop"),
    (COMPLETIONS, {"vllm_xargs": {"mood": 1}}, "vllm_xargs has mood, and sampler=default takes none", "vllm_xargs"),
    (COMPLETIONS, {"stop_token_ids": [99999]}, "99999 is outside the vocabulary", "stop_token_ids"),
    (COMPLETIONS, {"priority": 1}, "priority=1 is not supported by scheduler=mixed", "priority"),
    (COMPLETIONS, {"priority": -(10**30)}, f"priority={-(10**30)} is not supported by", "priority"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "belongs to stream=true", "stream_options"),
    (CHAT, {"stream_options": {"continuous_usage_stats": True}}, "needs include_usage=true", "stream_options"),
    (COMPLETIONS, {"prompt": []}, "prompt is a string", "prompt"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt is a string", "prompt"),
    (COMPLETIONS, {"prompt": ""}, "the prompt is empty", "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt: Field required", "prompt"),
    (COMPLETIONS, {"prompt": [5, 512]}, "token id 512 at index 1 is outside the vocabulary: 0 to 511", "prompt"),
    (COMPLETIONS, {"prompt": [[5], [6, -1]]}, "prompt 1: token id -1", "prompt"),
    (COMPLETIONS, {"prompt": [5] * 1024}, "1024 tokens, and max_model_len=1024 leaves no room", "prompt"),
    (COMPLETIONS, {"max_tokens": 5000}, "with a 1-token prompt exceeds max_model_len=1024", "max_tokens"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "belongs to messages", "add_generation_prompt"),
    ("/tokenize", {"prompt": "a", "reasoning_effort": "low"}, "belongs to messages", "reasoning_effort"),
    ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "belongs to a text", "add_special_tokens"),
    ("/tokenize", {}, "give prompt, a string, or messages", "prompt"),
    ("/detokenize", {"tokens": [1, 900]}, "900 is outside the vocabulary", "tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "message", "param"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused(
    server: Running, path: str, body: dict[str, Any], message: str, param: str | None, stream: bool
) -> None:
    good: dict[str, Any] = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": [5]}}.get(path, {})
    if path in (CHAT, COMPLETIONS) and param != "stream_options":
        good["stream"] = stream
    told(server.post(path, **(good | body)), 400, message, param)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"priority": 1}, "priority=1 is not supported by"),
        ({"cache_salt": ""}, "cache_salt='' is empty"),
        ({"vllm_xargs": {"mood": 1}}, "vllm_xargs has mood"),
        ({"stop_token_ids": [512]}, "stop_token_ids: 512 is outside"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs: this grammar"),
    ],
)
def test_what_is_wrong_with_all_prompts_alike_is_blamed_on_none(
    server: Running, asked: dict[str, Any], said: str
) -> None:
    error = told(server.post(COMPLETIONS, prompt=[[5], [6]], **asked), 400, said, next(iter(asked)))
    assert error["message"].startswith(said)


def test_one_bad_prompt_refuses_all_and_leaves_nothing(server: Running) -> None:
    before, accepted = server.engine.stats.output_tokens, server.engine.stats.prompt_tokens
    told(server.post(COMPLETIONS, prompt=[[5, 6], [7], [512]], max_tokens=500), 400, "prompt 2: token id 512", "prompt")
    server.settled()
    assert server.engine.stats.prompt_tokens == accepted
    assert server.engine.stats.output_tokens - before <= 4  # a step that was under way at most


def test_what_is_nested_or_long_is_quoted_in_part(server: Running) -> None:
    headers = {"Content-Type": "application/json"}
    for depth in range(940, 1000, 2):  # until the parser refuses it
        body = b'{"prompt": "a", "tools": ' + b"[" * depth + b"]" * depth + b"}"
        assert server.client.post(COMPLETIONS, content=body, headers=headers).status_code == 400
    for depth in (3, 300, 500, 900):  # of which the deep ones do not come to the engine
        body = b'{"prompt": "a", "vllm_xargs": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
        assert server.client.post(COMPLETIONS, content=body, headers=headers).status_code == 400
    for name in ("vllm_xargs", "structured_outputs"):
        deep = json.loads('{"json":' * 300 + "{}" + "}" * 300)
        told(server.post(COMPLETIONS, prompt="a", **{name: deep}), 400, f"{name}: this is nested too deeply", name)
    server.settled()
    error = told(server.post(COMPLETIONS, prompt="a", functions=["x" * 5000]), 400, "functions: ['xxx", "functions")
    assert len(error["message"]) < 400
    told(server.post(COMPLETIONS, prompt="a", stop=5), 400, "stop: it is a string, or a list of strings", "stop")
    told(server.post(COMPLETIONS, prompt="a", stop=["a", 5]), 400, "a list of strings", "stop")
    told(
        server.post(CHAT, messages=[{"role": "user", "content": 5}]), 400, "messages.0.content: it is a string, or a",
        "messages",
    )  # fmt: skip


def test_what_is_too_long_has_a_code(server: Running) -> None:
    """By which clients know that a shorter conversation may do."""
    for body in (
        {"prompt": [1] * 1020, "max_tokens": 9},
        {"prompt": [[1], [1] * 1020], "max_tokens": 9},
        {"prompt": [1] * 1024},
    ):
        error = told(server.post(COMPLETIONS, **body), 400, "this model's maximum context length is 1024 tokens", ANY)
        assert error["code"] == "context_length_exceeded"
    assert told(server.post(COMPLETIONS, prompt="a", max_tokens=0), 400, "max_tokens=0", "max_tokens")["code"] is None


def test_unknown_models_and_paths(server: Running) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO}), ("/tokenize", {"prompt": "a"})):
        error = told(
            server.post(path, model="gpt-9", **body), 404, "no model 'gpt-9' here; this server has 'tiny'", "model"
        )
        assert error["code"] == "model_not_found"
    told(server.get("/v1/models/gpt/9"), 404, "'gpt/9'", "model")
    told(server.get("/v1/nothing"), 404, "GET /v1/nothing: Not Found; there are /v1/completions, /v1/chat/completions")
    told(server.post("/chat/completions"), 404, "POST /chat/completions: Not Found; there are /v1/completions")
    told(server.get(COMPLETIONS), 405, "Method Not Allowed")


def test_bodies_that_are_no_json_objects(server: Running) -> None:
    def send(content: str | bytes, kind: str = "application/json", path: str = COMPLETIONS) -> httpx.Response:
        return server.client.post(path, content=content, headers={"Content-Type": kind})

    told(send('{"prompt": '), 400, "the body is not JSON: Expecting value: line 1 column 12")
    told(send('{"n": 1,\n "prompt": }'), 400, "the body is not JSON: Expecting value: line 2 column 12")
    told(send('{"prompt": "a", "seed": %s}' % ("1" * 5000)), 400, "the body has a number with too many digits")
    told(send(b'{"prompt": "\xff\xfe"}'), 400, "the body is not JSON: it is not text in UTF-8")
    told(send('{"prompt": ' + "[" * 100_000), 400, "the body is not JSON: it is nested too deeply")
    told(send('{"prompt": "\\ud800"}'), 400, "prompt: this is not Unicode text", "prompt")
    half = '{"messages": [{"role": "user", "content": "\\ud800"}]}'
    told(send(half, path=CHAT), 400, "this is not Unicode text", "messages")
    told(send('{"prompt": "a", "temperature": NaN}'), 400, "temperature=nan", "temperature")
    told(send('{"prompt": "a", "cache_salt": ""}'), 400, "cache_salt='' is empty", "cache_salt")
    told(send('{"prompt": "a", "cache_salt": "\\ud800"}'), 400, "this is not Unicode text", "cache_salt")
    told(send('{"prompt": "a", "\\ud800": 1}'), 400, "there is no field", "\\ud800")
    told(send('{"prompt": "a", "vllm_xargs": {"\\ud800": 1}}'), 400, "vllm_xargs has \\ud800", "vllm_xargs")
    told(send('{"prompt": "a", "stop": ["\\ud800"]}'), 400, "stop: '\\ud800' contains a lone surrogate", "stop")
    told(send('{"prompt": "a", "seed": 1%s}' % ("0" * 40)), 400, "more than 18446744073709551615", "seed")
    for kind in ("application/vnd.api+json", "Application/JSON; charset=utf-8"):  # which are JSON, too
        assert send('{"prompt": "a", "max_tokens": 1}', kind).status_code == 200
        told(send('{"prompt": "a", "temperature": "hot"}', kind), 400, "temperature: ", "temperature")
        told(send('{"prompt": ', kind), 400, "the body is not JSON")
    told(send('{"prompt": "a"}', "application/jsonx"), 415, "Content-Type: application/json")
    told(send("[1]"), 400, "the body is not a JSON object")
    told(send('{"prompt": "a"}', "application/x-www-form-urlencoded"), 415, "Content-Type: application/json")


def test_a_key_is_asked_for(make_llm: Callable[..., LLM]) -> None:
    with serving(make_llm(), api_key="s3cret") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}, {"X-Api-Key": "s3cret"}):
            for path in ("/v1/models", COMPLETIONS, "/tokenize", "/docs"):
                response = server.client.get(path, headers=headers)
                as_bearer = headers.get("Authorization", "").startswith("Bearer")
                error = told(response, 401, "the key is wrong" if as_bearer else "header Authorization: Bearer KEY")
                assert error["code"] == "invalid_api_key"
        for path in ("/health", "/version", "/metrics"):
            assert server.get(path).status_code == 200
        assert server.client.get("/v1/models", headers={"Authorization": "bearer s3cret"}).status_code == 200
        server.client.headers["Authorization"] = "Bearer s3cret"
        assert server.get("/v1/models").status_code == 200
        assert server.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 200


def test_a_full_queue_is_told_to_come_again(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}
    with serving(make_llm("scheduler.max_num_seqs=1"), max_waiting=1) as server:
        clients = [threading.Thread(target=server.post, args=(COMPLETIONS,), kwargs=long) for _ in range(2)]
        for client in clients:
            client.start()
        until(lambda: server.engine_client.num_completions == 2)
        with monkeypatch.context() as patch:  # before texts become tokens
            patch.setattr(Server, "_encode", None)
            chat = server.post(CHAT, messages=[{"role": "user", "content": "a"}], max_tokens=1)
            refused = server.post(COMPLETIONS, prompt="a", max_tokens=1)
        told(chat, 503, "2 completions run or wait")
        assert told(refused, 503, "2 completions run or wait: 1 may run, and max_waiting=1")["code"] == "overloaded"
        assert refused.headers["retry-after"] == "1"
        told(
            server.post(COMPLETIONS, prompt="a", n=3, max_tokens=1),
            400,
            "3 completions are more than this server takes",
        )
        for client in clients:
            client.join()
        refused = server.post(COMPLETIONS, prompt=["a", "b"], n=1, max_tokens=1)
        assert refused.status_code == 200, refused.text
        assert len(streamed(server.client, COMPLETIONS, {"prompt": "a", "max_tokens": 3, "ignore_eos": True})) <= 3
        server.settled()


def test_a_checkpoint_without_a_chat_template(make_llm: Callable[..., LLM]) -> None:
    with serving(make_llm(chat=False)) as server:
        told(server.post(CHAT, messages=HELLO), 400, "has no chat template")
        assert server.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 200
