"""Tools: how a call is asked for, written, found in an answer, and told to a client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from running import OVERRIDES, SETTINGS, Running, serving, told

from minivllm import LLM
from minivllm.core.outputs import CompletionOutput, RequestOutput
from minivllm.serve.call_readers import BareCalls, CallReader, CallsOrJson, GuidedCalls, TaggedCalls
from minivllm.serve.protocol import ChatBody
from minivllm.serve.replies import ChatReply
from minivllm.serve.tool_calls import DIALECTS, ToolUse, dialect_of

CHAT = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
CITY |= {"additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASK = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 300}


def tagged(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PARIS = tagged("weather", '{"city": "Paris"}')
# what a model writes, the text of it, its calls
TAGGED = [
    ("just text, 1 < 2", "just text, 1 < 2", []),
    (" ends with <tool_c", " ends with <tool_c", []),
    ("white space \n", "white space \n", []),
    (PARIS, "", [("weather", {"city": "Paris"})]),
    (f"I look.\n\n{PARIS}\n{tagged('clock', '{}')}\n", "I look.", [("weather", {"city": "Paris"}), ("clock", {})]),
    (f"{PARIS} It rains. ", " It rains. ", [("weather", {"city": "Paris"})]),
    (tagged("f", '{"a": "</tool_call>", "b": "<tool_call>"}'), "", [("f", {"a": "</tool_call>", "b": "<tool_call>"})]),
    (PARIS.removesuffix("\n</tool_call>"), "", [("weather", {"city": "Paris"})]),
    (
        "<tool_call>\n{1: 2}\n</tool_call>" + PARIS,
        "<tool_call>\n{1: 2}\n</tool_call>",
        [("weather", {"city": "Paris"})],
    ),
    ('<tool_call>[1, "a"]</tool_call>', '<tool_call>[1, "a"]</tool_call>', []),
    ('a <tool_call>\n{"name": "weather", "argum', 'a <tool_call>\n{"name": "weather", "argum', []),
    ("a\n\n<tool_call>b</tool_call>\n c", "a\n\n<tool_call>b</tool_call>\n c", []),
    (
        f"{PARIS}\n <tool_call>b</tool_call> \n{PARIS}",
        "\n <tool_call>b</tool_call>",
        [("weather", {"city": "Paris"})] * 2,
    ),
    (f"{PARIS}<tool_call>b</tool_call>\n", "<tool_call>b</tool_call>\n", [("weather", {"city": "Paris"})]),
    ('<tool_call>{"name": "é", "parameters": {"ü": 1.50}}</tool_call>', "", [("é", {"ü": 1.5})]),
    ('<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>', "", [("f", {"a": "\ud83d"})]),
    ('<tool_call>{"name": "\\ud83d"}</tool_call>', '<tool_call>{"name": "\\ud83d"}</tool_call>', []),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    (
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [],
    ),
    (tagged("f", '{"a": NaN}'), tagged("f", '{"a": NaN}'), []),
    (tagged("f", '{"a": 1e999}'), tagged("f", '{"a": 1e999}'), []),
]
BARE = [
    ("just text {", "just text {", []),
    ("", "", []),
    (' {"name": "f", "parameters": {"a": 1}}\n', "", [("f", {"a": 1})]),
    ('{"name": "f", "arguments": {}}; {"name": "g", "parameters": {"s": "a;b"}}', "", [("f", {}), ("g", {"s": "a;b"})]),
    ('{"name": "f", "parameters": {"a": 1}', '{"name": "f", "parameters": {"a": 1}', []),
    ('{"city": "Paris"}', '{"city": "Paris"}', []),
    ('{"name": "f", "parameters": {}} and text', '{"name": "f", "parameters": {}} and text', []),
]
CASES = [(TaggedCalls, *case) for case in TAGGED] + [(BareCalls, *case) for case in BARE]


@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, 120), max_size=12))
def test_what_is_found_does_not_depend_on_where_it_was_cut(
    case: tuple[type[CallReader], str, str, list[Any]], cuts: list[int]
) -> None:
    kind, written, text, calls = case
    reader, said, found = kind(), "", []
    places = [0, *sorted(min(cut, len(written)) for cut in cuts), len(written)]
    for begin, end in pairwise(places):
        new, more = reader.read(written[begin:end], last=False)
        said, found = said + new, found + more
    new, more = reader.read("", last=True)
    said, found = said + new, found + more
    assert said == text
    assert [(call.function.name, json.loads(call.function.arguments)) for call in found] == calls
    assert all(call.model_dump_json() for call in found)  # whatever it says
    assert len({call.id for call in found}) == len(found)


NESTED = '{"city": "a } \\" \\\\", "b": [{"c": "{"}, []], "d": {}}'
GUIDED = [  # with the dialect, and whether the last call was cut off
    ("hermes", PARIS, "", [("weather", '{"city": "Paris"}')], False),
    ("hermes", f"I look. <tool\n\n{PARIS}\n{tagged('clock', '{}')}", "I look. <tool", [
        ("weather", '{"city": "Paris"}'), ("clock", "{}")], False),
    ("hermes", f"{PARIS} It rains. ", " It rains. ", [("weather", '{"city": "Paris"}')], False),
    ("hermes", tagged("weather", NESTED), "", [("weather", NESTED)], False),
    ("hermes", tagged("clock", "[1, 2]") + tagged("clock", "3"), "", [("clock", "[1, 2]"), ("clock", "3")], False),
    ("hermes", PARIS[:-9], "", [("weather", '{"city": "Paris"}')], False),
    ("hermes", tagged("weather", NESTED[:11])[:-14], "", [("weather", NESTED[:11])], True),
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": ', "", [], True),
    ("hermes", "text <tool_call>\n{", "text", [], False),
    ("hermes", "text <tool_cal", "text <tool_cal", [], False),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "}"}}', "", [("weather", '{"city": "}"}')], False),
    ("llama3_json", 'a {"name": "we', "a", [], False),
    ("llama3_json", 'a {"name"', 'a {"name"', [], False),
]  # fmt: skip


@given(case=st.sampled_from(GUIDED), cuts=st.lists(st.integers(0, 160), max_size=12))
def test_calls_that_have_to_fit_are_told_as_they_come(
    case: tuple[str, str, str, list[tuple[str, str]], bool], cuts: list[int]
) -> None:
    dialect, written, text, calls, cut = case
    reader, said = GuidedCalls(DIALECTS[dialect], alone=False), ""
    found: list[list[Any]] = []
    places = [0, *sorted(min(place, len(written)) for place in cuts), len(written), len(written)]
    for begin, end in pairwise(places):
        new, more = reader.read(written[begin:end], last=end == len(written) and begin == end)
        said += new
        for call in more:
            if call.id is not None:
                found.append([call.function.name, ""])
            found[-1][1] += call.function.arguments
        if reader.within and found and found[-1][1]:  # nothing of them is held back
            assert written[:end].endswith(found[-1][1]) or written[:end].endswith(('arguments": ', 'parameters": '))
    assert said == text and [tuple(one) for one in found] == calls and reader.within == cut


NAMED_LIKE_A_CALL = '{"name": "weathercock", "parameters": {"city": "Paris"}}'
MORE_THAN_A_CALL = '{"name": "weather", "parameters": {}, "extra": 1}'
EITHER = [  # with the dialect, and whether the last call was cut off
    ("hermes", f"{PARIS}\n{tagged('clock', '{}')}", "", [("weather", '{"city": "Paris"}'), ("clock", "{}")], False),
    ("hermes", ' {"a": "<tool_call>"}\n', ' {"a": "<tool_call>"}\n', [], False),
    ("hermes", '<tool_call>\n{"name": "weath', "", [], False),
    ("hermes", tagged("weather", NESTED[:11])[:-14], "", [("weather", NESTED[:11])], True),
    ("hermes", "", "", [], False),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "}"}}', "", [("weather", '{"city": "}"}')], False),
    ("llama3_json", NAMED_LIKE_A_CALL, NAMED_LIKE_A_CALL, [], False),
    ("llama3_json", f"[{NAMED_LIKE_A_CALL}]", f"[{NAMED_LIKE_A_CALL}]", [], False),
    ("llama3_json", '{"name": "wea', '{"name": "wea', [], False),
    ("llama3_json", MORE_THAN_A_CALL, MORE_THAN_A_CALL, [], False),
    ("llama3_json", '{"name": "weather", "parameters": {"city"', "", [("weather", '{"city"')], True),
]


@given(case=st.sampled_from(EITHER), cuts=st.lists(st.integers(0, 160), max_size=12))
def test_calls_or_json_are_told_apart_by_how_they_begin(
    case: tuple[str, str, str, list[tuple[str, str]], bool], cuts: list[int]
) -> None:
    dialect, written, text, calls, cut = case
    reader, said = CallsOrJson(DIALECTS[dialect], ["weather", "clock"]), ""
    found: list[list[str]] = []
    places = [0, *sorted(min(place, len(written)) for place in cuts), len(written)]
    for begin, end, last in [*((*pair, False) for pair in pairwise(places)), (len(written), len(written), True)]:
        new, more = reader.read(written[begin:end], last=last)
        said += new
        for call in more:
            if call.id is not None:
                found.append([call.function.name or "", ""])
            found[-1][1] += call.function.arguments
    assert said == text and [tuple(one) for one in found] == calls and reader.within == cut


def reply(written: str, *, pieces: int = 0, reason: str = "stop", **asked: Any) -> list[dict[str, Any]]:
    """The choices of an answer, whole, or in so many pieces."""
    body = ChatBody.model_validate(ASK | {"tools": [WEATHER, CLOCK], "stream": bool(pieces)} | asked)
    made = ChatReply("id", "m", ["r"], 1, False, tools=ToolUse(body, DIALECTS["hermes"]))
    if not pieces:
        output = RequestOutput("r", None, [1], [CompletionOutput(0, written, [5], finish_reason=reason)], True)
        return [json.loads(made.whole([output]).json_bytes())["choices"][0]]
    chunks: list[bytes] = []
    size = -(-len(written) // pieces)
    for begin in range(0, len(written), size):
        last = begin + size >= len(written)
        new = CompletionOutput(0, written[begin : begin + size], [5], finish_reason=reason if last else None)
        chunks += made.chunks(RequestOutput("r", None, [1], [new], last))
    return [json.loads(chunk)["choices"][0] for chunk in chunks]


def test_an_answer_with_calls() -> None:
    (choice,) = reply(f"I look.\n{PARIS}\n{tagged('clock', '{}')}")
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I look."
    first, second = choice["message"]["tool_calls"]
    assert first == {
        "id": first["id"],
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
    }
    assert second["function"] == {"name": "clock", "arguments": "{}"}
    (alone,) = reply(f"{PARIS}\n{PARIS}", parallel_tool_calls=False)
    assert alone["message"]["content"] is None and len(alone["message"]["tool_calls"]) == 1
    (text,) = reply("Nothing to look for.")
    assert (
        text["message"] == {"role": "assistant", "content": "Nothing to look for."} and text["finish_reason"] == "stop"
    )
    (named,) = reply(PARIS, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert named["finish_reason"] == "stop" and len(named["message"]["tool_calls"]) == 1  # as with OpenAI


def test_tags_within_a_string_are_tried_once() -> None:
    reader, written = (
        TaggedCalls(),
        '<tool_call>{"name": "f", "arguments": {"a": "' + "</tool_call>" * 2000 + '"}}</tool_call>',
    )
    began = time.perf_counter()
    found = [call for i in range(0, len(written), 4) for call in reader.read(written[i : i + 4], last=False)[1]]
    assert len(found) == 1 and time.perf_counter() - began < 10  # 0.5 s; each again at each piece, 80


def test_many_calls_are_found_in_linear_time() -> None:
    reader = GuidedCalls(DIALECTS["hermes"], alone=True)
    began = time.perf_counter()
    said, calls = reader.read("\n".join([PARIS] * 4000), last=True)
    assert said == "" and len(calls) == 4000 and {call.function.arguments for call in calls} == {'{"city": "Paris"}'}
    assert time.perf_counter() - began < 5  # 0.2 s


@pytest.mark.parametrize("pieces", [1, 3, 40, 200])
def test_a_stream_with_calls(pieces: int) -> None:
    choices = reply(f"I look.\n{PARIS}\n{tagged('clock', '{}')}", pieces=pieces)
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "I look."
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "weather"), (1, "clock")]
    assert all(call["type"] == "function" and call["id"] for call in calls)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


def told_calls(choices: list[dict[str, Any]]) -> list[list[Any]]:
    """As OpenAI's client puts them together: index, name, arguments."""
    found: list[list[Any]] = []
    for call in (call for choice in choices for call in choice["delta"].get("tool_calls", [])):
        if "id" in call:
            assert call["type"] == "function" and call["index"] == len(found)
            found.append([call["index"], call["function"]["name"], ""])
        else:
            assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
        found[call["index"]][2] += call["function"]["arguments"]
    return found


