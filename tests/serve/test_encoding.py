"""What crosses between a server's two processes is there what it was here."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm import SamplingParams
from minivllm.config.engine_config import ModelOptions
from minivllm.core.lora_request import LoRARequest
from minivllm.core.model_config import FrozenDict, ModelConfig
from minivllm.core.outputs import CompletionOutput, Logprob, RequestOutput
from minivllm.core.sampling_params import RequestOutputKind
from minivllm.core.structured_outputs import StructuredOutputsParams
from minivllm.errors import EngineDeadError, RequestError, SchemaError, place_of
from minivllm.serve.encoding import (
    decode_from_engine,
    decode_handshake,
    decode_to_engine,
    encode_from_engine,
    encode_handshake,
    encode_to_engine,
)
from minivllm.serve.engine_client import Limits
from minivllm.serve.handshake import Begin, Go, Handshake, Refused, ServerOptions, Serving
from minivllm.serve.messages import (
    Abort,
    Add,
    AddLora,
    AskMetrics,
    Changed,
    Delivered,
    Died,
    FromEngine,
    ListLoras,
    Metrics,
    News,
    RemoveLora,
)


def crossed(message: FromEngine) -> FromEngine:
    return decode_from_engine(encode_from_engine(message))


def test_an_output_crosses_without_its_prompt() -> None:
    logprobs = [{3: Logprob(-0.5, 1, "a"), 70000: Logprob(-2.5, 2, None)}, {4: Logprob(float("-inf"), None, "é")}]
    outputs = [
        CompletionOutput(0, "é\n", [3, 4], -3.0, logprobs, "stop", "é"),
        CompletionOutput(1, "", [], None, None, "length", None),
        CompletionOutput(2, "x", [5], None, None, None, 7),
    ]
    plain = RequestOutput("c", "prompt", [5], [CompletionOutput(0, "x", [5])])
    for of_prompt in (None, [None, *logprobs]):
        said = [RequestOutput("b", "prompt", [1, 2], outputs, True, 16, of_prompt), plain]
        bare = [replace(output, prompt=None, prompt_token_ids=[]) for output in said]
        assert crossed(News([("a", None)], said)) == News([("a", None)], bare)
    assert crossed(Metrics(b"\xff# text")) == Metrics(b"\xff# text")
    assert crossed(Died.of(ValueError("half \ud800"))) == Died("ValueError: half \\ud800 (nowhere)")


def test_the_error_of_a_schema_keeps_whose_it_is() -> None:
    error = SchemaError("structured_outputs: the schema behind 'a': b")
    error.tag, error.why = 3, "b"
    ((_, found),) = crossed(News([("a", error)], [])).taken
    assert isinstance(found, SchemaError) and (found.tag, found.why) == (3, "b") and str(found) == str(error)


def test_last_words_say_of_what_and_where() -> None:
    try:
        {}["boo"]  # type: ignore[index]
    except KeyError as error:
        assert crossed(Died.of(error)) == Died(f"KeyError: 'boo' ({place_of(error)})")
    assert crossed(Died.of(EngineDeadError("rank 1 was killed"))) == Died("rank 1 was killed")
    assert Died.of(KeyboardInterrupt()).why == "KeyboardInterrupt (nowhere)"


def test_an_error_crosses_as_what_it_is() -> None:
    def refused(error: Exception) -> Exception:
        try:
            raise error
        except Exception as raised:
            message = crossed(News([("a", raised)], []))
        assert isinstance(message, News)
        (_, arrived) = message.taken[0]
        assert arrived is not None
        return arrived

    theirs = refused(RequestError("the prompt is empty \udfff"))
    assert type(theirs) is RequestError and str(theirs) == "the prompt is empty \\udfff"
    assert not hasattr(theirs, "__notes__")
    bug = refused(KeyError("a bug"))
    assert type(bug) is KeyError and "in refused" in bug.__notes__[0]
    assert str(refused(UnicodeDecodeError("utf-8", b"", 0, 1, "bad"))).startswith("UnicodeDecodeError: 'utf-8'")

    class Odd(Exception): ...

    assert str(refused(Odd("what"))) == "Odd: what"


# --------------------------------------------------------------------------- to the engine

HALF = "\ud83d\ude00 \udfff"  # whose first two would be a character if they met as escapes
WAYS = 0, 2**80  # a priority for which all is msgpack if it can be, and one that makes it JSON
ODD: list[tuple[str, Any]] = [
    ("n", 16384), ("n", 10**40), ("presence_penalty", -0.0), ("frequency_penalty", 2), ("repetition_penalty", 5e-324),
    ("temperature", 0.1 + 0.2), ("temperature", float("inf")), ("top_p", 1), ("top_k", 2**80), ("min_p", float("nan")),
    ("seed", -(2**63)), ("seed", 2**64), ("stop", [HALF, "\0", "é"]), ("stop_token_ids", [0, 10**30]),
    ("bad_words", [HALF]), ("ignore_eos", True), ("ignore_eos", 1), ("max_tokens", None), ("min_tokens", 2**63),
    ("logprobs", 0), ("prompt_logprobs", 20), ("detokenize", False), ("skip_special_tokens", False),
    ("spaces_between_special_tokens", False), ("include_stop_str_in_output", True),
    *(("output_kind", kind) for kind in RequestOutputKind), ("logit_bias", {}), ("logit_bias", {5: -1e30, 2**70: 1}),
    ("logit_bias", {3: -0.0, 1: 100}), ("allowed_token_ids", []), ("allowed_token_ids", [2**70]),
    ("structured_outputs", StructuredOutputsParams(json={HALF: [{}, None, True, 2**70, 0.1]})),
    ("structured_outputs", StructuredOutputsParams(json=True, disable_any_whitespace=True)),
    ("structured_outputs", StructuredOutputsParams(json='{"type": "object"}', whitespace_pattern="\n?")),
    ("structured_outputs", StructuredOutputsParams(choice=["a", "é"])),
    ("structured_outputs", StructuredOutputsParams(regex="[é]+")),
    ("structured_outputs", StructuredOutputsParams(grammar="start: /a/")),
    ("structured_outputs", StructuredOutputsParams(json_object=True)),
    ("logits_processors", []), ("truncate_prompt_tokens", {}), ("flat_logprobs", True), ("extra_args", {}),
    ("extra_args", {"a": [None, -0.0, 1, 1.0, True, 10**400, float("-inf"), float("nan"), {HALF: HALF}]}),
]  # fmt: skip


def added(params: SamplingParams, *prompts: list[int], cache_salt: str | None = None, priority: int = 0) -> Add:
    """As it arrives."""
    names = tuple(map(str, range(len(prompts))))
    sent = Add(names, tuple({"prompt_token_ids": ids} for ids in prompts), params, cache_salt, priority, arrived=0.1)
    add = decode_to_engine(encode_to_engine(sent))
    assert isinstance(add, Add) and (add.request_ids, add.arrived) == (names, 0.1)
    return add


def same(arrived: SamplingParams, sent: SamplingParams) -> bool:
    """To the last bit, and of the same types. (By their text: NaN is not what it equals.)"""
    return type(arrived) is SamplingParams and repr(arrived) == repr(sent)


def test_parameters_arrive_as_they_were_sent() -> None:
    assert {name for name, _ in ODD} == {f.name for f in fields(SamplingParams)}
    assert added(SamplingParams()).params == SamplingParams()
    for name, value in ODD:
        params = SamplingParams()
        setattr(params, name, value)  # some would be refused: what is refused is not this room's to say
        for priority in WAYS:
            assert same(added(params, priority=priority).params, params), name
    arrived = added(SamplingParams(structured_outputs={"regex": "a"}, logit_bias={"5": 1})).params
    assert arrived == SamplingParams(structured_outputs={"regex": "a"}, logit_bias={5: 1}) == arrived.clone()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
    max_leaves=10,
)
FREE = sorted({f.name for f in fields(SamplingParams)} - {"output_kind", "logit_bias", "structured_outputs"})


@given(st.dictionaries(st.sampled_from(FREE), JSON), st.dictionaries(st.integers(), st.integers() | st.floats()), JSON)
def test_whatever_json_can_say_arrives(values: dict[str, Any], biases: dict[int, float], schema: Any) -> None:
    params = SamplingParams(structured_outputs={"json_object": True})
    for name, value in values.items():
        setattr(params, name, value)
    params.logit_bias = biases
    assert params.structured_outputs is not None
    params.structured_outputs.json = schema
    for priority in WAYS:
        assert same(added(params, priority=priority).params, params)


PROMPTS = st.lists(st.lists(st.integers(-3, 200_000)) | st.lists(st.integers(-(2**70), 2**70)))


@given(PROMPTS, st.none() | st.text(st.characters()), st.integers())
def test_prompts_arrive_as_they_were_sent(prompts: list[list[int]], cache_salt: str | None, priority: int) -> None:
    add = added(SamplingParams(), *prompts, cache_salt=cache_salt, priority=priority)
    assert (add.cache_salt, add.priority, len(add.prompts)) == (cache_salt, priority, len(prompts))
    for arrived, sent in zip(add.prompts, prompts, strict=True):
        assert isinstance(arrived, dict) and list(arrived) == ["prompt_token_ids"]
        ids = arrived["prompt_token_ids"]
        assert list(ids) == sent
        assert isinstance(ids, np.ndarray) == all(-(2**63) <= token < 2**63 for token in sent)


@pytest.mark.parametrize("priority", WAYS)
@pytest.mark.parametrize("its", [None, LoRARequest("a", 1, "/a"), LoRARequest(HALF, 2**80, HALF, load_inplace=True)])
def test_the_adapter_of_a_request_arrives(its: LoRARequest | None, priority: int) -> None:
    sent = Add(("a",), ({"prompt_token_ids": [1]},), SamplingParams(), None, priority, 0.1, its)
    arrived = decode_to_engine(encode_to_engine(sent))
    assert isinstance(arrived, Add) and arrived.lora_request == its


def test_other_messages_arrive() -> None:
    mine = LoRARequest("é", 3, "/tmp/a b", load_inplace=True)
    changes = AddLora(1, mine), RemoveLora(2, 3), ListLoras(3)
    for message in (Abort(()), Abort(("a", "b")), Delivered(), AskMetrics("é"), *changes):
        assert decode_to_engine(encode_to_engine(message)) == message
    for value in (None, True, [1, 2]):
        answer = Changed(1, None, False, value)
        assert crossed(answer) == answer


def test_what_json_cannot_hold_is_refused() -> None:
    for value in ((1,), {1: 2}, b"a", {"b"}, np.float64(1), SamplingParams, [[{"a": [1j]}]], 10**5000):
        with pytest.raises(RequestError, match="written as JSON"):
            added(SamplingParams(extra_args={"a": value}))


def test_what_is_nested_is_refused_where_it_is_sent() -> None:
    """Where it comes in, a parser that ran out would end the engine."""
    deep: Any = 1
    for _ in range(199):
        deep = [deep]
    assert added(SamplingParams(extra_args={"a": deep})).params.extra_args == {"a": deep}
    with pytest.raises(RequestError, match=r"^vllm_xargs: this is nested too deeply$"):
        added(SamplingParams(extra_args={"a": [deep]}))
    with pytest.raises(RequestError, match=r"^structured_outputs: this is nested too deeply$"):
        added(SamplingParams(structured_outputs={"json": {"a": {"a": deep}}}))


# --------------------------------------------------------------------------- before requests

SHAPE: dict[str, Any] = {
    "architectures": ["A"], "vocab_size": 5, "hidden_size": 4, "intermediate_size": 3, "num_hidden_layers": 2,
    "num_attention_heads": 1, "eos_token_id": [1, 2**70], HALF: [HALF, {"a": [1.0, -0.0, None, True, [2**70]]}],
}  # fmt: skip


@pytest.mark.parametrize("message", [
    Begin(ModelOptions(), None, ModelConfig.from_hf(SHAPE), "auto"),
    Begin(
        ModelOptions("m", "a/b", "c", "d", "e", FrozenDict(a=(1, FrozenDict(b=2))), FrozenDict(c=float("inf"))),
        Path("/tmp/\udcff"), ModelConfig.from_hf(SHAPE | {"rope_scaling": {"type": "linear", "factor": 2}}), "dummy",
    ),
    Go(ServerOptions("m", "/"), Limits(1, 2, 3), "hello\n", 5.0, False),
    Go(ServerOptions("m", "/", adapters=(LoRARequest("a", 1, "/b"),)), Limits(1, 2, 3), "hello\n", 5.0, False),
    Go(ServerOptions(HALF, HALF, "key", 10**30), Limits(1, 2, 3), HALF, float("inf"), True),
    Serving(),
    Refused("CheckpointError", HALF),
])  # fmt: skip
def test_what_a_start_needs_arrives(message: Handshake) -> None:
    arrived = decode_handshake(encode_handshake(message))
    assert arrived == message and repr(arrived) == repr(message)
    if isinstance(arrived, Begin):
        assert type(arrived.model.hf_config) is type(arrived.model_config.hf_config) is FrozenDict
