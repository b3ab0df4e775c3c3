"""Prompts that come back: as the beginning of completions, and with their tokens' log-probabilities."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from running import Running
from streams import joined, streamed, whole

from minivllm import LLM, RequestOutput, SamplingParams
from minivllm.core.outputs import CompletionOutput, Logprob
from minivllm.core.sampling_params import RequestOutputKind
from minivllm.serve.echo import Echo
from minivllm.serve.generation import Generation
from minivllm.serve.replies import ChatReply, CompletionReply

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT, IDS = "the quick brown fox", [5, 6, 300, 41]
HELLO = [{"role": "user", "content": "hello there"}]


def choices(server: Running, **body: Any) -> list[dict[str, Any]]:
    """Of a completion, each with what it has."""
    answer = server.post(COMPLETIONS, **body)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["choices"]
    return found


def scores(alone: LLM, prompt: Any, count: int) -> RequestOutput:
    (output,) = alone.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=count), use_tqdm=False)
    return output


def near(value: Any) -> Any:
    """Equal to what is like ``value`` but for the last digits of log-probabilities, which depend on a batch's shape."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-3)
    if isinstance(value, dict):
        return {key: near(one) for key, one in value.items()}
    return [near(one) for one in value] if isinstance(value, list) else value


def as_json(entries: list[dict[int, Logprob] | None] | None) -> Any:
    assert entries is not None
    return near(json.loads(msgspec.json.encode(entries)))


def test_choices_begin_with_their_prompts(server: Running, alone: LLM) -> None:
    tokenizer = alone.engine.tokenizer
    special = tokenizer.eos_token_ids[0]
    body = {"prompt": [PROMPT, [*IDS, special]], "n": 2, "max_tokens": 6, "seed": 3}
    bare, echoed = choices(server, **body), choices(server, **body, echo=True)
    begins = [PROMPT] * 2 + [tokenizer.decode(IDS)] * 2
    assert [one["text"] for one in echoed] == [begin + one["text"] for begin, one in zip(begins, bare, strict=True)]
    assert joined(streamed(server.client, COMPLETIONS, body | {"echo": True}), chat=False) == whole(
        {"choices": echoed}, chat=False
    )
    (shown,) = choices(server, prompt=[*IDS, special], echo=True, max_tokens=1, skip_special_tokens=False)
    assert shown["text"].startswith(tokenizer.decode([*IDS, special], skip_special_tokens=False))
    assert choices(server, **body, echo=False) == bare


def test_logprobs_begin_with_the_prompts(server: Running, alone: LLM) -> None:
    body = {"prompt": IDS, "max_tokens": 4, "seed": 3, "logprobs": 2, "ignore_eos": True}
    (bare,) = choices(server, **body)
    (echoed,) = choices(server, **body, echo=True)
    expected, decode = scores(alone, IDS, 2).prompt_logprobs, alone.engine.tokenizer.decode
    assert expected is not None
    said, answer = echoed["logprobs"], bare["logprobs"]
    assert said["tokens"] == [decode([token], skip_special_tokens=False) for token in IDS] + answer["tokens"]
    assert said["token_logprobs"][0] is None and said["top_logprobs"][0] is None
    for token, logprob, top, entry in zip(IDS, said["token_logprobs"], said["top_logprobs"], expected, strict=False):
        if entry is not None:
            best = sorted(entry.values(), key=lambda one: one.logprob)
            assert logprob == near(entry[token].logprob)
            assert top == near({one.decoded_token: one.logprob for one in best})
    assert said["token_logprobs"][4:] == near(answer["token_logprobs"])
    assert said["text_offset"] == [len("".join(said["tokens"][:i])) for i in range(8)]
    assert "prompt_logprobs" not in echoed

    chunks = streamed(server.client, COMPLETIONS, body | {"echo": True, "n": 2})
    for index in range(2):
        first = next(one for chunk in chunks for one in chunk["choices"] if one["index"] == index)
        assert first["text"].startswith(decode(IDS))
        assert first["logprobs"]["token_logprobs"][:4] == near(said["token_logprobs"][:4])
    streamed_first = joined(chunks, chat=False)[0]
    assert streamed_first["text"] == echoed["text"] and streamed_first["logprobs"]["tokens"] == said["tokens"]


def test_offsets_add_up_the_texts_of_the_tokens(server: Running, alone: LLM) -> None:
    """As vLLM's do: also where tokens are parts of characters, or special ones that the text leaves out."""
    special = alone.engine.tokenizer.eos_token_ids[0]
    body = {"max_tokens": 2, "temperature": 0, "logprobs": 0, "echo": True}
    for prompt in ("漢字", [special, *IDS]):
        (choice,) = choices(server, prompt=prompt, **body)
        tokens = choice["logprobs"]["tokens"]
        assert choice["logprobs"]["text_offset"] == [len("".join(tokens[:i])) for i in range(len(tokens))]
        assert "".join(tokens) != choice["text"]