@pytest.mark.parametrize("pieces", [1, 3, 40, 200])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stream_of_calls_that_have_to_fit(pieces: int, reason: str) -> None:
    """A call that was cut off is one, and not the end that the others would have."""
    for written, last in ((f"{PARIS}\n{tagged('clock', '{}')}", "{}"), (f"{PARIS}\n{tagged('clock', '{')}"[:-14], "{")):
        choices = reply(written, pieces=pieces, reason=reason, tool_choice="required")
        assert told_calls(choices) == [[0, "weather", '{"city": "Paris"}'], [1, "clock", last]]
        assert all(not choice["delta"].get("content") for choice in choices)
        expected = "tool_calls" if reason == "stop" and last == "{}" else reason
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [expected]
        (whole,) = reply(written, reason=reason, tool_choice="required")
        assert [[i, *call["function"].values()] for i, call in enumerate(whole["message"]["tool_calls"])] == told_calls(
            choices
        )
        assert whole["finish_reason"] == expected and whole["message"]["content"] is None
    for cut in range(PARIS.index('{"city')):  # before its arguments have begun
        (whole,) = reply(PARIS[:cut], reason="length", tool_choice="required")
        assert not whole["message"]["content"]
        choices = reply(PARIS[: max(cut, 1)], pieces=pieces, reason="length", tool_choice="required")
        assert not any(choice["delta"].get("content") for choice in choices)


