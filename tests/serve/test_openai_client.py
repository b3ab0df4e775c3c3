"""OpenAI's own client finds what it expects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from running import Running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_completions_and_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert client.models.retrieve(model.id).id == model.id == "tiny"
    said = client.completions.create(model="tiny", prompt="once", max_tokens=5, seed=1, logprobs=1)
    assert said.usage is not None and said.usage.completion_tokens == 5
    assert said.choices[0].logprobs is not None and len(said.choices[0].logprobs.tokens or []) == 5
    extra = client.completions.create(model="tiny", prompt="once", max_tokens=5, seed=1, extra_body={"top_k": 1})
    assert extra.choices[0].finish_reason in ("length", "stop")


def test_a_chat_streamed_and_whole(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 9, "seed": 1}
    said = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    pieces = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == said.choices[0].message.content
    assert pieces[-1].usage == said.usage and said.usage.completion_tokens_details.reasoning_tokens == 0
    content = said.choices[0].logprobs.content
    assert len(content) == said.usage.completion_tokens and len(content[0].top_logprobs) == 2


class Person(BaseModel):
    age: Annotated[int, Field(ge=0, le=99)]
    mood: Literal["good", "bad"]


def test_answers_are_what_was_asked_for(client: openai.OpenAI) -> None:
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "seed": 1}
    parsed = client.chat.completions.parse(**ask, response_format=Person).choices[0].message.parsed
    assert parsed is not None and 0 <= parsed.age <= 99
    shaped = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema()}}
    pieces = client.chat.completions.create(**ask, response_format=shaped, stream=True)
    assert Person.model_validate_json("".join(p.choices[0].delta.content or "" for p in pieces)) == parsed
    any_object = client.chat.completions.create(**ask, response_format={"type": "json_object"}, max_tokens=9)
    assert any_object.choices[0].message.content.lstrip().startswith("{")
    chosen = client.completions.create(
        model="tiny", prompt=["once", "more"], n=2, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert len(chosen.choices) == 4 and all(one.text in ("yes", "no") for one in chosen.choices)
    assert all(one.finish_reason == "stop" for one in chosen.choices)
    ask = {"model": "tiny", "prompt": "once", "max_tokens": 40, "seed": 1, "logprobs": 0}
    free = next(token for token in client.completions.create(**ask).choices[0].logprobs.tokens if token.isalpha())
    assert free not in client.completions.create(**ask, extra_body={"bad_words": [free]}).choices[0].logprobs.tokens


def test_errors_are_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature=-1") as refused:
        client.completions.create(model="tiny", prompt="once", temperature=-1)
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="once")
    assert missing.value.code == "model_not_found"