def test_lm_evaluation_harness_reads_what_it_asks_for(server: Running, alone: LLM) -> None:
    """As its ``local-completions`` does: the likelihood of continuations, and whether they are greedy."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    (greedy,) = alone.generate(IDS, params, use_tqdm=False)
    continuations = [greedy.outputs[0].token_ids, [7, 8]]
    prompts = [IDS + continuation for continuation in continuations]
    found = choices(
        server, model="tiny", prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    )  # fmt: skip
    for one, prompt, is_greedy in zip(found, prompts, (True, False), strict=True):
        logprobs = one["logprobs"]["token_logprobs"][len(IDS) : -1]
        tops = one["logprobs"]["top_logprobs"][len(IDS) : -1]
        expected = scores(alone, prompt, 0).prompt_logprobs or []
        assert logprobs == near([one.logprob for entry in expected[len(IDS) :] for one in (entry or {}).values()])
        pairs = zip(logprobs, tops, strict=True)
        assert all(value == max(top.values()) for value, top in pairs) == is_greedy


def test_nothing_but_the_echo(server: Running) -> None:
    body = {"prompt": [PROMPT, IDS], "n": 2, "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = server.post(COMPLETIONS, **body).json()
    full = choices(server, **(body | {"max_tokens": 1}))
    for one, longer in zip(answer["choices"], full, strict=True):
        assert (one["finish_reason"], one["stop_reason"]) == ("length", None)
        assert longer["text"].startswith(one["text"])
        assert {key: longer["logprobs"][key][:-1] for key in one["logprobs"]} == near(one["logprobs"])
    assert answer["choices"][0]["text"] == PROMPT
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > len(IDS)
    chunks = streamed(server.client, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    assert joined(chunks, chat=False) == near(whole(answer, chat=False))
    assert chunks[-1]["usage"]["completion_tokens"] == 0
    (text,) = choices(server, prompt=PROMPT, max_tokens=0, min_tokens=5, echo=True)
    assert (text["text"], text["logprobs"]) == (PROMPT, None)


def test_prompt_logprobs(server: Running, alone: LLM) -> None:
    body = {"max_tokens": 2, "temperature": 0}
    found = choices(server, prompt=[IDS, PROMPT], n=2, prompt_logprobs=2, **body)
    assert [one["index"] for one in found] == [0, 1, 2, 3] and found[0]["logprobs"] is None
    for one, prompt in zip(found, (IDS, IDS, PROMPT, PROMPT), strict=True):
        assert one["prompt_logprobs"][0] is None
        assert one["prompt_logprobs"] == as_json(scores(alone, prompt, 2).prompt_logprobs)
    (both,) = choices(server, prompt=IDS, prompt_logprobs=1, echo=True, logprobs=3, **body)
    assert both["prompt_logprobs"] == as_json(scores(alone, IDS, 1).prompt_logprobs)
    (echoed,) = choices(server, prompt=IDS, echo=True, logprobs=3, **body)
    assert both["logprobs"] == near(echoed["logprobs"])

    chat = server.post(CHAT, messages=HELLO, prompt_logprobs=0, **body).json()
    prompt_ids = alone.engine.tokenizer.apply_chat_template(HELLO)
    assert chat["prompt_logprobs"] == as_json(scores(alone, prompt_ids, 0).prompt_logprobs)
    assert "prompt_logprobs" not in chat["choices"][0]
    assert "prompt_logprobs" not in server.post(CHAT, messages=HELLO, **body).json()


def test_what_has_no_probability_is_a_number_in_json() -> None:
    never = {7: Logprob(float("-inf"), 9, "g")}
    output = RequestOutput("a", None, [5, 7], [CompletionOutput(0, "g", [7], 0.0, [never], "length")], True)
    output.prompt_logprobs = [None, never]
    echo = Echo(["eg"], ["e"], 0, only=False)
    choice = CompletionReply("id", "tiny", ["a"], 1, False, echo=echo, prompt_logprobs=0).whole([output]).choices[0]
    assert choice.text == "egg" and choice.model_dump()["logprobs"] == {
        "tokens": ["e", "g", "g"], "token_logprobs": [None, -9999.0, -9999.0], "text_offset": [0, 1, 2],
        "top_logprobs": [None, {"g": -9999.0}, {"g": -9999.0}],
    }  # fmt: skip
    assert choice.prompt_logprobs == [None, {7: {"logprob": -9999.0, "rank": 9, "decoded_token": "g"}}]
    chat = ChatReply("id", "tiny", ["a"], 1, False, prompt_logprobs=0).whole([output])
    assert chat.prompt_logprobs == choice.prompt_logprobs


def test_they_wait_for_a_reader() -> None:
    scored: list[Any] = [None, {6: Logprob(-1.0, 1, "b")}]
    deltas = [
        RequestOutput("a", None, [5, 6], [CompletionOutput(0, text, [1])], prompt_logprobs=logprobs)
        for text, logprobs in (("x", scored), ("y", None))
    ]

    async def read_late() -> RequestOutput:
        generation = Generation({"a": [5, 6]}, RequestOutputKind.DELTA, 1, lambda names: None)
        for delta in deltas:
            generation.take(delta)
        return await anext(generation)

    joined_ones = asyncio.run(read_late())
    assert (joined_ones.prompt_logprobs, joined_ones.outputs[0].text) == (scored, "xy")