def test_how_a_model_writes_calls_is_read_from_its_template() -> None:
    qwen = 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>'
    llama = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    assert dialect_of("auto", qwen) is DIALECTS["hermes"] and dialect_of("auto", llama) is DIALECTS["llama3_json"]
    assert dialect_of("auto", "{{ messages }}") is dialect_of("auto", None) is None
    assert dialect_of("llama3_json", qwen) is DIALECTS["llama3_json"]


@pytest.fixture(scope="module")
def demo() -> Iterator[Running]:
    with LLM("demo", **SETTINGS, overrides=OVERRIDES) as llm, serving(llm, "demo") as running:
        yield running


@pytest.fixture
def client(demo: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.client.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made
    demo.settled()


def test_what_has_to_be_called_is(client: openai.OpenAI) -> None:
    """By a model that knows nothing of tools."""
    ask = ASK | {"model": "demo", "tools": [WEATHER, CLOCK]}
    weather = {"type": "function", "function": {"name": "weather"}}
    for choice, reason in ((weather, "stop"), ("required", "tool_calls")):
        said = client.chat.completions.create(**ask, tool_choice=choice, parallel_tool_calls=False).choices[0]
        assert said.finish_reason == reason and said.message.content is None
        (call,) = said.message.tool_calls
        if choice == weather:
            assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Paris")
        pieces = list(client.chat.completions.create(**ask, tool_choice=choice, parallel_tool_calls=False, stream=True))
        streamed = [one for piece in pieces for one in piece.choices[0].delta.tool_calls or []]
        assert [(one.index, one.function.name) for one in streamed if one.id] == [(0, call.function.name)]
        assert "".join(one.function.arguments for one in streamed) == call.function.arguments
        assert pieces[-1].choices[0].finish_reason == reason


def test_a_conversation_goes_on_with_what_a_tool_said(client: openai.OpenAI, demo: Running) -> None:
    ask = ASK | {"model": "demo", "tools": [WEATHER]}
    weather = {"type": "function", "function": {"name": "weather"}}
    message = client.chat.completions.create(**ask, tool_choice=weather).choices[0].message
    more = [*ASK["messages"], message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}]
    said = client.chat.completions.create(**ask | {"messages": more}, tool_choice="none").choices[0]
    assert said.message.tool_calls is None and said.message.content
    asked = [*more[:1], json.loads(message.model_dump_json(exclude_none=True)), more[2]]
    ids = demo.post("/tokenize", messages=asked, tools=[WEATHER]).json()["tokens"]
    text = demo.post("/detokenize", tokens=ids).json()["prompt"]
    call = json.dumps({"name": "weather", "arguments": json.loads(message.tool_calls[0].function.arguments)})
    assert f"assistant\n<tool_call>\n{call}\n</tool_call><|im_end|>\n<|im_start|>tool\nsunny" in text
    assert text.startswith(f"<|im_start|>system\nThese tools can be called:\n<tools>\n{json.dumps(WEATHER)}\n</tools>")


