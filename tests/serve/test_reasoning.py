"""Reasoning: how it is found in an answer, told to a client, and left alone by a constraint."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import OVERRIDES, SETTINGS, serving, told
from streams import streamed

from minivllm import LLM
from minivllm.core.outputs import CompletionOutput, Logprob, RequestOutput
from minivllm.models.tokenizer import ByteTokenizer
from minivllm.serve.errors import ClientError
from minivllm.serve.protocol import ChatBody
from minivllm.serve.reasoning import (
    CLOSE,
    OPEN,
    ReasoningReader,
    Thinking,
    Thoughts,
    parser_of,
    thinking_of,
    tokens_until,
    variables_of,
)
from minivllm.serve.replies import ChatReply
from minivllm.serve.tool_calls import DIALECTS, ToolUse

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 40}
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
WEATHER = {"type": "function", "function": {"name": "weather"}}

CASES = [  # by how the prompt ends: what a model writes, its reasoning, its answer
    (Thinking.MAYBE, "<think>\nHm, 1 < 2.\n</think>\n\nParis. ", "Hm, 1 < 2.", "Paris. "),
    (Thinking.MAYBE, " \n<think></think>Paris", "", "Paris"),
    (Thinking.MAYBE, " Paris </think> <think> ", "", " Paris </think> <think> "),
    (Thinking.MAYBE, "<thin", "", "<thin"),
    (Thinking.MAYBE, "<think>\nHm </thin", "Hm </thin", ""),
    (Thinking.MAYBE, "<think>a </think> b <think> c </think>", "a", "b <think> c </think>"),
    (Thinking.ALWAYS, "Hm\n\nyes </think>\nParis", "Hm\n\nyes", "Paris"),
    (Thinking.ALWAYS, "<think>Hm</think>Paris", "Hm", "Paris"),
    (Thinking.ALWAYS, "\n</think>\n\n", "", ""),
    (Thinking.ALWAYS, "Hm <think> so ", "Hm <think> so ", ""),
    (Thinking.NEVER, "<think>Hm</think> Paris", "", "<think>Hm</think> Paris"),
    (Thinking.MAYBE, "", "", ""),
]


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 50), max_size=10))
def test_what_is_found_does_not_depend_on_where_it_was_cut(
    case: tuple[Thinking, str, str, str], cuts: list[int]
) -> None:
    thinking, written, reasoning, answer = case
    reader, found = ReasoningReader(thinking), ["", ""]
    places = [0, *sorted(min(cut, len(written)) for cut in cuts), len(written)]
    for begin, end in pairwise(places):
        for i, new in enumerate(reader.read(written[begin:end], last=False)):
            found[i] += new
    for i, new in enumerate(reader.read("", last=True)):
        found[i] += new
    assert found == [reasoning, answer]


BYTES = ByteTokenizer(256)


@given(
    case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 50), max_size=10), late=st.integers(0, 12),
    hidden=st.booleans(),
)  # fmt: skip
def test_tokens_of_reasoning_are_counted_and_may_be_hidden(
    case: tuple[Thinking, str, str, str], cuts: list[int], late: int, hidden: bool
) -> None:
    """Also where text comes later than its tokens, as where it may become a stop string."""
    thinking, written, reasoning, answer = case
    ids = BYTES.encode(written)
    thinks = thinking is Thinking.ALWAYS or (thinking is Thinking.MAYBE and written.lstrip().startswith(OPEN))
    expected = len(written.partition(CLOSE)[0] + CLOSE) if CLOSE in written else len(written)
    expected *= thinks
    thoughts, told_logprobs, texts = Thoughts(thinking, BYTES.decode, hidden=hidden), [], ["", ""]
    places = [0, *sorted(min(cut, len(written)) for cut in cuts), len(written)]
    for begin, end in pairwise([*places, len(written)]):
        last = begin == end == len(written)
        text = written[max(begin - late, 0) : end if last else max(end - late, 0)]
        logprobs = [{token: Logprob(0.0)} for token in ids[begin:end]]
        new = CompletionOutput(0, text, ids[begin:end], logprobs=logprobs, finish_reason="stop" if last else None)
        thought, new = thoughts.split(new)
        texts = [texts[0] + thought, texts[1] + new.text]
        assert [next(iter(values)) for values in new.logprobs or ()] == new.token_ids
        told_logprobs += new.token_ids
        if last:
            break
    assert thoughts.tokens == expected
    assert told_logprobs == (ids[expected:] if hidden else ids)
    assert texts == ["" if hidden else reasoning, answer]


@pytest.mark.parametrize("before", [0, 1, 250, 255, 256, 257, 700])
def test_the_token_that_ends_reasoning_is_found_anywhere(before: int) -> None:
    ids = BYTES.encode("a" * before + "é</think></think>" + "b" * 600)
    assert tokens_until(CLOSE, ids, BYTES.decode) == before + len("é".encode()) + len(CLOSE)
    assert tokens_until("c", ids, BYTES.decode) == len(ids)


def test_how_a_prompt_ends_says_whether_there_is_reasoning() -> None:
    qwen = "{%- if '</think>' in content %}"
    assert parser_of("auto", qwen) == parser_of("qwen3", None) == "qwen3" and parser_of("deepseek_r1", qwen) != "qwen3"
    assert parser_of("none", qwen) is parser_of("auto", "{{ messages }}") is parser_of("auto", None) is None
    for parser, prompt, begun, expected in (
        ("qwen3", "user <think> assistant\n", "", Thinking.MAYBE),
        ("qwen3", "assistant\n<think>\n", "", Thinking.ALWAYS),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", "", Thinking.NEVER),
        ("qwen3", "assistant\n<think>So", "<think>So", Thinking.ALWAYS),
        ("qwen3", "assistant\n<think>So</think>It", "<think>So</think>It", Thinking.NEVER),
        ("deepseek_r1", "assistant\n", "", Thinking.ALWAYS),
        (None, "assistant\n<think>\n", "", Thinking.NEVER),
        ("deepseek_r1", "assistant\nThe capital", "The capital", Thinking.NEVER),
        ("qwen3", "assistant\n<think></think>The tag <think> is", "The tag <think> is", Thinking.NEVER),
        ("qwen3", "assistant\n{", "{", Thinking.NEVER),
    ):
        assert thinking_of(parser, prompt, begun) is expected, prompt


def test_effort_is_what_the_template_takes() -> None:
    assert variables_of("none", "{% if enable_thinking %}", "qwen3") == {"enable_thinking": False}
    assert variables_of("low", "{% if enable_thinking %}", "qwen3") == {"enable_thinking": True}
    assert variables_of("low", "{{ reasoning_effort }}", "qwen3") == {"reasoning_effort": "low"}
    assert variables_of("none", "{{ messages }}", None) == {}
    for effort, parser in (("low", None), ("none", "deepseek_r1")):
        with pytest.raises(ClientError, match=f"reasoning_effort={effort}: .* neither"):
            variables_of(effort, "{{ messages }}", parser)


def test_tokenize_counts_a_chats_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ messages[0].content }} {{ enable_thinking }} {{ 'a' * (n or 0) }}{{ reasoning_effort }}"
    with LLM("demo", **SETTINGS, overrides=OVERRIDES) as llm:
        monkeypatch.setattr(llm.engine.tokenizer.hf_tokenizer, "chat_template", template)
        with serving(llm, "demo", reasoning_parser="qwen3") as server:
            for more, end in (
                ({"reasoning_effort": "none"}, "False none"),
                ({"reasoning_effort": "high", "chat_template_kwargs": {"n": 9}}, "True aaaaaaaaahigh"),
                ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": 0, "n": 1}}, "0 alow"),
            ):
                said = server.post("/tokenize", messages=ASK["messages"], **more).json()
                text = server.post("/detokenize", tokens=said["tokens"]).json()["prompt"]
                assert text == f"What is the capital of France? {end}"
                assert server.post(CHAT, **ASK, **more).json()["usage"]["prompt_tokens"] == said["count"]
            refused = server.post("/tokenize", messages=ASK["messages"], reasoning_effort="huge")
            told(refused, 400, "reasoning_effort: Input should be", "reasoning_effort")


def test_a_message_sent_back_has_its_reasoning_by_both_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        body = ChatBody.model_validate({"messages": [{"role": "assistant", "content": "a", name: "b"}]})
        assert body.messages[0].for_template() == {
            "role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "b"
        }  # fmt: skip
    begun = {"messages": body.messages, "continue_final_message": True, "add_generation_prompt": False}
    assert ChatBody.model_validate(begun).begun() == "a" and body.begun() == ""


def reply(
    written: str, *, pieces: int = 0, reason: str = "stop", tools: bool = False, include_reasoning: bool = True
) -> dict[str, Any]:
    """An answer's message, whole, or put together from so many pieces."""
    body = ChatBody.model_validate(ASK | {"tools": [WEATHER], "stream": bool(pieces)})
    use = ToolUse(body, DIALECTS["hermes"]) if tools else None
    thoughts = partial(Thoughts, Thinking.MAYBE, BYTES.decode, hidden=not include_reasoning)
    made = ChatReply("id", "m", ["r"], 1, False, tools=use, thoughts=thoughts)
    if not pieces:
        whole = CompletionOutput(0, written, BYTES.encode(written), finish_reason=reason)
        output = RequestOutput("r", None, [1], [whole], True)
        choice = json.loads(made.whole([output]).json_bytes())["choices"][0]
        return choice["message"] | {"finish_reason": choice["finish_reason"]}
    found: dict[str, Any] = {"role": "assistant", "content": None}
    size = -(-len(written) // pieces)
    for begin in range(0, len(written), size):
        last = begin + size >= len(written)
        text = written[begin : begin + size]
        new = CompletionOutput(0, text, BYTES.encode(text), finish_reason=reason if last else None)
        for chunk in made.chunks(RequestOutput("r", None, [1], [new], last)):
            choice = json.loads(chunk)["choices"][0]
            for name in ("reasoning", "content"):
                if choice["delta"].get(name):
                    found[name] = (found.get(name) or "") + choice["delta"][name]
            found.setdefault("tool_calls", []).extend(choice["delta"].get("tool_calls", []))
            found["finish_reason"] = choice["finish_reason"]
    return found if found["tool_calls"] else {name: value for name, value in found.items() if name != "tool_calls"}


@pytest.mark.parametrize("pieces", [0, 1, 2, 7, 30, 100])
def test_reasoning_is_told_apart_from_the_answer(pieces: int) -> None:
    written = f"<think>\nIs it {CALL}?\n</think>\n\nIt is Paris."
    for tools in (False, True):  # calls within are none
        said = reply(written, pieces=pieces, tools=tools)
        assert said == {
            "role": "assistant", "reasoning": f"Is it {CALL}?", "content": "It is Paris.", "finish_reason": "stop"
        }  # fmt: skip
    assert reply(written, pieces=pieces, include_reasoning=False) == {
        "role": "assistant", "content": "It is Paris.", "finish_reason": "stop"
    }  # fmt: skip
    called = reply(f"<think>So.</think>{CALL}", pieces=pieces, tools=True)
    assert called["reasoning"] == "So." and called["content"] is None and called["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in called["tool_calls"]] == ["weather"]
    cut = reply("<think>\nIs it", pieces=pieces, reason="length")
    assert cut == {"role": "assistant", "reasoning": "Is it", "content": None, "finish_reason": "length"}
    plain = reply("It is Paris.", pieces=pieces)
    assert plain == {"role": "assistant", "content": "It is Paris.", "finish_reason": "stop"}


def test_a_server_whose_model_thinks() -> None:
    """deepseek_r1: all that the demo model says without the tag is reasoning."""
    with LLM("demo", **SETTINGS, overrides=OVERRIDES) as llm:
        with serving(llm, "demo", reasoning_parser="none") as plain:
            text = plain.post(CHAT, **ASK).json()["choices"][0]["message"]["content"]
        with serving(llm, "demo", reasoning_parser="deepseek_r1") as thinking:
            said = thinking.post(CHAT, **ASK).json()["choices"][0]["message"]
            assert said == {"role": "assistant", "reasoning": text, "content": None}
            refused = thinking.post(CHAT, **ASK, reasoning_effort="huge")
            told(refused, 400, "reasoning_effort: Input should be", "reasoning_effort")
            begun = [*ASK["messages"], {"role": "assistant", "content": "<think>Paris</think>"}]
            asked = ASK | {"messages": begun, "add_generation_prompt": False, "continue_final_message": True}
            said = thinking.post(CHAT, **asked).json()["choices"][0]["message"]
            assert "reasoning" not in said and isinstance(said["content"], str)
            history = [*ASK["messages"], {"role": "assistant", "content": "Paris", "reasoning": "Hm"}, *ASK["messages"]]
            assert thinking.post(CHAT, **ASK | {"messages": history}).status_code == 200


def test_tokens_of_reasoning_as_clients_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a model that is held to writing some."""
    ask = ASK | {"temperature": 9.0, "n": 16, "seed": 1, "logprobs": True}
    ask |= {"logit_bias": {"30": 18}, "stop": "</think>\n\nNo"}  # for a "<"; the tag's text waits longer than the tag
    with LLM("demo", **SETTINGS, overrides=OVERRIDES) as llm, serving(llm, "demo", reasoning_parser="qwen3") as server:
        add, held = llm.engine.add_request, {"regex": "(<think>[a-z]{3,20}</think>\n\n)?(Paris|Rome), [0-9]{2}"}

        def add_held(request_id: str, prompt: Any, params: Any, **more: Any) -> None:
            add(request_id, prompt, params.clone(structured_outputs=held), **more)

        monkeypatch.setattr(llm.engine, "add_request", add_held)
        shown = server.post(CHAT, **ask).json()
        ask |= {"include_reasoning": False}
        hidden = server.post(CHAT, **ask).json()
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last = streamed(server.client, CHAT, ask | {"stream_options": options})
    count = 0
    for one, other in zip(shown["choices"], hidden["choices"], strict=True):
        mine = [chunk for chunk in chunks if chunk["choices"][0]["index"] == one["index"]]
        pieces = [token for chunk in mine for token in tokens_of(chunk["choices"][0])]
        assert tokens_of(one)[-len(pieces) :] == tokens_of(other) == pieces
        thought = "".join(tokens_of(one)[: -len(pieces)])
        assert thought == (f"<think>{one['message']['reasoning']}</think>" if "reasoning" in one["message"] else "")
        assert mine[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(tokens_of(one)) - len(pieces)
        assert one["message"]["content"] == other["message"]["content"]
        assert "".join(pieces).lstrip().partition("<|")[0] == one["message"]["content"]
        count += len(tokens_of(one)) - len(pieces)
    assert 0 < sum("reasoning" in choice["message"] for choice in shown["choices"]) < 16
    assert not any("reasoning" in choice["message"] for choice in hidden["choices"])
    usages = shown["usage"], hidden["usage"], last["usage"]
    assert all(usage["completion_tokens_details"] == {"reasoning_tokens": count} for usage in usages)


def tokens_of(choice: dict[str, Any]) -> list[str]:
    return [one["token"] for one in (choice["logprobs"] or {"content": []})["content"]]


NONE_FITS = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}, "required": ["a"]}
UNSATISFIABLE = {"type": "json_schema", "json_schema": {"name": "s", "schema": NONE_FITS}}
WRONG = {"type": "function", "function": {"name": "f", "parameters": NONE_FITS}}


def test_a_constraint_is_on_the_answer_alone() -> None:
    """qwen3: an answer may begin with the tag. Which of the two it does is drawn at random here."""
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": [1, 2]}}}
    ask = ASK | {"temperature": 9.0, "n": 32, "seed": 1, "response_format": schema}
    with LLM("demo", **SETTINGS, overrides=OVERRIDES) as llm, serving(llm, "demo", reasoning_parser="qwen3") as server:
        choices = server.post(CHAT, **ask).json()["choices"]
        tools = {"tools": [WEATHER], "tool_choice": "required"}
        for more, said, param in (  # behind reasoning errors are told as without
            ({"response_format": UNSATISFIABLE}, "response_format: this grammar is not supp", "response_format"),
            ({"response_format": None, "tools": [WRONG], "tool_choice": "required"}, "tools: function f: ", "tools"),
        ):
            told(server.post(CHAT, **ask | {"tools": [WEATHER]} | more), 400, said, param)
        calls = server.post(CHAT, **ask | tools).json()["choices"]
    messages = [choice["message"] for choice in choices if choice["finish_reason"] == "stop"]
    assert {message["content"] for message in messages} <= {"1", "2"} and messages
    thought = [choice["message"] for choice in choices if "reasoning" in choice["message"]]
    assert thought and all(message["content"] is None or message["content"] in "12" for message in thought)
    assert any("tool_calls" in choice["message"] for choice in calls)
    assert any("reasoning" in choice["message"] for choice in calls)
    assert not any(choice["message"]["content"] for choice in calls)