def test_a_call_that_was_cut_off_can_be_sent_back(client: openai.OpenAI, demo: Running) -> None:
    ask = ASK | {"model": "demo", "tools": [WEATHER]}
    cut = client.chat.completions.create(**ask | {"max_tokens": 34}, tool_choice="required").choices[0]
    (call,) = cut.message.tool_calls
    assert cut.finish_reason == "length"
    with pytest.raises(ValueError, match="line"):
        json.loads(call.function.arguments)
    more = [*ASK["messages"], cut.message, {"role": "tool", "tool_call_id": call.id, "content": "not JSON"}]
    said = client.chat.completions.create(**ask | {"messages": more}, tool_choice="none").choices[0]
    assert said.message.content
    asked = [*more[:1], json.loads(cut.message.model_dump_json(exclude_none=True)), more[2]]
    ids = demo.post("/tokenize", messages=asked).json()["tokens"]
    text = demo.post("/detokenize", tokens=ids).json()["prompt"]
    assert f'{{"name": "weather", "arguments": {json.dumps(call.function.arguments)}}}\n</tool_call>' in text


CAPITAL = {"type": "object", "properties": {"capital": {"type": "string", "maxLength": 8}, "sure": {"type": "boolean"}}}
CAPITAL |= {"required": ["capital", "sure"], "additionalProperties": False}
TYPED = {"type": "json_schema", "json_schema": {"name": "capital", "schema": CAPITAL}}


@pytest.mark.parametrize("dialect", ["hermes", "llama3_json"])
def test_an_answer_is_a_call_or_json_that_fits(dialect: str) -> None:
    """``response_format`` beside ``tools``, as agents ask; by a model that writes one or the other at random."""
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    ask = ASK | {"model": "demo", "tools": [strict], "response_format": TYPED, "temperature": 9.0, "n": 24, "seed": 1}
    with LLM("demo", **SETTINGS, overrides=OVERRIDES) as llm, serving(llm, "demo", tool_call_parser=dialect) as demo:
        client = openai.OpenAI(base_url=f"{demo.client.base_url}/v1", api_key="none", max_retries=0)
        whole = client.chat.completions.create(**ask)
        pieces = list(client.chat.completions.create(**ask, stream=True))
        alone = client.chat.completions.create(**ask | {"n": 4}, tool_choice="required")
        client.close()
    texts, called = dict.fromkeys(range(24), ""), dict.fromkeys(range(24), "")
    for choice in (piece.choices[0] for piece in pieces):
        texts[choice.index] += choice.delta.content or ""
        called[choice.index] += "".join(call.function.arguments for call in choice.delta.tool_calls or [])
    seen = set()
    for choice in whole.choices:
        assert texts[choice.index] == (choice.message.content or "")
        calls = choice.message.tool_calls or []
        assert called[choice.index] == "".join(call.function.arguments for call in calls)
        seen.add((choice.finish_reason, bool(calls)))
        for call in calls if choice.finish_reason == "tool_calls" else ():
            assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")
        if choice.finish_reason == "stop":
            said = json.loads(choice.message.content)
            assert said.keys() == {"capital", "sure"} and len(said["capital"]) <= 8
    assert {("stop", False), ("tool_calls", True)} <= seen
    assert all(choice.message.tool_calls for choice in alone.choices)


def test_strict_functions_and_text(demo: Running) -> None:
    """Text stays what it is; only within a call it has to fit."""
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    plain, held = (demo.post(CHAT, **ASK, tools=[tool]).json()["choices"][0] for tool in (WEATHER, strict))
    assert "Paris" in plain["message"]["content"] and plain["finish_reason"] == "stop"
    # of the tools' text "strict" is a part, too
    assert held["finish_reason"] == "stop" and "tool_calls" not in held["message"] and held["message"]["content"]
    tag = ToolUse(ChatBody.model_validate(ASK | {"tools": [strict, CLOCK]}), DIALECTS["hermes"]).tag
    assert tag is not None and tag["format"]["triggers"] == ["<tool_call>"] and len(tag["format"]["tags"]) == 2
    free = wants(uniqueItems=True)  # which nothing can hold, and nothing has to
    tag = ToolUse(ChatBody.model_validate(ASK | {"tools": [strict, free]}), DIALECTS["hermes"]).tag
    assert tag is not None
    assert [of["content"]["json_schema"] for of in tag["format"]["tags"]] == [CITY, {"type": "object"}]
    assert demo.post(CHAT, **ASK, tools=[strict, free]).status_code == 200
    assert ToolUse(ChatBody.model_validate(ASK | {"tools": [WEATHER]}), DIALECTS["hermes"]).tag is None


def deep(levels: int, last: str = "a") -> dict[str, Any]:
    """A function whose parameters are nested."""
    schema: dict[str, Any] = {"const": last}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def tags(count: int) -> dict[str, Any]:
    each = [{"begin": f"<{i}>", "content": {"type": "json_schema", "json_schema": {}}, "end": ""} for i in range(count)]
    return {"type": "structural_tag", "format": {"type": "tags_with_separator", "separator": "", "tags": each}}


def wants(**schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "g", "parameters": schema}}


def typed(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


NAMED = {"type": "function", "function": {"name": "x"}}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function"}]}, 'tools: each is {"type": "function", "function": {"name": …', "tools"),
    ({"tools": [{"type": "function", "name": "f"}]}, "not {'type': 'function', 'name': 'f'}", "tools"),
    ({"tools": [CLOCK, 5]}, "tools.1: ", "tools"),
    (
        {"tools": [{"type": "retrieval", "function": {"name": "f"}}]},
        "tools.0.type: Input should be 'function'",
        "tools",
    ),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools: a function's name has letters", "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strickt": True}}]}, "Did you mean strict?", "tools"),
    (
        {"tools": [CLOCK, wants(type="objct")], "tool_choice": "required"},
        "tools: function g: this grammar is not supported: Invalid type: objct",
        "tools",
    ),
    (
        {
            "tools": [wants(maximum=2**70), CLOCK | {"function": {"name": "h", "parameters": {"anyOf": []}}}],
            "tool_choice": "required",
        },
        "tools: function h: this grammar is not supported: Unsatisfiable schema",
        "tools",
    ),
    ({"tools": [CLOCK, CLOCK]}, "of which several are named clock", "tools"),
    ({"tools": [CLOCK] * 129}, "tools: 129 are more than 128", "tools"),
    ({"tool_choice": "required"}, "tool_choice: required needs tools", "tool_choice"),
    ({"tool_choice": "any", "tools": [CLOCK]}, "tool_choice: it is none, auto, required, or", "tool_choice"),
    ({"tool_choice": NAMED, "tools": [CLOCK]}, "tool_choice: 'x' is not among the tools: clock", "tool_choice"),
    ({"tool_choice": {"type": "function"}, "tools": [CLOCK]}, "tool_choice: it is {", "tool_choice"),
    ({"tools": [CLOCK], "response_format": tags(1)}, "response_format with tools may ask for json", "response_format"),
    ({"tools": [CLOCK], "structured_outputs": {"regex": "a"}}, "structured_outputs with tools", "structured_outputs"),
    (
        {"tools": [CLOCK], "structured_outputs": {"json": "{"}},
        "structured_outputs: json='{' is not JSON",
        "structured_outputs",
    ),
    (
        {"tools": [CLOCK], "structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        "structured_outputs with tools may ask for json or json_object, and for nothing else",
        "structured_outputs",
    ),
    (
        {"tools": [CLOCK], "response_format": typed({"type": "objct"})},
        "response_format: this grammar is not supported: Invalid type: objct",
        "response_format",
    ),
    (
        {"tools": [CLOCK], "response_format": typed({"multipleOf": 196611})},
        "response_format: multipleOf=196611 is too large",
        "response_format",
    ),
    (
        {"tools": [CLOCK], "response_format": typed({"const": "a" * 2**18})},
        "characters are more than 262144",
        "response_format",
    ),
    (
        {"tools": [CLOCK], "response_format": typed({"maximum": 2**70})},
        "response_format: json has the number 1180591620717411303424",
        "response_format",
    ),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "wrong"}}}],
            "tool_choice": "required",
        },
        "tools: function f: this grammar is not supported",
        "tools",
    ),
    (
        {"tools": [CLOCK, {"type": "function", "function": {"name": "g", "parameters": {"type": "wrong"}}}]}
        | {"tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tools: function g: this grammar is not supported",
        "tools",
    ),
    ({"tools": [deep(300)], "tool_choice": "required"}, "tools", "tools"),
    ({"tools": [deep(5, "\ud83d")]}, "tools: parameters cannot be rendered: this is not Unicode text", "tools"),
    ({"response_format": tags(129)}, "response_format: structural_tag: 129 tags are more than 128", "response_format"),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages.0.tool_calls: a tool call is {", "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages", "messages"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}]},
        "messages.0.tool_calls: arguments of 'f' are JSON as text, not 3",
        "messages",
    ),
]


@pytest.mark.parametrize(("asked", "said", "param"), BAD)
def test_what_is_refused(demo: Running, asked: dict[str, Any], said: str, param: str) -> None:
    body = json.dumps(ASK | asked)  # halves of characters spelled out
    response = demo.client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    error = told(response, 400, said, param)
    assert "response_format" in asked or "structural_tag" not in error["message"]


def test_a_template_that_knows_no_tools(server: Running) -> None:
    """And one whose calls nobody knows."""
    assert server.engine.tokenizer.chat_template is not None
    error = told(
        server.post(CHAT, **ASK | {"tools": [CLOCK]}), 400, "tools: how this model writes calls is not known", "tools"
    )
    assert "tool_choice=required" in error["message"] and "tool_call_parser=hermes or llama3_json" in error["message"]
    asked = ASK | {"tools": [CLOCK], "tool_choice": "required"}
    told(server.post(CHAT, **asked), 400, "tools: the chat template does not support tools", "tools")


def test_tags_that_are_special_tokens_are_seen(demo: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    add = demo.engine.add_request

    def noted(request_id: str, prompt: Any, params: Any, **more: Any) -> None:
        seen.append(params.skip_special_tokens)
        add(request_id, prompt, params, **more)

    monkeypatch.setattr(demo.engine, "add_request", noted)
    for more in ({"tools": [WEATHER]}, {"tools": [WEATHER], "skip_special_tokens": True}, {}):
        assert demo.post(CHAT, **ASK | more).status_code == 200
    assert seen == [False, True, True]
